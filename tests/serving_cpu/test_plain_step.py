"""Steps without drafts in their fast path: what each leaves in both caches, and their tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector

from sglang_dspark.serving.cpu import plain_step
from sglang_dspark.verify.seeded import seeded_choice
from tests.serving_cpu.test_context_kv import SLOTS, Draft, draft, pool
from tests.serving_cpu.test_ragged_commit import (
    LONGEST,
    PROMPTS,
    REQUESTS,
    VOCAB,
    WIDTH,
    Target,
    assert_caches_hold,
    plain_tokens,
)
from tests.serving_cpu.test_seeded_ops import info

__all__ = ["draft"]  # the fixture

ROWS = (2, 0, 3, 1)  # of the pool, in the order of the batch's requests
STEPS = 3


def output_of(target: Target, ids: Tensor, positions: Tensor, slots: Tensor) -> Any:
    """The target's pass over one row of each request."""
    window = SimpleNamespace(verify_ids=ids, positions=positions, verify_cache_loc=slots)
    return target.verify(ragged_window=window).logits_output


def worker_of(target: Target, model: Draft, buffers: Any, table: Tensor) -> Any:
    """Build what a plain step reads of a worker. SGLang's runner is only its target's pass."""

    def forward_batch_generation(*, forward_batch: Any, **unused: Any) -> Any:
        asked = forward_batch
        assert asked.seq_lens.tolist() == asked.positions.tolist()
        output = output_of(target, asked.input_ids, asked.positions, asked.out_cache_loc)
        return SimpleNamespace(logits_output=output)

    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table.to(torch.int32)),
        kv_index_translator=SimpleNamespace(bind_own_plan=lambda forward: None),
        attn_backend=SimpleNamespace(init_forward_metadata=lambda forward: None),
    )
    injector = TargetHiddenKvInjector(
        draft_model=model,
        draft_model_runner=SimpleNamespace(token_to_kv_pool=buffers, kv_index_translator=None),
        model_runner=runner,
        device="cpu",
        verify_num_draft_tokens=WIDTH,
        block_pos_offsets=torch.arange(WIDTH),
    )
    tp_sync = SimpleNamespace(sync=lambda site, values: values)
    return SimpleNamespace(
        model_runner=runner,
        target_worker=SimpleNamespace(forward_batch_generation=forward_batch_generation),
        verify_num_draft_tokens=WIDTH,
        _kv_injector=injector,
        _verify_executor=SimpleNamespace(_tp_sync=tp_sync),
    )


def table_of() -> Tensor:
    """[rows, context] slots of the pool, in no order."""
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)) + 1
    return slots.view(REQUESTS, LONGEST)


def batch_of(anchors: Tensor, lens: Tensor, sampling_info: Any = None) -> Any:
    return SimpleNamespace(
        seq_lens=lens,
        req_pool_indices=torch.tensor(ROWS),
        spec_info=SimpleNamespace(bonus_tokens=anchors),
        sampling_info=sampling_info,
    )


@pytest.mark.parametrize("short", [True, False])
def test_both_caches_hold_what_plain_decoding_writes(draft: Draft, short: bool) -> None:
    """Unequal prompts and rows in another order, through our pass and through SGLang's runner."""
    target, ours, theirs, table = Target(), pool(), pool(), table_of()
    worker = worker_of(target, draft, ours, table)
    texts = plain_tokens(target, STEPS + 1)
    lens = torch.tensor(PROMPTS) - 1
    anchors = torch.tensor([text[at] for text, at in zip(texts, lens.tolist(), strict=True)])

    def short_pass(_: Any, batch: Any, asked: Any, slots: Tensor) -> tuple[Any, Any] | None:
        return (
            (output_of(target, asked.draft_token, asked.positions, slots), None) if short else None
        )

    for _ in range(STEPS):
        published: list[Tensor] = []
        with torch.inference_mode():
            done = plain_step.run(worker, batch_of(anchors, lens), published.append, short_pass)
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


def test_a_seed_draws_by_the_position_of_the_anchor(draft: Draft) -> None:
    """Seed 0 is one. The last request is greedy."""
    target, table = Target(), table_of()
    worker = worker_of(target, draft, pool(), table)
    anchors, lens = torch.tensor([4, 9, 13, 21]), torch.tensor([5, 0, 30, 8])
    seeds = [0, 7, 0, 11]

    def short_pass(_: Any, batch: Any, asked: Any, slots: Tensor) -> tuple[Any, Any]:
        return output_of(target, asked.draft_token, asked.positions, slots), None

    with torch.inference_mode():
        settings = info(seeds, [1.0, 1.0, 1.0, 0.0])
        done = plain_step.run(worker, batch_of(anchors, lens, settings), None, short_pass)
    likeliest = [
        target.following(t, p) for t, p in zip(anchors.tolist(), lens.tolist(), strict=True)
    ]
    probs = torch.nn.functional.one_hot(torch.tensor(likeliest), VOCAB).float().softmax(-1)
    expected = seeded_choice(probs, torch.tensor(seeds), lens)
    expected[3] = likeliest[3]
    assert done.next_token_ids.view(REQUESTS, WIDTH)[:, 0].tolist() == expected.tolist()
