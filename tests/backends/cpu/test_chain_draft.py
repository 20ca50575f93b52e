"""Drafts that run once a token, and their context in the served cache, against the reference
engine's proposer: any prompts, chunks, pool rows, cache slots and commits."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.families.chain.proposer import ChainProposer
from sglang_dspark.step.seeds import Seeds
from tests.backends.cpu.draft_world import settings
from tests.backends.cpu.step_world import worker_for
from tests.families.helpers import WIDTH, random_drafter

pytest.importorskip("sglang")

VOCAB, GAMMA, ROWS, LONGEST, SLOTS = 60, 4, 6, 48, 400
IDS = torch.tensor([i for i in range(VOCAB) if i % 4])


class World:
    """A worker whose draft model is a random chain drafter, with shuffled rows and slots."""

    def __init__(self, kind: str, ids: Tensor | None) -> None:
        from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise

        from sglang_dspark.backends.cpu.chain_draft import ChainDraft

        self.drafter: Any = random_drafter(kind, VOCAB, ids).eval()
        torch.manual_seed(1)
        self.drafter.attach(torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH))
        shape = (SLOTS, 2, 16)  # random: what is never written must not be read
        pool = SimpleNamespace(k_buffer=[torch.randn(shape)], v_buffer=[torch.randn(shape)])
        self.table = torch.randperm(SLOTS)[: ROWS * LONGEST].view(ROWS, LONGEST).int()
        table = SimpleNamespace(req_to_token=self.table)
        noise = DraftNoise(key=3, offset=torch.zeros(1, dtype=torch.int64))
        self.model = SimpleNamespace(drafter=self.drafter, context=None)
        worker = worker_for(
            GAMMA,
            draft_model=self.model,
            draft_model_runner=SimpleNamespace(token_to_kv_pool=pool),
            model_runner=SimpleNamespace(req_to_token_pool=table),
            _proposer=SimpleNamespace(noise=noise),
            _mask_token_id=0,
        )
        self.draft = ChainDraft(worker)
        self.expected = ChainProposer(self.drafter, GAMMA).start(ROWS, LONGEST)

    def states(self, n: int) -> Tensor:
        """Random states of n tokens, as the drafter reads them."""
        return torch.randn(n, self.drafter.state_width)

    def prefill(self, row: int, prompt: Tensor, cuts: list[int], rid: str) -> None:
        """Prefill a prompt [n] in chunks that end at `cuts`, in both."""
        states = self.states(len(prompt))
        edges = [0, *cuts, len(prompt)]
        for first, end in itertools.pairwise(edges):
            batch = SimpleNamespace(
                input_ids=prompt[first:end],
                extend_lens=[end - first],
                req_pool_indices=torch.tensor([row]),
                reqs=[SimpleNamespace(rid=rid)],
            )
            self.draft.context.begin_prefill(batch)
            at = torch.arange(first, end)
            self.draft.context.prefill(states[first:end], at, self.table[row, at].long())
        self.expected.prefill(torch.tensor([row]), prompt[None], *[states[None]] * 2)

    def commit(self, rows: Tensor, lens: Tensor, accepted: Tensor) -> Tensor:
        """Commit a step: the next anchors [R]; lens: [R] positions of the anchors."""
        from sglang_dspark.backends.cpu.context_kv import Committed

        width = int(accepted.max()) + 1
        tokens = torch.randint(VOCAB, (len(rows), width))
        states = self.states(len(rows) * width).view(len(rows), width, -1)
        kept = torch.arange(width) <= accepted[:, None]
        places = (lens[:, None] + torch.arange(width)) * kept
        slots = self.table[rows[:, None], places].long()
        self.draft.context.commit(
            Committed(
                rows, accepted + 1, tokens[kept], places[kept], slots[kept], states[kept].clone()
            )
        )
        self.expected.commit(rows, lens, tokens, states, states, accepted)
        return torch.randint(VOCAB, (len(rows),))


def batch_of(rows: Tensor, anchors: Tensor, lens: Tensor, info: Any = None) -> Any:
    spec = SimpleNamespace(bonus_tokens=anchors)
    return SimpleNamespace(spec_info=spec, seq_lens=lens, req_pool_indices=rows, sampling_info=info)


def started(kind: str, ids: Tensor | None) -> tuple[World, Tensor, Tensor]:
    """A world with three requests; their rows and lengths."""
    world = World(kind, ids)
    rows, lens = torch.tensor([4, 0, 2]), torch.tensor([9, 1, 14])
    for row, n, cuts in zip(rows.tolist(), lens.tolist(), ([], [], [3, 8]), strict=True):
        world.prefill(row, torch.randint(VOCAB, (n,)), cuts, f"request {row}")
    return world, rows, lens


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_drafts_are_the_reference_engines(kind: str, ids: Tensor | None) -> None:
    world, rows, lens = started(kind, ids)
    anchors = torch.randint(VOCAB, (3,))
    for step in range(6):
        depth = 1 + step % GAMMA
        batch = batch_of(rows, anchors, lens)
        proposal = world.draft.propose(batch, None, depth, None)
        generator = torch.Generator()
        wanted = world.expected.propose(rows, anchors, lens, None, generator).tokens
        block = proposal.draft_block
        assert block.draft_tokens.shape == (3, GAMMA)
        assert torch.equal(block.draft_tokens[:, :depth], wanted[:, :depth])
        assert torch.equal(proposal.draft_block_ids[:, 0], anchors)
        assert proposal.confidence_raw.shape == (3, depth)
        accepted = torch.tensor([step % 3, 0, (step + 1) % 4])
        anchors = world.commit(rows, lens, accepted)
        lens = lens + accepted + 1


def test_a_row_of_another_request_is_not_gone_on_with() -> None:
    """A cached prefix as long as the former request's text: its features are not read."""
    world, rows, lens = started("eagle3", None)
    row, n = int(rows[2]), int(lens[2])
    before = world.draft.context._keys[world.table[row, n - 1].long()].clone()
    batch = SimpleNamespace(
        input_ids=torch.randint(VOCAB, (3,)),
        extend_lens=[3],
        req_pool_indices=rows[2:],
        reqs=[SimpleNamespace(rid="another")],
    )
    world.draft.context.begin_prefill(batch)
    at = torch.arange(n, n + 3)
    world.draft.context.prefill(world.states(3), at, world.table[row, at].long())
    after = world.draft.context._keys[world.table[row, n - 1].long()]
    assert torch.equal(before, after)


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
def test_drawn_tokens_have_the_distribution_that_acceptance_reads(ids: Tensor | None) -> None:
    world, rows, lens = started("eagle3", ids)
    anchors, copies = torch.tensor([7, 8, 9]), 3000
    temperatures = torch.tensor([0.7, 0.0, 1.0])
    info = settings(temperatures)
    counts = torch.zeros(3, VOCAB)
    for _ in range(copies):
        proposal = world.draft.propose(batch_of(rows, anchors, lens, info), None, 1, None)
        counts[torch.arange(3), proposal.draft_block.draft_tokens[:, 0]] += 1
    block = proposal.draft_block
    assert not block.greedy_draft
    assert block.greedy_mask.tolist() == [False, True, False]
    scale = torch.tensor([0.7, 1.0, 1.0])[:, None]
    probs = torch.softmax(block.corrected_logits[:, 0] / scale, -1)
    if ids is not None:
        outside = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, ids, False)
        assert probs[:, outside].sum() == 0
    assert counts[1].argmax() == probs[1].argmax()
    assert counts[1].max() == copies
    for row in (0, 2):
        expected = probs[row] * copies
        common = expected >= 5
        seen = torch.cat([counts[row][common], counts[row][~common].sum()[None]])
        wanted = torch.cat([expected[common], expected[~common].sum()[None]]).clamp_min(1e-9)
        chi = float(((seen - wanted) ** 2 / wanted).sum())
        assert chi < 2.2 * len(seen) + 20, (row, chi, len(seen))
    spread = draft_confidence(block.corrected_logits[:, :1], temperatures)
    assert torch.allclose(proposal.confidence_raw, spread, atol=1e-4)


def test_a_seed_decides_a_draft_by_its_position() -> None:
    world, rows, lens = started("mtp", IDS)
    anchors, info = torch.tensor([7, 8, 9]), settings(torch.ones(3))
    seeds = Seeds(torch.tensor([0, 2]), torch.tensor([11, 12]))
    blocks = [
        world.draft.propose(batch_of(rows, anchors, lens, info), None, 3, seeds).draft_block
        for _ in range(8)
    ]
    tokens = torch.stack([block.draft_tokens[:, :3] for block in blocks])  # [8, 3, 3]
    assert (tokens[:, [0, 2]] == tokens[:1, [0, 2]]).all()
    assert len({tuple(each.tolist()) for each in tokens[:, 1]}) > 1
    other = Seeds(seeds.rows, seeds.values + 1)
    changed = world.draft.propose(batch_of(rows, anchors, lens, info), None, 3, other).draft_block
    assert not torch.equal(changed.draft_tokens[[0, 2], :3], tokens[0, [0, 2]])


def test_invalid_logits_never_choose_a_token_outside_the_vocabulary() -> None:
    world, rows, lens = started("eagle3", IDS)
    world.drafter.lm_head.weight.data.fill_(torch.nan)
    batch = batch_of(rows, torch.tensor([7, 8, 9]), lens, settings(torch.ones(3)))
    proposal = world.draft.propose(batch, None, GAMMA, None)
    tokens = proposal.draft_block.draft_tokens
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert proposal.confidence_raw.isnan().all()
