"""Commit: what was accepted goes into the draft's context and to whoever plans the next step.

Features are injected in every step, one that drafted nothing included, as upstream does (0.5.23,
sglang/srt/speculative/dspark_components/dspark_kv_inject.py): a skipped draft leaves no debt.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.serving.step.verify import Verified


def commit(worker: Any, batch: Any, window: Any, layout: Any, verified: Verified, out: Any) -> None:
    """Hidden states of accepted rows as keys and values of the draft, unless a graph did it."""
    epilogue = worker._verify_executor.verify_epilogue
    if not (verified.folded and epilogue.folds_commit):
        worker._verify_executor.commit_hidden(
            batch=batch,
            layout=layout,
            hidden_strided=verified.hidden,
            verify_window=window,
            logits_output=verified.outputs,
            commit_lens=out.commit_lens,
            bs=len(batch.seq_lens),
            run_compact=True,
        )
    verified.outputs.hidden_states = None


def result_of(worker: Any, verified: Verified, layout: Any, out: Any) -> Any:
    """Upstream's `GenerationBatchResult` of a decode step."""
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input

    return GenerationBatchResult(
        logits_output=verified.outputs,
        next_token_ids=out.out_tokens.reshape(-1),
        accept_lens=out.commit_lens,
        block_accept_lens=worker._block_accept_lens(
            accept=out, folded_accept=verified.folded, bs=len(out.commit_lens)
        ),
        cap_lens=layout.verify_lens,
        can_run_cuda_graph=verified.in_graph,
        next_draft_input=make_next_draft_input(
            bonus_tokens=out.bonus, new_seq_lens=out.new_seq_lens
        ),
        speculative_num_draft_tokens=int(worker.verify_num_draft_tokens),
        new_seq_lens=out.new_seq_lens,
    )
