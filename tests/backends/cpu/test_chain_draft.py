"""Drafts that run once a token, and their context in the served cache, against the reference
engine's proposer: any prompts, chunks, pool rows, cache slots and commits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.reduced_head import block_uniforms
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.families.chain.proposer import ChainProposer
from sglang_dspark.serving import mode
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify.seeded import seeded_choice
from tests.backends.cpu.draft_world import settings
from tests.backends.cpu.step_world import worker_for
from tests.families.helpers import WIDTH, random_drafter

pytest.importorskip("sglang")

VOCAB, GAMMA, ROWS, LONGEST, SLOTS = 60, 4, 6, 48, 400
FP8 = torch.float8_e5m2
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.05, FP8: 0.3}
IDS = torch.tensor([i for i in range(VOCAB) if i % 4])


class World:
    """A worker whose draft model is a random chain drafter, with shuffled rows and slots."""

    def __init__(
        self,
        kind: str,
        ids: Tensor | None,
        dtype: torch.dtype = torch.float32,
        *,
        greedy: bool = False,
    ) -> None:
        """dtype: of the server's cache and features. greedy: drafts of sampled requests too."""
        from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise

        from sglang_dspark.backends.cpu.chain_draft import ChainDraft

        self.drafter: Any = random_drafter(kind, VOCAB, ids).eval()
        torch.manual_seed(1)
        self.drafter.attach(torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH))
        shape = (SLOTS, 2, 16)  # random: what is never written must not be read
        stored = torch.uint8 if dtype.itemsize == 1 else dtype
        buffers = [torch.randn(shape).to(dtype).view(stored) for _ in range(2)]
        pool = SimpleNamespace(
            k_buffer=buffers[:1], v_buffer=buffers[1:], dtype=dtype, store_dtype=stored
        )
        self.dtype, self.features = dtype, torch.float32 if dtype is FP8 else dtype
        self.table = torch.randperm(SLOTS)[: ROWS * LONGEST].view(ROWS, LONGEST).int()
        table = SimpleNamespace(req_to_token=self.table)
        self.noise = DraftNoise(key=3, offset=torch.zeros(1, dtype=torch.int64))
        self.model = SimpleNamespace(drafter=self.drafter, context=None)
        worker = worker_for(
            GAMMA,
            draft_model=self.model,
            draft_model_runner=SimpleNamespace(token_to_kv_pool=pool),
            model_runner=SimpleNamespace(req_to_token_pool=table),
            _proposer=SimpleNamespace(noise=self.noise),
            _greedy_draft=greedy,
            _mask_token_id=0,
        )
        self.draft = ChainDraft(worker)
        self.expected = ChainProposer(self.drafter, GAMMA).start(ROWS, LONGEST)

    def states(self, n: int) -> Tensor:
        """Random states of n tokens, as the drafter reads them."""
        return torch.randn(n, self.drafter.state_width)

    def prefill(self, rows: list[int], prompts: list[Tensor], chunks: list[list[int]]) -> None:
        """Prefill prompts [n], in both. chunks: of each batch, how far each prompt has come."""
        states = [self.states(len(prompt)) for prompt in prompts]
        done = [0] * len(rows)
        for ends in [*chunks, [len(prompt) for prompt in prompts]]:
            some = [r for r in range(len(rows)) if ends[r] > done[r]]
            spans = [(r, torch.arange(done[r], ends[r])) for r in some]
            batch = SimpleNamespace(
                input_ids=torch.cat([prompts[r][at] for r, at in spans]),
                extend_lens=[len(at) for _, at in spans],
                req_pool_indices=torch.tensor([rows[r] for r in some]),
                reqs=[SimpleNamespace(rid=f"request {rows[r]}") for r in some],
            )
            self.draft.context.begin_prefill(batch)
            self.draft.context.prefill(
                torch.cat([states[r][at] for r, at in spans]).to(self.features),
                torch.cat([at for _, at in spans]),
                torch.cat([self.table[rows[r], at] for r, at in spans]).long(),
            )
            done = ends
        for row, prompt, state in zip(rows, prompts, states, strict=True):
            self.expected.prefill(torch.tensor([row]), prompt[None], *[state[None]] * 2)

    def assert_context(self, rows: Tensor, lens: Tensor) -> None:
        """Entries of the text before the anchors are the reference's."""
        for row, n in zip(rows.tolist(), (lens - 1).tolist(), strict=True):
            slots, close = self.table[row, :n].long(), CLOSE[self.dtype]
            for mine, theirs in (
                (self.draft.context._keys, self.expected.keys),
                (self.draft.context._values, self.expected.values),
            ):
                found = mine[slots].view(self.dtype).float()
                assert torch.allclose(found, theirs[row, :n], atol=close, rtol=close)

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
                rows,
                accepted + 1,
                tokens[kept],
                places[kept],
                slots[kept],
                states[kept].to(self.features),
            )
        )
        self.expected.commit(rows, lens, tokens, states, states, accepted)
        return torch.randint(VOCAB, (len(rows),))


def batch_of(rows: Tensor, anchors: Tensor, lens: Tensor, info: Any = None) -> Any:
    spec = SimpleNamespace(bonus_tokens=anchors)
    return SimpleNamespace(spec_info=spec, seq_lens=lens, req_pool_indices=rows, sampling_info=info)


def started(
    kind: str, ids: Tensor | None, dtype: torch.dtype = torch.float32, *, greedy: bool = False
) -> tuple[World, Tensor, Tensor]:
    """A world with three requests, prefilled together in chunks; their rows and lengths."""
    world = World(kind, ids, dtype, greedy=greedy)
    rows, lens = torch.tensor([4, 0, 2]), torch.tensor([9, 1, 14])
    prompts = [torch.randint(VOCAB, (n,)) for n in lens.tolist()]
    world.prefill(rows.tolist(), prompts, [[4, 0, 3], [9, 0, 8]])
    return world, rows, lens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_drafts_are_the_reference_engines(
    kind: str, ids: Tensor | None, dtype: torch.dtype
) -> None:
    world, rows, lens = started(kind, ids, dtype)
    anchors = torch.randint(VOCAB, (3,))
    world.assert_context(rows, lens)
    for step in range(6):
        depth = 1 + step % GAMMA
        batch = batch_of(rows, anchors, lens)
        proposal = world.draft.propose(batch, None, depth, None)
        generator = torch.Generator()
        wanted = world.expected.propose(rows, anchors, lens, None, generator).tokens
        block = proposal.draft_block
        assert block.draft_tokens.shape == (3, GAMMA)
        if dtype is torch.float32:
            assert torch.equal(block.draft_tokens[:, :depth], wanted[:, :depth])
        assert torch.equal(proposal.draft_block_ids[:, 0], anchors)
        assert proposal.confidence_raw.shape == (3, depth)
        accepted = torch.tensor([step % 3, 0, (step + 1) % 4])
        anchors = world.commit(rows, lens, accepted)
        lens = lens + accepted + 1
        world.assert_context(rows, lens)


def test_a_prompt_that_begins_again_goes_on_with_nothing() -> None:
    """A retracted request keeps its name, and may have its row again, behind a shorter prefix."""
    world, rows, lens = started("eagle3", None)
    row, n = int(rows[2]), int(lens[2]) - 4
    before = world.draft.context._keys[world.table[row, n - 1].long()].clone()
    extend(world, row, n, f"request {row}")
    assert torch.equal(before, world.draft.context._keys[world.table[row, n - 1].long()])


def extend(world: World, row: int, first: int, rid: str) -> None:
    """Prefill three tokens at positions `first` on."""
    batch = SimpleNamespace(
        input_ids=torch.randint(VOCAB, (3,)),
        extend_lens=[3],
        req_pool_indices=torch.tensor([row]),
        reqs=[SimpleNamespace(rid=rid)],
    )
    world.draft.context.begin_prefill(batch)
    at = torch.arange(first, first + 3)
    world.draft.context.prefill(world.states(3), at, world.table[row, at].long())


def test_a_row_of_another_request_is_not_gone_on_with() -> None:
    """A cached prefix as long as the former request's text: its features are not read."""
    world, rows, lens = started("eagle3", None)
    row, n = int(rows[2]), int(lens[2])
    before = world.draft.context._keys[world.table[row, n - 1].long()].clone()
    extend(world, row, n, "another")
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


def test_each_place_has_its_own_uniform_and_logits() -> None:
    """Tokens are the inverse of the recorded distribution, by the block's own uniforms."""
    world, rows, lens = started("eagle3", IDS)
    anchors, info = torch.tensor([7, 8, 9]), settings(torch.tensor([0.7, 1.0, 1.3]))
    uniforms = block_uniforms(world.noise.key, int(world.noise.offset), (3, GAMMA))
    block = world.draft.propose(batch_of(rows, anchors, lens, info), None, GAMMA, None).draft_block
    scale = torch.tensor([0.7, 1.0, 1.3])[:, None, None]
    sums = torch.softmax(block.corrected_logits.double() / scale, -1).cumsum(-1)
    expected = (sums > uniforms[..., None] * sums[..., -1:]).int().argmax(-1)
    assert torch.equal(block.draft_tokens, expected)
    assert not torch.equal(block.corrected_logits[:, 0], block.corrected_logits[:, 1])


@pytest.mark.parametrize("greedy", [True, False])
def test_requests_that_draft_greedily(greedy: bool) -> None:
    """Of a server that is configured so, or all of a batch by their own settings."""
    world, rows, lens = started("mtp", IDS, greedy=greedy)
    anchors = torch.tensor([7, 8, 9])
    info = settings(torch.ones(3) if greedy else torch.zeros(3))
    block = world.draft.propose(batch_of(rows, anchors, lens, info), None, 3, None).draft_block
    plain = world.draft.propose(batch_of(rows, anchors, lens), None, 3, None).draft_block
    assert block.greedy_draft
    assert block.corrected_logits is None
    assert torch.equal(block.draft_tokens, plain.draft_tokens)
    assert int(world.noise.offset) == 0, "no noise was drawn"


def test_a_seed_decides_a_draft_by_its_position() -> None:
    world, rows, lens = started("mtp", IDS)
    anchors, info = torch.tensor([7, 8, 9]), settings(torch.ones(3))
    seeds = Seeds(torch.tensor([0, 2]), torch.tensor([11, 12]))
    blocks = [
        world.draft.propose(batch_of(rows, anchors, lens, info), None, 3, seeds).draft_block
        for _ in range(8)
    ]
    tokens = torch.stack([block.draft_tokens[:, :3] for block in blocks])  # [8, 3, 3]
    assert len({tuple(each.tolist()) for each in tokens[:, 1]}) > 1
    for place in range(3):
        probs = torch.softmax(blocks[0].corrected_logits[seeds.rows, place], -1)
        drawn = seeded_choice(probs, seeds.values, lens[seeds.rows] + place)
        assert torch.equal(tokens[0, seeds.rows, place], drawn)
    assert (tokens[:, seeds.rows] == tokens[:1, seeds.rows]).all()


def test_invalid_logits_never_choose_a_token_outside_the_vocabulary() -> None:
    world, rows, lens = started("eagle3", IDS)
    world.drafter.lm_head.weight.data.fill_(torch.nan)
    batch = batch_of(rows, torch.tensor([7, 8, 9]), lens, settings(torch.ones(3)))
    proposal = world.draft.propose(batch, None, GAMMA, None)
    tokens = proposal.draft_block.draft_tokens
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert proposal.confidence_raw.isnan().all()


@pytest.mark.parametrize("descending", [True, False])
def test_a_request_does_not_read_what_lies_behind_its_context(descending: bool) -> None:
    """Another request's NaN in a slot of a shorter one's row."""
    world, rows, lens = started("eagle3", None)
    order = lens.argsort(descending=descending)
    rows, lens = rows[order], lens[order]
    anchors = torch.tensor([7, 8, 9])
    clean = world.draft.propose(batch_of(rows, anchors, lens), None, GAMMA, None)
    behind = slots_behind(world, rows, lens)
    world.draft.context._keys[behind] = torch.nan
    world.draft.context._values[behind] = torch.inf
    again = world.draft.propose(batch_of(rows, anchors, lens), None, GAMMA, None)
    assert torch.equal(clean.draft_block.draft_tokens, again.draft_block.draft_tokens)
    assert torch.equal(clean.confidence_raw, again.confidence_raw)


def slots_behind(world: World, rows: Tensor, lens: Tensor) -> Tensor:
    """Slots of each row from the entry of the anchor on."""
    parts = [world.table[row, n - 1 :] for row, n in zip(rows.tolist(), lens.tolist(), strict=True)]
    return torch.cat(parts).long()


def test_of_a_prefill_the_last_token_has_no_entry() -> None:
    world, rows, lens = started("eagle3", None)
    ends = torch.stack([world.table[r, n - 1] for r, n in zip(rows, lens, strict=True)]).long()
    world.draft.context._keys[ends] = 5.0
    world.prefill(rows.tolist(), [torch.randint(VOCAB, (n,)) for n in lens.tolist()], [])
    assert (world.draft.context._keys[ends] == 5.0).all()


def test_without_scheduling_no_confidence_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "estimates_confidence", lambda **_: False)
    world, rows, lens = started("mtp", None)
    batch = batch_of(rows, torch.tensor([7, 8, 9]), lens)
    assert world.draft.propose(batch, None, 2, None).confidence_raw is None
