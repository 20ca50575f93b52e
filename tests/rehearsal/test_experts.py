"""A drafter with experts, streams and a window on CUDA's side of the step, in real servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.registry import open_drafter
from tests.integration import tiny_models
from tests.integration.serving import Served, ServerPool
from tests.rehearsal.conftest import Rehearsed, start_rehearsed
from tests.rehearsal.test_overlap_steps import GREEDY, PROMPTS, TOKENS

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]

GAMMA = tiny_models.GAMMA
OUTSIDE = "draft passes run outside graphs: no way to compute bf16 experts on cpu in a graph: "
GRAPHS = {"DSPARK_REHEARSAL_GRAPHS": "1", "DSPARK_REHEARSAL_STAIR": "8e-3"}
SIZES = ("--cuda-graph-bs-decode", "1", "2", "4")


@pytest.fixture(scope="module")
def moe_pair(
    pair: tiny_models.TinyPair, tmp_path_factory: pytest.TempPathFactory
) -> tiny_models.TinyPair:
    """The pair with a drafter of four experts, four streams and a window of 16."""
    folder = tiny_models.build_moe(tmp_path_factory.mktemp("moe") / "drafter", pair)
    return replace(pair, drafter=folder)


def equal_and_drafted(plain: Served, served: Rehearsed, users: int) -> None:
    """Greedy answers are the plain server's, with drafts of which some are accepted."""
    expected = plain.generate_all(PROMPTS, users, **GREEDY)
    before = len(served.passes())
    got = served.server.generate_all(PROMPTS, users, **GREEDY)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    verified = sum(each["verified"] for each in served.passes()[before:])
    steps = sum(each["meta_info"]["spec_verify_ct"] for each in got)
    assert 0 < len(PROMPTS) * (TOKENS - 1) - steps < verified


@pytest.fixture(scope="module")
def eager(pool: ServerPool, moe_pair: tiny_models.TinyPair) -> Rehearsed:
    return start_rehearsed(pool, "experts", moe_pair)


@pytest.mark.parametrize("users", [1, 4])
def test_greedy_answers_are_the_plain_servers(plain: Served, eager: Rehearsed, users: int) -> None:
    equal_and_drafted(plain, eager, users)
    assert "DSparkMoEModel" in eager.server.log
    assert "experts by torch" in eager.server.log


def test_it_is_scheduled(eager: Rehearsed) -> None:
    """Windows are ragged, and no value is read while a step is launched."""
    partly = [each for each in eager.passes() if 0 < each["verified"] < GAMMA * each["pass"]]
    assert partly
    assert [each for each in eager.launches() if each["reads"]] == []


@pytest.mark.slow
def test_products_that_read_the_host_keep_the_draft_outside_graphs(
    plain: Served, pool: ServerPool, moe_pair: tiny_models.TinyPair
) -> None:
    served = start_rehearsed(pool, "experts-outside", moe_pair, *SIZES, **GRAPHS)
    equal_and_drafted(plain, served, 4)
    assert served.server.log.count(OUTSIDE) == 1
    assert all(each["replayed"] for each in served.passes())
    assert not any(each["drafts_replayed"] for each in served.passes())


@pytest.mark.slow
def test_our_grouped_kernels_are_captured(
    plain: Served, pool: ServerPool, moe_pair: tiny_models.TinyPair
) -> None:
    """They run in Triton's interpreter, so few tokens are asked for."""
    served = start_rehearsed(
        pool, "experts-captured", moe_pair, *SIZES, TRITON_INTERPRET="1", **GRAPHS
    )
    few = {**GREEDY, "max_new_tokens": 8}
    expected = plain.generate_all(PROMPTS[:4], 4, **few)
    got = served.server.generate_all(PROMPTS[:4], 4, **few)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    assert "experts by triton" in served.server.log
    assert OUTSIDE not in served.server.log
    drafted = [each for each in served.passes() if each["verified"]]
    assert drafted
    assert all(each["drafts_replayed"] for each in drafted)


@pytest.mark.slow
def test_steps_are_the_engines(
    pool: ServerPool, moe_pair: tiny_models.TinyPair, tmp_path: Path
) -> None:
    """With every draft verified, as many steps and accepted drafts as the drafter itself gives:
    window, streams and experts are the trained ones; prompts are longer and shorter than it."""
    static = tmp_path / "static.yaml"
    static.write_text("cpu: {overlap: true}\nschedule: {mode: static}\n")
    served = start_rehearsed(pool, "experts-static", moe_pair, "--dspark-config", str(static))
    target = TargetModel.load(moe_pair.target, (0, 1))
    settings = DecodeSettings(max_new_tokens=TOKENS, batch=8)
    drafter = open_drafter(moe_pair.drafter, target)
    own = ReferenceEngine(target, drafter, settings).run(PROMPTS)
    answers = served.server.generate_all(PROMPTS, 8, **GREEDY)
    assert [each["output_ids"] for each in answers] == [list(each.tokens) for each in own]
    accepted = [each["meta_info"]["spec_num_correct_drafts"] for each in answers]
    assert accepted == [sum(step.accepted for step in each.steps) for each in own]
    assert sum(accepted) > TOKENS, "too few accepted drafts to tell anything"
