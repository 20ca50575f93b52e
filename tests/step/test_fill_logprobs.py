"""Log-probabilities and sampling masks of a step, by upstream's own code, where they are asked for.

All requests are greedy here: one token has all probability, and log-probabilities are those of the
logits themselves.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.step.verify import fill_logprobs

GAMMA, VOCAB = 2, 5
OUT = torch.tensor([[3, 1, 0], [4, 4, 2], [0, 2, 1]])  # [R, gamma + 1]
LOGITS = torch.randn(len(OUT) * (GAMMA + 1), VOCAB, generator=torch.Generator().manual_seed(0))


def explained(masks_of: list[int] | None = None, *, logprobs: bool = False) -> Any:
    """Return a step's outputs for three requests."""
    requests = len(OUT)
    info = SimpleNamespace(
        is_all_greedy=True,
        sampling_mask_batch_indices=None if masks_of is None else torch.tensor(masks_of),
        sampling_mask_top_ks=[1] * requests,
        sampling_support_logprobs_capture_indices=None,
    )
    batch = SimpleNamespace(
        sampling_info=info,
        return_logprob=logprobs,
        seq_lens=torch.arange(requests),
        top_logprobs_nums=None,
        token_ids_logprobs=None,
    )
    block = SimpleNamespace(greedy_mask=None)
    asked: Any = SimpleNamespace(
        batch=batch,
        draft_input=None,
        requests=requests,
        proposal=SimpleNamespace(draft_block=block),
    )
    outputs = SimpleNamespace(next_token_logits=LOGITS)
    verified: Any = SimpleNamespace(outputs=outputs)
    accepted = SimpleNamespace(out_tokens=OUT, commit_lens=torch.tensor([1, 3, 2]))
    fill_logprobs(SimpleNamespace(verify_num_draft_tokens=GAMMA + 1), asked, verified, accepted)
    return outputs


def test_what_no_request_asks_for_is_not_computed() -> None:
    assert vars(explained()).keys() == {"next_token_logits"}


def test_masks_are_of_the_requests_that_ask() -> None:
    output = explained([0, 2]).sampling_mask_output
    assert output.token_ids.tolist() == OUT[[0, 2]].unsqueeze(-1).tolist()
    assert output.lengths.tolist() == [[1] * 3] * 2
    assert not hasattr(explained([0, 2]), "next_token_logprobs")


def test_log_probabilities_are_of_the_tokens_put_out() -> None:
    found = explained(logprobs=True)
    rows = torch.log_softmax(LOGITS, dim=-1).view(len(OUT), GAMMA + 1, VOCAB)
    expected = rows.gather(2, OUT.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.next_token_logprobs, expected)
    assert not hasattr(found, "sampling_mask_output")
