"""Overlap scheduling, off on a CPU unless configured: with it the answers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.prompts import PROMPTS
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.test_greedy_equal import (
    NEAR_TIE,
    accepted_drafts,
    first_difference,
    logit_gap,
)
from tests.integration.test_penalties import SETTINGS
from tests.integration.test_scheduling import await_counts, counts_at_rest

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

TOKENS = 32


@pytest.fixture(scope="module")
def overlapped(pool: ServerPool, demo_target: Path, demo_drafter: Path) -> Iterator[Served]:
    """The demo pair under the overlap loop, in pages of 16 tokens; it drafts on a busy machine."""
    config = pool.folder / "overlap.yaml"
    config.write_text("cpu: {overlap: true}\nschedule: {threshold: 0.3}\n")
    arguments = ("--max-running-requests", "16", "--dspark-config", str(config), "--enable-metrics")
    arguments += ("--page-size", "16")
    yield pool.start("overlap", demo_target, *DSPARK_FLAGS, str(demo_drafter), *arguments)
    pool.stop("overlap")


def overlaps(server: Served) -> bool:
    return not server.request("GET", "/server_info").json()["disable_overlap_schedule"]


@pytest.mark.slow
def test_only_where_configured(plain: Served, dspark: Served, overlapped: Served) -> None:
    assert not overlaps(plain)
    assert not overlaps(dspark)
    assert overlaps(overlapped)


SLOW = [pytest.param(settings, marks=pytest.mark.slow) for settings in SETTINGS[:-1]]


@pytest.mark.parametrize("settings", [{"ignore_eos": True}, *SLOW, SETTINGS[-1]], ids="+".join)
def test_answers_are_the_plain_servers(
    plain: Served, overlapped: Served, settings: dict[str, Any]
) -> None:
    fields = {"max_new_tokens": TOKENS, "sampling_params": settings}
    expected = plain.generate_all(PROMPTS[:8], 2, **fields)
    got = overlapped.generate_all(PROMPTS[:8], 2, **fields)
    assert accepted_drafts(got)[0] > 0, "no draft was accepted: nothing was tested"
    for prompt, reference, answer in zip(PROMPTS, expected, got, strict=False):
        a, b = reference["output_ids"], answer["output_ids"]
        at = first_difference(a, b)
        if at is not None:
            gap = logit_gap(plain, prompt, a[:at], (a[at], b[at]))
            assert gap < NEAR_TIE, f"{prompt[:60]!r}: token {at} is {b[at]}, not {a[at]} ({gap})"
    assert "penalties by what is listed" not in overlapped.log


def test_counters_at_rest_are_the_answers(overlapped: Served) -> None:
    """A step that was on its way when the answer ended ran too; upstream leaves it out."""
    for prompt in PROMPTS[:3]:
        before = counts_at_rest(overlapped)
        fields = {"max_new_tokens": 48, "sampling_params": {"ignore_eos": True}}
        meta = overlapped.generate(prompt, **fields)["meta_info"]
        await_counts(overlapped, before, meta, unread=1)
