"""Commit: write the pass to the draft's context, and return the step's result.

Every step that runs the stages passes its features to the device, with or without drafts, as
upstream does (sglang/srt/speculative/dspark_components/dspark_kv_inject.py). A GPU writes them
at once; a CPU may delay the write until a draft reads them (backends/cpu/context_kv.py).
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dspark.serving import upstream
from sglang_dspark.step.device import Device
from sglang_dspark.step.verify import VerifyInput, VerifyOutput


def commit(device: Device, inputs: VerifyInput, verified: VerifyOutput, accepted: Any) -> None:
    """Write hidden states of the pass as keys and values of the draft's context."""
    device.commit(inputs, verified, accepted)
    verified.outputs.hidden_states = None


def result_of(worker: Any, inputs: VerifyInput, verified: VerifyOutput, accepted: Any) -> Any:
    """Return upstream's `GenerationBatchResult` of a decode step."""
    results = (accepted.new_seq_lens, accepted.out_tokens, accepted.commit_lens)
    if verified.folded:
        # They are the graph's own buffers, which the next replay overwrites: lengths are read after
        # it, and tokens and counts are copied to the host on a stream that it does not wait for.
        results = tuple(each.clone() for each in results)
    lens, tokens, counts = results
    return upstream.GenerationBatchResult(
        logits_output=verified.outputs,
        next_token_ids=tokens.reshape(-1),
        accept_lens=counts,
        block_accept_lens=worker._block_accept_lens(
            accept=accepted, folded_accept=verified.folded, bs=inputs.requests
        ),
        cap_lens=inputs.layout.verify_lens.to(torch.int32),
        can_run_cuda_graph=verified.in_graph,
        next_draft_input=upstream.make_next_draft_input(
            bonus_tokens=accepted.bonus, new_seq_lens=lens
        ),
        speculative_num_draft_tokens=int(worker.verify_num_draft_tokens),
        new_seq_lens=lens,
    )
