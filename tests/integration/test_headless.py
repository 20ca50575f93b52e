"""A drafter without a confidence head, served: scheduled by its own draft probabilities.

The demo drafter loses its head. What passes cost is planted: beside busy neighbours no draft may
pay. Greedy tokens are held to the test of test_greedy_equal.py, sampled ones to those of
test_scheduled_distribution.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.families.dflash import DFlashConfig, DFlashDrafter, save_dflash
from tests.drafter.helpers import copy_without_head
from tests.integration.prompts import PROMPTS
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.test_features import metric
from tests.integration.test_greedy_equal import check_equal
from tests.integration.test_scheduled_distribution import check_distribution
from tests.integration.test_scheduling import windows
from tests.integration.tiny_models import TinyPair

PLANTED = Path(__file__).parent / "planted"

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]


@pytest.fixture(scope="module")
def headless(pool: ServerPool, demo_target: Path, demo_drafter: Path) -> Iterator[Served]:
    yield pool.start(
        "headless",
        demo_target,
        *DSPARK_FLAGS,
        str(copy_without_head(demo_drafter, pool.folder / "headless-drafter")),
        "--max-running-requests",
        "16",
        "--enable-metrics",
        PYTHONPATH=os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]),
        DSPARK_PLANTED_COSTS="1",
        XDG_CACHE_HOME=str(pool.folder / "planted-headless"),  # a cache for planted costs
    )
    pool.stop("headless")


def mean_window(answers: list[dict[str, Any]]) -> float:
    """Drafts verified in a step of a request."""
    counts = windows(answers)
    return sum((length - 1) * steps for length, steps in enumerate(counts)) / sum(counts)


def test_one_line_says_where_confidence_comes_from(headless: Served) -> None:
    assert headless.log.count("the drafter has no confidence head (enable_confidence_head)") == 1
    (line,) = [line for line in headless.log.splitlines() if "sglang-dspark: mode " in line]
    assert "mode compact, scheduled by draft probability, algorithm search" in line


@pytest.mark.parametrize("concurrency", [1, 8])
def test_greedy_tokens_are_equal(plain: Served, headless: Served, concurrency: int) -> None:
    accepted = check_equal(plain, headless, concurrency, PROMPTS[::4], tokens=48)
    assert accepted > 0, "no draft was ever accepted: nothing was tested"


def test_drafts_are_fewer_under_load_and_windows_have_many_lengths(headless: Served) -> None:
    fields = {"max_new_tokens": 64, "sampling_params": {"ignore_eos": True}}
    alone = headless.generate_all(PROMPTS[:3], 1, **fields)
    crowded = headless.generate_all(PROMPTS[:32], 16, **fields)
    assert mean_window(crowded) < 0.8 * mean_window(alone)
    assert sum(steps > 0 for steps in windows(crowded)) >= 3, windows(crowded)
    assert 0 <= metric(headless, "sglang:dspark_calibration_error") < 0.25  # from no calibration


@pytest.fixture(scope="module")
def dflash(pool: ServerPool, noisy: TinyPair) -> Iterator[Served]:
    """The tiny target with a converted DFlash drafter of random weights; in a step that drafts each
    request has two drafts verified."""
    folder = pool.folder / "dflash"
    shape = replace(DrafterConfig.from_dir(noisy.drafter), num_layers=2)
    save_dflash(DFlashDrafter(DFlashConfig(shape)), folder / "dflash")
    out, target = str(folder / "dspark"), str(noisy.target)
    arguments = ["models", "convert", str(folder / "dflash"), "--target", target, "--out", out]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 0, ended.output
    config = folder / "floor.yaml"
    config.write_text("schedule: {fairness_floor: 2}\n")
    flags = ("--max-running-requests", "16", "--dspark-config", str(config))
    yield pool.start("dflash", noisy.target, *DSPARK_FLAGS, out, *flags)
    pool.stop("dflash")


@pytest.mark.slow
def test_a_converted_dflash_drafter_is_scheduled(
    pool: ServerPool, noisy: TinyPair, dflash: Served
) -> None:
    fields = {"max_new_tokens": 40, "sampling_params": {"ignore_eos": True}}
    prompts = [[5 + (7 * i + 3 * j) % 200 for j in range(3 + i)] for i in range(8)]
    got = dflash.generate_all(prompts, 4, **fields)
    assert "scheduled by draft probability, algorithm search" in dflash.log
    counts = windows(got)
    assert sum(counts[2:]) > 0, "nothing was verified"
    plain = pool.start("tiny-plain", noisy.target, "--max-running-requests", "16")
    expected = plain.generate_all(prompts, 4, **fields)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]


@pytest.mark.slow
def test_sampling_follows_the_plain_distribution(plain: Served, headless: Served) -> None:
    counts = check_distribution(plain, headless, scheduled=True)
    assert sum(counts[2:]) > 0, "nothing was verified"
