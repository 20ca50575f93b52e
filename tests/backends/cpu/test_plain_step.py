"""Steps without drafts in their fast path: what each leaves in both caches, and their tokens."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang_dspark.backends.cpu import plain_step
from sglang_dspark.backends.cpu.context_kv import Committed, write_context
from sglang_dspark.verify.seeded import seeded_choice
from tests.backends.cpu.test_context_kv import SLOTS, Draft, draft, pool
from tests.backends.cpu.test_ragged_commit import (
    LONGEST,
    PROMPTS,
    REQUESTS,
    VOCAB,
    WIDTH,
    Target,
    assert_caches_hold,
    plain_tokens,
    target,
    worker_of,
)
from tests.backends.cpu.test_seeded_ops import info

__all__ = ["draft", "target"]  # the fixtures

ROWS = (2, 0, 3, 1)  # of the pool, in the order of the batch's requests
STEPS = 3


def table_of() -> Tensor:
    """[rows, context] slots of the pool, in no order."""
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)) + 1
    return slots.view(REQUESTS, LONGEST)


def batch_of(anchors: Tensor, lens: Tensor, sampling_info: Any = None, reqs: Any = ()) -> Any:
    return SimpleNamespace(
        seq_lens=lens,
        req_pool_indices=torch.tensor(ROWS),
        spec_info=SimpleNamespace(bonus_tokens=anchors),
        sampling_info=sampling_info,
        reqs=reqs,
    )


def test_both_caches_hold_what_plain_decoding_writes(draft: Draft, target: Target) -> None:
    """Unequal prompts and rows in another order."""
    ours, theirs, table = pool(), pool(), table_of()
    worker = worker_of(draft, ours, table)
    texts = plain_tokens(target, STEPS + 1)
    lens = torch.tensor(PROMPTS) - 1
    anchors = torch.tensor([text[at] for text, at in zip(texts, lens.tolist(), strict=True)])

    committed: list[Committed] = []

    def write(rows: Committed) -> None:
        committed.append(rows)
        write_context(worker, rows)

    for _ in range(STEPS):
        published: list[Tensor] = []
        with torch.inference_mode():
            done = plain_step.run(worker, batch_of(anchors, lens), published.append, write)
        assert committed[-1].tokens.tolist() == anchors.tolist()
        assert committed[-1].requests.tolist() == list(ROWS)
        tokens = done.next_token_ids.view(REQUESTS, WIDTH)[:, 0]
        following = [text[at + 1] for text, at in zip(texts, lens.tolist(), strict=True)]
        assert tokens.tolist() == done.next_draft_input.bonus_tokens.tolist() == following
        assert done.accept_lens.tolist() == [1] * REQUESTS
        anchors, lens = tokens, lens + 1
        for told in (*published, done.new_seq_lens, done.next_draft_input.new_seq_lens):
            assert told.tolist() == lens.tolist()
        assert len(published) == 1

    spans = [(prompt - 1, prompt - 1 + STEPS) for prompt in PROMPTS]
    assert_caches_hold(draft, target, ours, theirs, texts, table[list(ROWS)], spans)


def test_a_seed_draws_by_the_position_of_the_anchor(draft: Draft, target: Target) -> None:
    """Seed 0 is one. The last request is greedy."""
    worker = worker_of(draft, pool(), table_of())
    anchors, lens = torch.tensor([4, 9, 13, 21]), torch.tensor([5, 0, 30, 8])
    seeds = [0, 7, 0, 11]

    with torch.inference_mode():
        settings = info([1.0, 1.0, 1.0, 0.0])
        reqs = [
            SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed, top_k=top_k))
            for seed, top_k in zip(seeds, settings.top_ks.tolist(), strict=True)
        ]
        done = plain_step.run(
            worker,
            batch_of(anchors, lens, settings, reqs),
            None,
            partial(write_context, worker),
        )
    likeliest = [
        target.following(t, p) for t, p in zip(anchors.tolist(), lens.tolist(), strict=True)
    ]
    probs = torch.nn.functional.one_hot(torch.tensor(likeliest), VOCAB).float().softmax(-1)
    expected = seeded_choice(probs, torch.tensor(seeds), lens)
    expected[3] = likeliest[3]
    assert done.next_token_ids.view(REQUESTS, WIDTH)[:, 0].tolist() == expected.tolist()
