"""A share of the generated requests, the same ones every time; `make fuzz` sends thousands."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import counts
from tests.fuzz.explore import explore
from tests.fuzz.live import Live, families
from tests.integration.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]
REQUESTS = 300


def test_requests_are_answered_or_refused(tiny_dspark: Served) -> None:
    chosen = list(families(Live(tiny_dspark)))
    tallies = [
        explore(family, count)
        for family, count in zip(chosen, counts(chosen, REQUESTS), strict=True)
    ]
    for tally in tallies:
        print(tally.line())
    found = [str(each) for tally in tallies for each in tally.findings.values()]
    assert not found, "\n".join(found)
    assert sum(each.cases for each in tallies) >= REQUESTS
    # The tiny model has no chat template, so all chats are refused.
    others = [each for each in tallies if "/chat/" not in each.name]
    assert sum(each.accepted for each in others) > 0.1 * sum(each.cases for each in others)
    assert sum(each.refused for each in tallies) > 0.1 * REQUESTS
