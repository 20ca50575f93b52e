"""The baselines' checkpoints in SGLang itself: it loads them, gives plain decoding's tokens, and
accepts exactly the drafts that the reference engine accepts (greedy)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.dflash.checkpoint import save_dflash
from sglang_dspark.families.eagle3.checkpoint import save_eagle3
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.mtp.checkpoint import TOKEN_MAP, save_mtp
from sglang_dspark.families.registry import open_drafter
from sglang_dspark.training.store import Response
from tests.evaluation.conftest import VOCAB
from tests.families.conftest import DRAFT_IDS, STEPS, learner_of, teach
from tests.families.helpers import GAMMA, random_drafter
from tests.integration.serving import ServerPool

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS = 24
SAVE = {"dflash": save_dflash, "eagle3": save_eagle3, "mtp": save_mtp}
ALGORITHM = {"dflash": "DFLASH", "eagle3": "EAGLE3", "mtp": "EAGLE"}


def chain_of(steps: int) -> tuple[str, ...]:
    """Flags of EAGLE for a chain of so many drafts."""
    return (
        "--speculative-num-steps",
        str(steps),
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        str(steps + 1),
    )


def all_verified(folder: Path) -> tuple[str, str]:
    """Flags of DSPARK that verify every draft, so that steps can be compared."""
    config = folder / "static.yaml"
    config.write_text("schedule: {mode: static}\n")
    return "--dspark-config", str(config)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path)
    yield pool
    pool.stop_all()


@pytest.mark.parametrize(
    ("kind", "reduced", "steps", "scheduled"),
    [
        ("dflash", False, GAMMA, False),
        ("eagle3", True, GAMMA, False),
        ("eagle3", True, GAMMA, True),
        ("eagle3", False, GAMMA, True),
        ("mtp", False, GAMMA, False),
        ("mtp", True, 1, False),
        ("mtp", False, GAMMA, True),
        ("mtp", True, GAMMA, True),
    ],
)
def test_served_steps_are_the_engines(
    kind: str,
    reduced: bool,
    steps: int,
    scheduled: bool,
    target: TargetModel,
    target_dir: Path,
    batch: PackedBatch,
    responses: list[Response],
    pool: ServerPool,
    tmp_path: Path,
) -> None:
    ids = DRAFT_IDS if reduced else None
    drafter = random_drafter(kind, VOCAB, ids)
    teach(learner_of(drafter, kind, target, ids), batch, STEPS)
    folder = tmp_path / "drafter"
    SAVE[kind](drafter, folder)  # type: ignore[operator]

    prompts = [r.tokens[: 6 + 3 * i].tolist() for i, r in enumerate(responses)]
    settings = DecodeSettings(max_new_tokens=TOKENS, gamma=steps)
    expected = ReferenceEngine(target, open_drafter(folder, target), settings).run(prompts)
    algorithm = "DSPARK" if scheduled else ALGORITHM[kind]
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder)]
    flags += ["--max-running-requests", "8"]
    if scheduled:
        flags += ["--speculative-dspark-block-size", str(steps), *all_verified(tmp_path)]
    elif kind != "dflash":
        flags += chain_of(steps)
    if kind == "mtp" and reduced and not scheduled:
        flags += ["--speculative-token-map", str(folder / TOKEN_MAP)]
    server = pool.start(kind, target_dir, *flags)
    fields = {"max_new_tokens": TOKENS, "sampling_params": {"ignore_eos": True}}
    for concurrency in (1, 4):
        server.flush_cache()
        answers = server.generate_all(prompts, concurrency, **fields)
        for generation, answer in zip(expected, answers, strict=True):
            assert answer["output_ids"] == list(generation.tokens)
            meta = answer["meta_info"]
            assert meta["spec_verify_ct"] == len(generation.steps)
            accepted = sum(step.accepted for step in generation.steps)
            assert meta["spec_num_correct_drafts"] == accepted
    assert sum(step.accepted for g in expected for step in g.steps) > 20
