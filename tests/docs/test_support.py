"""docs/support.md: every cell begins with an explained state, every fixed fault is listed."""

from __future__ import annotations

import re

import pytest

from sglang_dspark.patches import all_seams
from tests.docs.pages import DOCS
from tools.docs import support

STATES = {"served", "ran", "rehearsed", "unscheduled", "refused", "untried"}
TEXT = support.support_page()


def tables() -> dict[str, list[list[str]]]:
    """Rows of the tables of states by heading, without their heads."""
    found = {}
    for section in TEXT.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in body.splitlines()
            if line[:2] == "| "
        ]
        found[heading] = rows[1:]
    return found


def test_states_are_explained() -> None:
    explained = re.findall(r"^\| (\w+) \| ", TEXT.split("\n## ")[0], re.MULTILINE)
    assert set(explained) - {"state"} == STATES


@pytest.mark.parametrize("heading", ["Targets", "Drafters", "Devices", "Features"])
def test_every_cell_has_a_state(heading: str) -> None:
    rows = tables()[heading]
    assert len(rows) >= 5
    for name, *cells in rows:
        words = [re.split(r"[ ,;:]", cell)[0] for cell in cells if cell]
        assert words, name
        assert set(words) <= STATES | {"impossible"}, (name, words)


def test_every_fault_that_is_fixed_is_listed() -> None:
    own = {seam.name for seam in all_seams(upstream_fixes=False)}
    fixes = [seam for seam in all_seams() if seam.name not in own]
    assert len(fixes) > 20
    for seam in fixes:
        assert f"| {seam.why} |" in TEXT, seam.name
    assert (DOCS / "support.md").read_text() == TEXT


def test_threads_are_links() -> None:
    assert support._link("sgl-project/sglang#1") == (
        "[sgl-project/sglang#1](https://github.com/sgl-project/sglang/issues/1)"
    )
    assert support._link("none found (2026-11-27)") == "none found (2026-11-27)"
