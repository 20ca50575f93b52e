"""Chain drafters by the GPU's step, rehearsed on a CPU: it accepts exactly the drafts that the
reference engine accepts (greedy), and gives plain decoding's tokens and distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.eagle3.checkpoint import save_eagle3
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.mtp.checkpoint import save_mtp
from sglang_dspark.families.registry import open_drafter
from sglang_dspark.training.store import Response
from tests.evaluation.conftest import VOCAB
from tests.families.conftest import DRAFT_IDS, STEPS, learner_of, teach
from tests.families.helpers import GAMMA, random_drafter
from tests.integration.serving import Served, ServerPool
from tests.integration.test_scheduled_distribution import (
    ALPHA,
    Cut,
    evidence,
    rank_p_value,
    read_back,
)
from tests.integration.tiny_models import TinyPair
from tests.rehearsal.conftest import Rehearsed, start_rehearsed

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("chain-rehearsal")]

TOKENS = 24
SAVE: dict[str, Callable[..., None]] = {"eagle3": save_eagle3, "mtp": save_mtp}
GRAPHS = ("--cuda-graph-bs-decode", "1", "2", "4", "8")
WORLD = {  # in which a draft costs next to nothing
    "SGLANG_RAGGED_VERIFY_MODE": "compact",
    "DSPARK_REHEARSAL_STAIR": "0.1e-3",
    "DSPARK_REHEARSAL_DRAFT": "0.1e-3",
}
SEEDED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
)


@dataclass(frozen=True)
class Chained:
    """A server of a drafter, and the reference engine with it."""

    rehearsed: Rehearsed
    graphs: bool
    prompts: list[list[int]]
    engine: Callable[[DecodeSettings], ReferenceEngine]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("chained"))
    yield pool
    pool.stop_all()


@pytest.fixture(scope="module")
def plain(pool: ServerPool, target_dir: Path) -> Served:
    return pool.start("plain", target_dir, "--max-running-requests", "8")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("eagle3", True, True), id="eagle3-reduced-graphs"),
        pytest.param(("eagle3", False, False), id="eagle3-eager", marks=pytest.mark.slow),
        pytest.param(("mtp", True, False), id="mtp-reduced-eager"),
        pytest.param(("mtp", False, True), id="mtp-graphs", marks=pytest.mark.slow),
    ],
)
def chained(
    target: TargetModel,
    target_dir: Path,
    batch: PackedBatch,
    responses: list[Response],
    pool: ServerPool,
    request: pytest.FixtureRequest,
) -> Iterator[Chained]:
    """Every draft is verified, so that steps can be compared; prompts are read in chunks of 8."""
    kind, reduced, graphs = request.param
    name = "-".join(map(str, request.param))
    ids = DRAFT_IDS if reduced else None
    drafter = random_drafter(kind, VOCAB, ids)
    teach(learner_of(drafter, kind, target, ids), batch, STEPS)
    folder = pool.folder / f"drafter-{name}"
    SAVE[kind](drafter, folder)
    prompts = [r.tokens[: 6 + 3 * i].tolist() for i, r in enumerate(responses)]
    config = pool.folder / "floor.yaml"
    # A few steps of training leave drafters that a server stops using.
    schedule = f"{{fairness_floor: {GAMMA}, min_acceptance: 0.0001}}"
    config.write_text(f"schedule: {schedule}\ncpu: {{overlap: true}}\n")
    flags = ["--speculative-dspark-block-size", str(GAMMA), "--dspark-config", str(config)]
    flags += ["--chunked-prefill-size", "8", *(GRAPHS if graphs else ())]
    world = WORLD | ({"DSPARK_REHEARSAL_GRAPHS": "1"} if graphs else {})
    pair = TinyPair(target_dir, folder, torch.empty(0))
    rehearsed = start_rehearsed(pool, f"chain-{name}", pair, *flags, **world)
    opened = open_drafter(folder, target)
    engine = partial(ReferenceEngine, target, opened)
    yield Chained(rehearsed, graphs, prompts, engine)
    pool.stop(f"chain-{name}")


def drafted(chained: Chained, prompts: list[list[int]], users: int) -> list[dict[str, Any]]:
    """Answers to prompts whose every step drafted: the guard tries steps without drafts at times.

    No launch may read a value back.
    """
    fields: dict[str, Any] = {"max_new_tokens": TOKENS, "sampling_params": {"ignore_eos": True}}
    rehearsed = chained.rehearsed
    for _ in range(6):
        rehearsed.server.flush_cache()
        launches, passes = len(rehearsed.launches()), len(rehearsed.passes())
        answers = rehearsed.server.generate_all(prompts, users, **fields)
        assert [each for each in rehearsed.launches()[launches:] if each["reads"]] == []
        steps = rehearsed.passes()[passes:]
        if {n for each in steps for n in each["lengths"]} == {GAMMA}:
            assert all(bool(each["drafts_replayed"]) == chained.graphs for each in steps)
            return answers
    raise AssertionError("the guard never let every step draft")


@pytest.mark.parametrize("users", [1, 4])
def test_greedy_steps_are_the_engines(chained: Chained, users: int) -> None:
    prompts = chained.prompts
    alone = [[each] for each in prompts] if users == 1 else [prompts]
    answers = [answer for some in alone for answer in drafted(chained, some, users)]
    expected = chained.engine(DecodeSettings(max_new_tokens=TOKENS, gamma=GAMMA)).run(prompts)
    for generation, answer in zip(expected, answers, strict=True):
        assert answer["output_ids"] == list(generation.tokens)
        meta = answer["meta_info"]
        assert meta["spec_verify_ct"] == len(generation.steps)
        accepted = sum(step.accepted for step in generation.steps)
        assert meta["spec_num_correct_drafts"] == accepted
    assert sum(step.accepted for g in expected for step in g.steps) > 20
    assert "scheduled by draft probability, algorithm search" in chained.rehearsed.server.log


def seeded(server: Served, prompts: list[list[int]], users: int) -> list[dict[str, Any]]:
    def ask(i: int) -> dict[str, Any]:
        sampling = SEEDED[i % len(SEEDED)] | {"sampling_seed": 70 + i, "ignore_eos": True}
        return server.generate(prompts[i], TOKENS, sampling_params=sampling)

    return server.each(ask, range(len(prompts)), users)


def test_seeds_give_plain_decodings_tokens(plain: Served, chained: Chained) -> None:
    """Their drafts are drawn outside of graphs."""
    expected = [each["output_ids"] for each in seeded(plain, chained.prompts, 4)]
    for users in (1, 4):
        got = seeded(chained.rehearsed.server, chained.prompts, users)
        assert [each["output_ids"] for each in got] == expected
        assert sum(each["meta_info"]["spec_num_correct_drafts"] for each in got) > 20


@pytest.mark.slow
def test_what_is_drawn_has_plain_decodings_distribution(plain: Served, chained: Chained) -> None:
    cut = Cut(top_k=20, top_p=0.95)
    prompts = [each[i:] for each in chained.prompts for i in range(5)]
    fields = {"max_new_tokens": 2 * TOKENS, "sampling_params": cut.sampling()}
    passes = len(chained.rehearsed.passes())
    answers = chained.rehearsed.server.generate_all(prompts, 4, **fields)
    steps = chained.rehearsed.passes()[passes:]
    verified = sum(n for each in steps for n in each["lengths"])
    accepted = sum(each["meta_info"]["spec_num_correct_drafts"] for each in answers)
    settings = DecodeSettings(2 * TOKENS, 1.0, cut.top_k, cut.top_p, gamma=GAMMA)
    reference = [step for g in chained.engine(settings).run(prompts) for step in g.steps]
    expected = sum(step.accepted for step in reference) / sum(step.verify_len for step in reference)
    # Drafts behind an answer's end are verified and not counted; 300 acceptances vary by 6%.
    assert accepted / verified == pytest.approx(expected, rel=0.3)
    assert accepted > 200, "too few drafts were accepted: nothing was tested"
    drawn = []
    for prompt, answer in zip(prompts, answers, strict=True):
        drawn += read_back(plain, prompt, answer["output_ids"], cut)
    assert evidence(drawn) < math.log(1 / ALPHA)
    assert rank_p_value(drawn) > ALPHA
