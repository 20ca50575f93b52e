"""Test that the audit reports its findings and what it skipped; unknown is not sound."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tools import audit

SOUND: dict[str, Any] = {"name": "one", "version": "1.0", "vulns": []}
FAULTY: dict[str, Any] = {
    "name": "two",
    "version": "2.0",
    "vulns": [
        {"id": "PYSEC-1", "fix_versions": ["2.1", "3.0"], "aliases": []},
        {"id": "PYSEC-2", "fix_versions": [], "aliases": []},
    ],
}
UNKNOWN = {"name": "three", "skip_reason": "Dependency not found on PyPI"}


def printing(text: str, status: int = 0, error: str = "") -> list[str]:
    code = f"import sys; print({text!r}); print({error!r}, file=sys.stderr); sys.exit({status})"
    return audit.ask([sys.executable, "-c", code])


def test_faults_are_named_with_the_versions_that_fix_them() -> None:
    """pip-audit ends with status 1 where it has found some."""
    lines = printing(json.dumps({"dependencies": [SOUND, FAULTY, UNKNOWN], "fixes": []}), status=1)
    assert lines == [
        "2 of 3 packages audited, 1 with known faults",
        "two 2.0: PYSEC-1, fixed in 2.1, 3.0",
        "two 2.0: PYSEC-2, fixed in no version yet",
    ]


def test_an_index_without_advisories_is_not_taken_for_a_clean_bill() -> None:
    (line,) = printing(json.dumps({"dependencies": [UNKNOWN, UNKNOWN], "fixes": []}))
    assert line == "nothing was audited: the index has no advisories on any of 2 packages"


@pytest.mark.parametrize("text", ["", "[]", "null", '{"fixes": []}', "Traceback"])
def test_a_service_out_of_reach_is_one_line(text: str) -> None:
    (line,) = printing(text, status=1, error="a\nb: Name or service not known")
    assert line.startswith("nothing was audited: the advisory service was not reached (b: Name")


def test_a_missing_program_is_one_line() -> None:
    (line,) = audit.ask(["/nowhere/timeout", "1"])
    assert line.startswith("nothing was audited: /nowhere/timeout does not run")
    (line,) = audit.ask(["timeout", "1", "/nowhere/uv", "tool"])
    assert line == "nothing was audited: uv, which runs pip-audit, is not installed here"


def test_it_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LIMIT_S", 1)
    assert audit.command("x")[:2] == ["timeout", "1"]
    (line,) = audit.ask(["timeout", "1", sys.executable, "-c", "import time; time.sleep(60)"])
    assert line == "nothing was audited: no answer within 1 s"


def test_ci_asks_and_goes_on() -> None:
    """It runs after the installation of uv, and its exit status is always 0."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    (place,) = (i for i, line in enumerate(lines) if "tools.audit" in line)
    assert any("install --quiet uv" in line for line in lines[:place])
    assert audit.LIMIT_S < 60
