"""Algorithm 1 served (`schedule.algorithm: early-stop`): K by the present step, floors before it.

The floors are there because a stop that did not count them looked ahead (docs/losslessness.md). The
tests of test_scheduled_distribution.py check the distribution, those of test_greedy_equal.py greedy
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.prompts import PROMPTS
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.test_greedy_equal import check_equal
from tests.integration.test_scheduled_distribution import check_distribution

PLANTED = Path(__file__).parent / "planted"

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]


@pytest.fixture(scope="module")
def early_stop(pool: ServerPool, demo_target: Path, demo_drafter: Path) -> Iterator[Served]:
    """The demo pair under Algorithm 1; in a step that drafts everybody has one draft verified.

    What passes cost is planted: beside busy neighbours no draft may pay.
    """
    config = pool.folder / "early-stop.yaml"
    config.write_text("schedule: {algorithm: early-stop, fairness_floor: 1}\n")
    yield pool.start(
        "early-stop",
        demo_target,
        *DSPARK_FLAGS,
        str(demo_drafter),
        "--max-running-requests",
        "16",
        "--dspark-config",
        str(config),
        PYTHONPATH=str(PLANTED),
        DSPARK_PLANTED_COSTS="1",
        XDG_CACHE_HOME=str(pool.folder / "planted"),  # a private cache for the planted costs
    )
    pool.stop("early-stop")


def test_the_log_names_the_algorithm(early_stop: Served) -> None:
    (line,) = [line for line in early_stop.log.splitlines() if "sglang-dspark: mode " in line]
    assert "mode compact, scheduled by confidence, algorithm early-stop;" in line


@pytest.mark.slow
def test_sampling_follows_the_plain_distribution(plain: Served, early_stop: Served) -> None:
    counts = check_distribution(plain, early_stop, scheduled=True)
    assert counts[2] > 0, "no window ended with its floor"
    assert sum(counts[3:]) > 0, "nothing was verified behind the floors"


def test_greedy_tokens_are_equal(plain: Served, early_stop: Served) -> None:
    """A prompt in four at concurrency 4, where what is verified varies most."""
    accepted = check_equal(plain, early_stop, 4, PROMPTS[::4], tokens=48)
    assert accepted > 0, "no draft was ever accepted: nothing was tested"
