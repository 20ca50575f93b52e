"""CUDA's side of the step with a drafter that has no confidence head, eager and in graphs.

Confidence comes from the logits that the drafts were drawn from; in graphs those are the same
tensors at every replay. The drafters are those that no other rehearsal has: an RNN head eagerly, a
gated one in graphs, and in graphs a draft whose first row, the anchor's, drafts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sglang_dspark.drafter.checkpoint import save_drafter
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.families.dflash import DFlashConfig, DFlashDrafter
from sglang_dspark.families.dflash.as_dspark import as_dspark
from tests.drafter.helpers import strip_head
from tests.integration import tiny_models
from tests.integration.serving import Served, ServerPool
from tests.integration.test_scheduled_distribution import (
    ALPHA,
    Cut,
    evidence,
    rank_p_value,
    read_back,
)
from tests.rehearsal.conftest import Rehearsed, start_rehearsed
from tests.rehearsal.on_cpu import GAMMA
from tests.rehearsal.test_distribution import PROMPTS as MANY
from tests.rehearsal.test_overlap_steps import GREEDY, PROMPTS, TOKENS

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]


GRAPHS = ("--cuda-graph-bs-decode", "1", "2", "4", "8")
STEEP = {"DSPARK_REHEARSAL_GRAPHS": "1", "DSPARK_REHEARSAL_STAIR": "8e-3"}
COMPACT = {"SGLANG_RAGGED_VERIFY_MODE": "compact"}  # as our start sets it where the device is CUDA
DRAFTERS = {
    "eager": {"head": "rnn"},
    "graphs": {"head": "gated"},
    "graphs-1-plus-n": {"from_anchor": False},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("eager", marks=pytest.mark.slow),
        pytest.param("graphs", marks=pytest.mark.slow),
        "graphs-1-plus-n",
    ],
)
def headless(
    pool: ServerPool, pair: tiny_models.TinyPair, request: pytest.FixtureRequest
) -> Iterator[Rehearsed]:
    name = f"headless-{request.param}"
    folder = pool.folder / name
    strip_head(tiny_models.build_listening(folder, pair, **DRAFTERS[request.param]))
    graphs = () if request.param == "eager" else GRAPHS
    world = COMPACT | (STEEP if graphs else {})
    yield start_rehearsed(pool, name, replace(pair, drafter=folder), *graphs, **world)
    pool.stop(name)


def test_it_is_scheduled_and_says_by_what(headless: Rehearsed) -> None:
    log = [line for line in headless.server.log.splitlines() if "sglang-dspark" in line]
    said = "the drafter has no confidence head (enable_confidence_head)"
    assert len([line for line in log if said in line]) == 1, log
    assert any("scheduled by draft probability, algorithm search" in line for line in log), log
    assert not any("every draft is verified" in line for line in log), log


@pytest.mark.parametrize("users", [1, 4])
def test_greedy_answers_are_the_plain_servers(
    plain: Served, headless: Rehearsed, users: int
) -> None:
    expected = plain.generate_all(PROMPTS, users, **GREEDY)
    passes, launches = len(headless.passes()), len(headless.launches())
    got = headless.server.generate_all(PROMPTS, users, **GREEDY)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    accepted = sum(TOKENS - 1 - each["meta_info"]["spec_verify_ct"] for each in got)
    assert accepted > TOKENS, "too few drafts were accepted"
    lengths = {n for each in headless.passes()[passes:] for n in each["lengths"]}
    if users > 1:  # a single user's tier holds whole windows
        assert len(lengths & set(range(GAMMA + 1))) >= 3, "windows must be ragged"
    assert [each for each in headless.launches()[launches:] if each["reads"]] == []


def test_what_is_drawn_has_plain_decodings_distribution(plain: Served, headless: Rehearsed) -> None:
    cut = Cut(top_k=20, top_p=0.95)
    fields = {"max_new_tokens": TOKENS, "sampling_params": cut.sampling()}
    passes = len(headless.passes())
    answers = headless.server.generate_all(MANY, 4, **fields)
    drawn = []
    for prompt, answer in zip(MANY, answers, strict=True):
        drawn += read_back(plain, prompt, answer["output_ids"], cut)
    verified = [n for each in headless.passes()[passes:] for n in each["lengths"]]
    assert sum(0 < n < GAMMA for n in verified) > 50, "nothing is ragged"
    assert evidence(drawn) < math.log(1 / ALPHA)
    assert rank_p_value(drawn) > ALPHA


@pytest.mark.slow
def test_a_converted_dflash_drafter_is_scheduled(
    pool: ServerPool, pair: tiny_models.TinyPair, plain: Served
) -> None:
    """Of random weights, so each step that drafts has two drafts of a request verified."""
    folder = pool.folder / "dflash"
    shape = replace(DrafterConfig.from_dir(pair.drafter), num_layers=2)
    save_drafter(as_dspark(DFlashDrafter(DFlashConfig(shape))), folder)
    config = folder / "floor.yaml"
    config.write_text("schedule: {fairness_floor: 2}\ncpu: {overlap: true}\n")
    converted = replace(pair, drafter=folder)
    flags = (*GRAPHS, "--dspark-config", str(config))
    rehearsed = start_rehearsed(pool, "dflash", converted, *flags, **COMPACT, **STEEP)
    expected = plain.generate_all(PROMPTS, 4, **GREEDY)
    got = rehearsed.server.generate_all(PROMPTS, 4, **GREEDY)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    assert "scheduled by draft probability, algorithm search" in rehearsed.server.log
    assert "every draft is verified" not in rehearsed.server.log
    assert sum(each["verified"] for each in rehearsed.passes()) > 0, "nothing was verified"
    pool.stop("dflash")
