"""Find the tests that run a line of the product, the fastest first, from a recorded run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from sglang_dspark.errors import DSparkError
from tests.mutants.generated.operators import Site
from tests.mutants.generated.recorder_names import DATA, RECORD_VARIABLE, SECONDS
from tests.mutants.generated.sample import mutated_files
from tests.mutants.tree import ROOT

# Whose tests run the mutated modules.
FOLDERS = tuple(
    f"tests/{each}"
    for each in (
        *("verify", "schedule", "serving", "step", "backends", "loadtest"),
        *("evaluation", "training", "drafter", "models", "families", "cli", "experts"),
        *("parallel", "patches", "test_intervals.py", "test_broken_inputs.py"),
    )
)
SOURCES = "sources.sha256"
_UNKNOWN_S = 1.0


@dataclass
class Recorded:
    """lines: by file, the tests that ran each line. seconds: of each test with its fixtures."""

    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def tests_of(self, site: Site, limit_s: float) -> list[str]:
        """Tests that run the mutant's statement, the fastest first, as many as take `limit_s`.

        For a statement that runs as its module is imported: all tests that run anything there.
        Machine code leaves no trace: for a function without one also the tests of its folder.
        """
        by_line = self.lines.get(site.file, {})
        lines = range(site.first, site.last + 1)
        found = {test for line in lines for test in by_line.get(line, ())}
        traced = bool(found)
        if not site.function or not traced:
            found |= {test for tests in by_line.values() for test in tests}
        if (site.function and not traced) or not found:
            folders = tuple(f"tests/{part}/" for part in Path(site.file).parts[-3:-1])
            found |= {test for test in self.seconds if test.startswith(folders)}
        return self._first(found, limit_s)

    def files_of(self, site: Site, tests: list[str], limit_s: float) -> list[str]:
        """The files of these tests, the module's own first, then those with most of them: a fixture
        runs lines for the first test alone that uses it, and another one may be the one that looks.
        """
        own = f"test_{Path(site.file).stem}"
        counts: dict[str, int] = defaultdict(int)
        for test in tests:
            counts[test.split("::")[0]] += 1
        totals: dict[str, float] = defaultdict(float)
        for test, seconds in self.seconds.items():
            totals[test.split("::")[0]] += seconds
        kept: list[str] = []
        taken = 0.0

        def order(file: str) -> tuple[bool, float, str]:
            return not Path(file).stem.startswith(own), totals[file] / counts[file], file

        for file in sorted(counts, key=order):
            taken += totals[file]
            if kept and taken > limit_s:
                break
            kept.append(file)
        return kept

    def _first(self, tests: set[str], limit_s: float) -> list[str]:
        kept: list[str] = []
        taken = 0.0
        for test in sorted(tests, key=lambda each: (self.seconds.get(each, _UNKNOWN_S), each)):
            taken += self.seconds.get(test, _UNKNOWN_S)
            if kept and taken > limit_s:
                break
            kept.append(test)
        return kept

    def expected_s(self, tests: list[str]) -> float:
        """Seconds that these tests, or test files, took when they were recorded."""
        if tests and "::" not in tests[0]:
            files = set(tests)
            return sum(s for test, s in self.seconds.items() if test.split("::")[0] in files)
        return sum(self.seconds.get(each, _UNKNOWN_S) for each in tests)


def record(folder: Path) -> None:
    """Run the suite once without servers, recording.

    A test that fails, as one that measures time or memory may beside a tracer, kills no mutant
    later: the judge runs what fails without the mutant too. `folder` exists once all is recorded.
    Raises DSparkError where pytest does not come to its end.
    """
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / SOURCES).write_text(_digest(), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup"]
    command += ["-m", "not server", "-p", "tests.mutants.generated.recorder", *FOLDERS]
    environment = {RECORD_VARIABLE: str(part), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    status = subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode
    if status not in (0, 1):
        raise DSparkError(f"pytest ended with status {status}: fix that and start anew")
    if not _read_seconds(part):  # xdist ends so where its workers collect different tests
        raise DSparkError("pytest ran no test; its output above says why: fix that and start anew")
    part.rename(folder)


def _read_seconds(folder: Path) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for path in sorted(folder.glob(f"{SECONDS}.*.json")):
        seconds |= json.loads(path.read_text(encoding="utf-8"))
    return seconds


def _digest() -> str:
    """Of the mutated modules as they are: a record of other lines would name other tests."""
    digest = hashlib.sha256()
    for file in mutated_files(ROOT):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_recorded(folder: Path) -> Recorded:
    """Read what `record` wrote. Raises DSparkError where there is nothing, or of other source."""
    import coverage

    try:
        of_today = (folder / SOURCES).read_text(encoding="utf-8") == _digest()
    except FileNotFoundError:
        of_today = False
    if not of_today:
        raise DSparkError(f"{folder} was recorded with other source: remove it and start anew")
    recorded = Recorded(seconds=_read_seconds(folder))
    for path in sorted(folder.glob(f"{DATA}.*")):
        data = coverage.CoverageData(str(path))
        data.read()
        for name in data.measured_files():
            file = str(Path(name).resolve().relative_to(ROOT))
            by_line = recorded.lines.setdefault(file, defaultdict(set))
            for line, tests in data.contexts_by_lineno(name).items():
                by_line[line] |= {unquote(test) for test in tests if test}
    if not recorded.lines:
        raise DSparkError(f"{folder} holds no recorded run; name another --out")
    return recorded
