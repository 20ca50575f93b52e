"""A drafter without a confidence head, served: scheduled by its own draft probabilities.

The demo drafter loses its head. What passes cost is planted: beside busy neighbours no draft may
pay. Greedy tokens are held to the test of test_greedy_equal.py, sampled ones to those of
test_scheduled_law.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drafter.helpers import copy_without_head
from tests.integration.prompts import PROMPTS
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.test_features import metric
from tests.integration.test_greedy_equal import check_equal
from tests.integration.test_scheduled_law import check_law
from tests.integration.test_scheduling import windows

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


@pytest.mark.slow
def test_sampling_follows_the_plain_distribution(plain: Served, headless: Served) -> None:
    counts = check_law(plain, headless, scheduled=True)
    assert sum(counts[2:]) > 0, "nothing was verified"
