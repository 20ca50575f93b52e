"""Learners against the drafters they train: the same probabilities, and they learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.learner import Ingredients
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.registry import build_learner, proposer_of
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.store import Response
from tests.evaluation.conftest import VOCAB
from tests.families.conftest import DRAFT_IDS, Lesson, learner_of, teach
from tests.families.helpers import GAMMA, KINDS, LAYERS, random_drafter


def _learner_distributions(lesson: Lesson, batch: PackedBatch) -> Tensor:
    """Draft probabilities [P, gamma, V'] that the losses are made of."""
    learner = lesson.learner
    source = learner if hasattr(learner, "logits") else learner.chain  # type: ignore[attr-defined]
    with torch.no_grad():
        return source.logits(batch).softmax(-1)


@torch.no_grad()
def _engine_distributions(lesson: Lesson, response: Response, p: int, tokens: Tensor) -> Tensor:
    """Probabilities [gamma, V] by which the engine's state would draft at anchor p, had it drawn
    `tokens` [gamma] (the draws are forced one by one through the state's generator-free path)."""
    state = proposer_of(lesson.drafter).start(2, 64)
    rows, half = torch.tensor([1]), max(p // 2, 1)
    text, features, hidden = (
        x[None] for x in (response.tokens, response.features, response.hidden)
    )
    state.prefill(rows, text[:, :half], features[:, :half], hidden[:, :half])
    while half < p:  # commit the rest in windows of which some rows are rejected
        kept = min(2, p - half)
        window = slice(half, half + kept + 1)
        lens, accepted = torch.tensor([half]), torch.tensor([kept - 1])
        state.commit(rows, lens, text[:, window], features[:, window], hidden[:, window], accepted)
        half += kept
    return _forced(state, rows, response.tokens[p : p + 1], torch.tensor([p]), tokens)


def _forced(state: object, rows: Tensor, anchor: Tensor, lens: Tensor, tokens: Tensor) -> Tensor:
    """Draft with every draw replaced by the given token, and return the distributions."""
    wanted = iter(tokens.tolist())
    column = {int(t): i for i, t in enumerate(DRAFT_IDS)}

    def draw(probs: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        if len(probs) > 1:  # a parallel drafter draws all rows at once; they do not depend on it
            return torch.zeros(len(probs), n, dtype=torch.long)
        return torch.tensor([[column.get(next(wanted), 0)]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", draw)
        block = state.propose(rows, anchor, lens, torch.ones(1), torch.Generator())  # type: ignore[attr-defined]
    return block.probs[0]


@pytest.mark.parametrize("kind", KINDS)
def test_learner_and_engine_agree_on_every_distribution(
    kind: str, lessons: dict[str, Lesson], batch: PackedBatch, responses: list[Response]
) -> None:
    """Packed teacher forcing and slot-by-slot steps with rejections give the same distribution.

    Only blocks whose inputs can be drafted are compared: the engine cannot draft other tokens.
    """
    lesson = lessons[kind]
    distributions = _learner_distributions(lesson, batch)
    inside = torch.isin(batch.inputs[:, 1:], DRAFT_IDS).all(1) & batch.valid.all(1)
    chosen = inside.nonzero()[:, 0][::17]
    assert len(chosen) >= 5
    for block in chosen.tolist():
        response, p = responses[int(batch.sequence[block])], int(batch.positions[block])
        distribution = _engine_distributions(lesson, response, p, batch.labels[block])
        torch.testing.assert_close(
            distribution[:, DRAFT_IDS], distributions[block], atol=1e-5, rtol=1e-3
        )
        assert float(distribution.sum(-1).min()) == pytest.approx(1.0, abs=1e-5)
        assert not distribution[:, ~torch.isin(torch.arange(VOCAB), DRAFT_IDS)].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_does_not_see_past_its_anchor(
    kind: str, lessons: dict[str, Lesson], batch: PackedBatch
) -> None:
    """Changed context at and behind a block's anchor, and in other texts, changes nothing."""
    block = int((batch.positions == batch.positions.median()).nonzero()[0])
    sequence, p = int(batch.sequence[block]), int(batch.positions[block])
    first = int(batch.starts[sequence])
    before = torch.zeros(len(batch.tokens), dtype=torch.bool)
    before[first : first + p] = True

    def distribution(mask: Tensor) -> Tensor:
        changed = batch.__class__(**{**vars(batch)})
        for name in ("features", "last_hidden"):
            vars(changed)[name] = torch.where(
                mask[:, None], getattr(batch, name) + 1.0, getattr(batch, name)
            )
        vars(changed)["tokens"] = torch.where(mask, (batch.tokens + 1) % VOCAB, batch.tokens)
        return _learner_distributions(lessons[kind], changed)[block]

    same = _learner_distributions(lessons[kind], batch)[block]
    torch.testing.assert_close(distribution(~before), same, atol=1e-6, rtol=1e-4)
    assert not torch.allclose(distribution(before), same, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_fall(kind: str, lessons: dict[str, Lesson]) -> None:
    losses = lessons[kind].losses
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_objective(kind: str, target: TargetModel, batch: PackedBatch) -> None:
    """Against CE and L_tv (eq. 10) as the paper writes them, over the whole vocabulary."""
    drafter = random_drafter(kind, VOCAB, None)
    learner = learner_of(drafter, kind, target, None)
    parts = learner.losses(batch)
    distributions = _learner_distributions(Lesson(drafter, learner, []), batch)
    truth = target.logits(batch.hidden).softmax(-1)
    weight = torch.exp(-torch.arange(GAMMA) / GAMMA) * batch.valid
    ce = -distributions.gather(-1, batch.labels[..., None])[..., 0].log()
    l_tv = (distributions - truth).abs().sum(-1)
    objective = ObjectiveConfig()
    naive = (weight * (objective.ce * ce + objective.tv * l_tv)).sum() / weight.sum()
    assert float(parts.total.detach()) == pytest.approx(float(naive), rel=1e-4)
    overlap = torch.minimum(distributions, truth).sum(-1)
    torch.testing.assert_close(parts.accept, overlap.flatten(), atol=1e-5, rtol=1e-4)
    assert parts.confidence is None
    parts.total.backward()
    grads = {n: p.grad for n, p in learner.module.named_parameters() if p.requires_grad}
    assert all(g is not None and bool(g.any()) for g in grads.values()), "every weight is trained"


def ingredients_of(
    shape: dict[str, object], target: TargetModel, target_dir: Path, ids: Tensor | None
) -> Ingredients:
    """Return the ingredients of a recipe at the start of a run."""
    cfg = RunConfig.model_validate(
        {
            "run_dir": "unused",
            "data": {"target": target_dir, "store": "unused"},
            "drafter": {"gamma": GAMMA, "target_layer_ids": LAYERS, **shape},
            "schedule": {"steps": 1},
        }
    )
    return Ingredients(
        shape=cfg.drafter,
        objective=cfg.objective,
        target_dir=target_dir,
        target=target.config,
        embed_weight=target.embed_weight,
        head_weight=target.head_weight,
        vocabulary=ids,
        counts=torch.ones(VOCAB, dtype=torch.long),
        pairs=torch.zeros(2, 1, dtype=torch.long),
        half=False,
        fresh=True,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduced", [False, True])
def test_factory_starts_from_the_target(
    kind: str, reduced: bool, target: TargetModel, target_dir: Path, batch: PackedBatch
) -> None:
    """A recipe builds the right shapes, and its loss decreases from the first step."""
    shape: dict[str, object] = {"kind": kind}
    if kind == "dflash":
        shape |= {"layers": 1, "mask_token_id": 3}
    ids = DRAFT_IDS if reduced else None
    learner = build_learner(ingredients_of(shape, target, target_dir, ids))
    assert learner.gamma == GAMMA
    losses = teach(learner, batch, 4)
    assert losses[-1] < losses[0]


def test_a_frozen_head_stays_the_targets(
    target: TargetModel, target_dir: Path, batch: PackedBatch, tmp_path: Path
) -> None:
    """Also in a run that goes on, whose state has the trained weights alone."""
    shape: dict[str, object] = {"kind": "eagle3", "train_head": False, "init_from_target": False}
    fresh = ingredients_of(shape, target, target_dir, DRAFT_IDS)
    for ingredients in (fresh, replace(fresh, fresh=False)):
        learner = build_learner(ingredients)
        before = {n: p.detach().clone() for n, p in learner.module.named_parameters()}
        losses = teach(learner, batch, 4)
        assert losses[-1] < losses[0]
        after = dict(learner.module.named_parameters())
        changed = {n for n, p in after.items() if not torch.equal(p, before[n])}
        assert changed == after.keys() - {"lm_head.weight"}
        assert torch.equal(after["lm_head.weight"], target.head_weight[DRAFT_IDS])
