"""`python -m tests.faults`: inject every fault into live servers and record the results.

The table in docs/faults.md is written from that record (`make docs-reference`). Options behind `--`
go to pytest. With `-k test_steps`, say, only those are run, and only their lines of the record are
exchanged, if the rest is of the same commit.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from sglang_dspark.common.files import load_json
from sglang_dspark.common.machine import cpu_description, with_speed
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.results import commit, now, require_clean, write_document

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
RESULTS = ROOT / "results" / "faults_cpu.json"


class Recorder:
    """A pytest plugin that keeps the outcomes that tests noted, in order."""

    def __init__(self) -> None:
        self.outcomes: list[dict[str, Any]] = []
        self.ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcomes of a test that passed."""
        test = report.nodeid.removeprefix("tests/faults/")
        self.ran.add(test)
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                if name == "outcome":
                    self.outcomes.append({**json.loads(str(value)), "test": test})


def document(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result file."""
    return {
        "name": "faults",
        "command": "python -m tests.faults",
        "commit": commit(),
        "device": with_speed(cpu_description()),
        "date": now(),
        "metrics": {"faults": outcomes},
    }


def kept(path: Path) -> list[dict[str, Any]]:
    """Read the outcomes of an earlier run of the same commit; none without such a run."""
    if not path.is_file():
        return []
    earlier = load_json(path)
    return list(earlier["metrics"]["faults"]) if earlier["commit"] == commit() else []


def joined(
    earlier: list[dict[str, Any]], found: list[dict[str, Any]], ran: Set[str]
) -> list[dict[str, Any]]:
    """Join both in the order of the test files; tests that ran now lose their earlier lines."""
    both = [each for each in earlier if each["test"] not in ran] + found
    return sorted(both, key=lambda each: each["test"].partition("::")[0])


def main(
    options: Annotated[list[str] | None, typer.Argument(help="for pytest")] = None,
    path: Annotated[Path, typer.Option("--json", help="where the record goes")] = RESULTS,
) -> None:
    """Run all tests of faults, slow ones too, and write a line of each that passes.

    Ends with pytest's status. A test that fails has no line, nor an earlier one.
    """
    recorder = Recorder()
    try:
        require_clean(path)
        status = pytest.main([str(HERE), "--slow", *(options or [])], plugins=[recorder])
        outcomes = joined(kept(path), recorder.outcomes, recorder.ran)
        write_document(path, document(outcomes))
    except DSparkError as error:
        typer.echo(f"faults: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{len(recorder.outcomes)} faults, of {len(outcomes)} in {path}")
    raise typer.Exit(int(status))


if __name__ == "__main__":
    typer.run(main)
