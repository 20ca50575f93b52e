"""A drafter that runs once a token, served and scheduled by DSPARK: the shipped MTP drafter.

What passes cost is planted, as in test_headless.py. test_served.py (tests/families) compares the
steps of random Eagle3 and MTP drafters with the reference engine's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.prompts import PROMPTS
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.test_greedy_equal import check_equal
from tests.integration.test_headless import PLANTED, mean_window
from tests.integration.test_scheduled_distribution import check_distribution
from tests.integration.test_scheduling import windows
from tests.integration.test_seeds import seeded, tokens

MTP = Path(__file__).parents[2] / "drafters" / "smollm2-135m-mtp"

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]


@pytest.fixture(scope="module")
def chained(pool: ServerPool, demo_target: Path) -> Iterator[Served]:
    yield pool.start(
        "chained",
        demo_target,
        *DSPARK_FLAGS,
        str(MTP),
        "--max-running-requests",
        "16",
        "--chunked-prefill-size",  # prompts of several chunks
        "64",
        PYTHONPATH=os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]),
        DSPARK_PLANTED_COSTS="1",
        XDG_CACHE_HOME=str(pool.folder / "planted-chained"),  # a cache for planted costs
    )
    pool.stop("chained")


@pytest.mark.parametrize(("concurrency", "part"), [(1, 12), (8, 4)])
def test_greedy_tokens_are_equal(
    plain: Served, chained: Served, concurrency: int, part: int
) -> None:
    accepted = check_equal(plain, chained, concurrency, PROMPTS[::part], tokens=48)
    assert accepted > 0, "no draft was ever accepted: nothing was tested"


@pytest.mark.slow
def test_drafts_are_fewer_under_load_and_windows_have_many_lengths(chained: Served) -> None:
    assert "scheduled by draft probability, algorithm search" in chained.log
    fields = {"max_new_tokens": 64, "sampling_params": {"ignore_eos": True}}
    alone = chained.generate_all(PROMPTS[:3], 1, **fields)
    crowded = chained.generate_all(PROMPTS[:32], 16, **fields)
    assert mean_window(crowded) < 0.8 * mean_window(alone)
    assert sum(steps > 0 for steps in windows(crowded)) >= 3, windows(crowded)


def test_a_prefix_and_a_long_prompt_keep_acceptance(plain: Served, chained: Served) -> None:
    """Chunks of 64 tokens: a lost or misplaced entry of the context lowers acceptance."""
    rates, prompt, settings = [], PROMPTS[0] * 6, {"ignore_eos": True}
    expected = plain.generate(prompt, 48, sampling_params=settings)["output_ids"]
    chained.flush_cache()
    for _ in range(2):
        answer = chained.generate(prompt, 48, sampling_params=settings)
        assert answer["output_ids"] == expected
        meta = answer["meta_info"]
        rates.append(meta["spec_num_correct_drafts"] / meta["spec_verify_ct"])
    assert meta["cached_tokens"] > 64, "the second request read no prefix"
    assert rates[1] > 0.6 * rates[0] > 0.1, rates


def test_a_seed_decides_the_tokens(plain: Served, chained: Served) -> None:
    seeds = range(2000, 2008)
    alone = seeded(chained, 1, seeds)
    assert tokens(seeded(chained, 8, seeds)) == tokens(alone)
    assert tokens(seeded(plain, 4, seeds)) == tokens(alone), "drafts changed a seeded answer"
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in alone) > 0


@pytest.mark.slow
def test_sampling_follows_the_plain_distribution(plain: Served, chained: Served) -> None:
    counts = check_distribution(plain, chained, scheduled=True)
    assert sum(counts[2:]) > 0, "nothing was verified"
