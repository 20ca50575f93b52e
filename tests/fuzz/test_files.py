"""A small share of the generated files and cut-off writers.

The cases hang on what hypothesis finds in the modules that are loaded, so other ones come with each
run of tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.fuzz.__main__ import GROUPS, counts, of_files
from tests.fuzz.explore import Family, explore

CASES = {"config": 600, "tables": 400, "records": 600, "checkpoints": 350, "writers": 30}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Family]:
    return of_files(GROUPS, tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("group", CASES)
def test_nothing_is_found(group: str, families: Sequence[Family]) -> None:
    chosen = [each for each in families if each.group == group]
    tallies = [
        explore(family, count)
        for family, count in zip(chosen, counts(chosen, CASES[group]), strict=True)
    ]
    for tally in tallies:
        print(tally.line())
    found = [str(each) for tally in tallies for each in tally.findings.values()]
    assert not found, "\n".join(found)
    assert sum(each.cases for each in tallies) >= CASES[group]
    assert sum(each.refused for each in tallies) > 0.3 * CASES[group]
