"""docs/results-stability.md: its figures of screen and soak are those of the results."""

from __future__ import annotations

from tools.docs import screen
from tools.docs.sweep import rewritten


def test_the_page_is_the_results() -> None:
    page = screen.PAGE.read_text()
    found, soak = screen.results(screen.SCREEN), screen.results(screen.SOAK)
    said = rewritten(page, screen.section(found, soak), screen.MARKS)
    assert said == page, "run `python -m tools.docs.screen`"
    next(iter(found["metrics"]["runs"].values()))["unexplained"] += 1
    assert rewritten(page, screen.section(found, soak), screen.MARKS) != page
