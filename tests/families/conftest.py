"""A tiny target, texts it wrote, and drafters of every kind that a short training has taught them:
they are then accepted often, but not always."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.chain.model import ChainDrafter
from sglang_dspark.families.dflash.learner import DFlashLearner
from sglang_dspark.families.dflash.model import DFlashDrafter
from sglang_dspark.families.eagle3.learner import Eagle3Learner
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.learner import Learner
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.learning.target_head import TargetHead
from sglang_dspark.families.mtp.learner import MTPLearner
from sglang_dspark.training.packing import pack
from sglang_dspark.training.store import Response
from tests.evaluation.conftest import VOCAB, build_target
from tests.families.helpers import GAMMA, KINDS, LAYERS, random_drafter

TEXTS, PROMPT, ANSWER, STEPS = 8, 6, 40, 32
DRAFT_IDS = torch.tensor([i for i in range(VOCAB) if i % 5])
LEARNERS = {"dflash": DFlashLearner, "eagle3": Eagle3Learner, "mtp": MTPLearner}


@dataclass(frozen=True)
class Lesson:
    """A drafter after training, the learner that taught it, and its losses on the way."""

    drafter: DFlashDrafter | ChainDrafter
    learner: Learner
    losses: list[float]


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("baselines") / "target"
    build_target(path, layers=3)  # SGLang captures no features behind the last layer
    return path


@pytest.fixture(scope="session")
def target(target_dir: Path) -> TargetModel:
    return TargetModel.load(target_dir, LAYERS)


@pytest.fixture(scope="session")
def responses(target: TargetModel) -> list[Response]:
    """Greedy answers with the states that training reads, as the store would give them."""
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, VOCAB - 1, (PROMPT,), generator=generator) for _ in range(TEXTS)]
    settings = DecodeSettings(max_new_tokens=ANSWER, batch=TEXTS)
    written = ReferenceEngine(target, None, settings).run([p.tolist() for p in prompts])
    texts = torch.stack(
        [torch.cat([p, torch.tensor(g.tokens)]) for p, g in zip(prompts, written, strict=True)]
    )
    out = target.forward(texts, torch.zeros(TEXTS, dtype=torch.long), target.new_cache(TEXTS, 64))
    log_partition = target.logits(out.hidden).logsumexp(-1)
    states = zip(texts, out.features, out.hidden, log_partition, strict=True)
    return [Response(str(i), "test", 0.0, PROMPT, *row) for i, row in enumerate(states)]


@pytest.fixture(scope="session")
def batch(responses: list[Response]) -> PackedBatch:
    """Blocks of all texts, the last ones cut by their ends."""
    generator = torch.Generator().manual_seed(3)
    last = PROMPT + ANSWER - 1
    anchors = [
        torch.randperm(last - PROMPT, generator=generator)[: 14 + i % 3] + PROMPT
        for i in range(len(responses))
    ]
    anchors[0][0] = last - 1
    return pack(responses, anchors, GAMMA)


def learner_of(
    drafter: DFlashDrafter | ChainDrafter, kind: str, target: TargetModel, ids: Tensor | None
) -> Learner:
    drafter.attach(target.embed_weight, target.head_weight)
    if kind == "eagle3":
        drafter.start_head(target.head_weight)
    head = TargetHead(target.head_weight, ids, half=False)
    return LEARNERS[kind](drafter, head, ObjectiveConfig())


def teach(learner: Learner, batch: PackedBatch, steps: int) -> list[float]:
    """Losses of `steps` updates on one batch."""
    optimiser = torch.optim.AdamW(learner.module.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        parts = learner.losses(batch)
        optimiser.zero_grad(set_to_none=True)
        parts.total.backward()
        learner.after_backward()
        optimiser.step()
        losses.append(float(parts.total.detach()))
    return losses


@pytest.fixture(scope="session")
def lessons(target: TargetModel, batch: PackedBatch) -> dict[str, Lesson]:
    """One drafter a kind, over a reduced vocabulary, trained on the texts."""
    found = {}
    for kind in KINDS:
        drafter = random_drafter(kind, VOCAB, DRAFT_IDS)
        learner = learner_of(drafter, kind, target, DRAFT_IDS)
        losses = teach(learner, batch, STEPS)
        found[kind] = Lesson(drafter.eval(), learner, losses)
    return found
