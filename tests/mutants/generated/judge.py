"""Judge generated mutants: does a test fail with the mutant in force?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_dspark.errors import DSparkError
from tests.mutants.generated.operators import Site
from tests.mutants.generated.tests_of import FOLDERS, Recorded
from tests.mutants.report import REPORT_VARIABLE
from tests.mutants.tree import ROOT, Tree

What = Literal["killed", "survived", "uncovered"]
# Seconds of tests as recorded: first those that run the line, then all of their files.
NEAR_S, WHOLE_S = 20.0, 30.0
MOST_TESTS = 120
LONGEST_S = 600.0  # of a test file that no record times
_SPARE_S = 60.0
_USAGE, _NONE = 4, 5  # pytest's statuses of a run that ran nothing
_IMPORTING = "ERROR collecting tests/"  # and what it prints where a test file raises
_MISSING = "ERROR: not found: "  # and where a test has no such parameter


@dataclass(frozen=True)
class Verdict:
    """what became of the mutant `name`. why: the test that failed, or how many passed."""

    name: str
    what: What
    why: str


class Judge:
    """A copy of the source and a process that forks pytest runs in it; one mutant at a time."""

    def __init__(self, folder: Path, recorded: Recorded, tests: Sequence[str] = FOLDERS) -> None:
        """folder: an empty one, absolute. tests: files and folders of all tests that will run.

        Raises DSparkError where a copy cannot be made.
        """
        self._tree, self._recorded = Tree(folder), recorded
        self._output, self._report = folder / "output", folder / "report.json"
        self._clean: set[str] = set()
        self._compile(tests)
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.generated.zygote"],
            cwd=self._tree.folder,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _compile(self, tests: Sequence[str]) -> None:
        """Write the byte code of the copy and of its tests once, as pytest rewrites them; a child
        that runs with a mutant writes none, so that no mutant outlives its run."""
        environment = self._environment()
        del environment["PYTHONDONTWRITEBYTECODE"]
        for command in (
            ["compileall", "-q", "sglang_dspark", "loadtest", "kernels", "patches"],
            ["pytest", "-q", "-p", "tests.mutants.report", "--collect-only", *tests],
        ):
            done = subprocess.run(
                [sys.executable, "-m", *command],
                cwd=self._tree.folder,
                env=environment,
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                raise DSparkError(f"the copy has a fault of its own: {done.stdout[-300:]}")

    def _environment(self) -> dict[str, str]:
        # A mutant anywhere in schedule/ has all of it compiled again: quickly rather than well.
        quick = {"NUMBA_OPT": "0"}
        return self._tree.environment() | quick | {REPORT_VARIABLE: str(self._report)}

    def close(self) -> None:
        """End the process; the copy is the caller's."""
        self._zygote.kill()
        self._zygote.wait()

    def judge(self, site: Site) -> Verdict:
        """Run tests with the mutant in force until one fails."""
        near = self._recorded.tests_of(site, NEAR_S)[:MOST_TESTS]
        if not near:
            return Verdict(site.name, "uncovered", "no test runs the line")
        every = self._recorded.tests_of(site, float("inf"))
        whole = self._recorded.files_of(site, every, WHOLE_S)
        return self._verdict(site, near, whole)

    def judge_with(self, site: Site, files: Sequence[str]) -> Verdict:
        """Run these test files alone with the mutant in force until one test fails.

        Needs no record. Raises DSparkError for a file that fails without a mutant.
        """
        for file in files:
            if file not in self._recorded.seconds:
                begin = time.monotonic()
                if self._run([file], LONGEST_S)[0] != 0:
                    raise DSparkError(f"{file} fails without a mutant: fix that and start anew")
                self._recorded.seconds[file] = time.monotonic() - begin
        return self._verdict(site, files)

    def _verdict(self, site: Site, *rounds: Sequence[str]) -> Verdict:
        passed = 0
        for tests in rounds:
            while tests:
                with self._with_fault(site):
                    status, failed, count = self._run(tests)
                    # Behind other tests one may fail by what they left; alone it has to fail too.
                    is_first = failed in ("", tests[0])
                    fails_alone = is_first or self._run([failed])[0] != 0
                if status == 0:
                    passed = max(passed, count)
                    break
                if status is None:
                    return Verdict(site.name, "killed", "no end")
                if status in (_USAGE, _NONE):
                    output = self._output.read_text(encoding="utf-8")
                    if _IMPORTING in output:
                        return Verdict(site.name, "killed", "a test file cannot be imported")
                    left = [test for test in tests if f"/{test.split('[')[0]}\n" not in output]
                    if _MISSING not in output or len(left) == len(tests):
                        raise DSparkError(f"no test ran: {output[-300:]}")
                    tests = left  # a parameter of theirs is the constant that was changed
                    continue
                if not failed:
                    return Verdict(site.name, "killed", f"status {status}")
                if fails_alone and self._is_clean(failed):
                    return Verdict(site.name, "killed", failed)
                tests = [test for test in tests if test not in (failed, failed.split("::")[0])]
        return Verdict(site.name, "survived", f"{passed} tests passed")

    def _with_fault(self, site: Site) -> AbstractContextManager[None]:
        source = (ROOT / site.file).read_bytes()
        return self._tree.with_text(site.file, site.applied(source).decode())

    def _is_clean(self, test: str) -> bool:
        """Return whether a test passes without any mutant; a whole file counts as passing."""
        if test not in self._clean and "::" in test:
            if self._run([test])[0] != 0:
                return False
            self._clean.add(test)
        return True

    def _run(
        self, tests: Sequence[str], timeout_s: float | None = None
    ) -> tuple[int | None, str, int]:
        """pytest's status (None: it had no end), the first test that failed, how many passed."""
        self._report.unlink(missing_ok=True)
        arguments = [
            "-q",
            "-x",
            "--hypothesis-seed=0",
            "-p",
            "tests.mutants.report",
            "-p",
            "no:cacheprovider",
        ]
        arguments += ["-m", "not server", *tests]
        if timeout_s is None:
            timeout_s = 3 * self._recorded.expected_s(list(tests)) + _SPARE_S
        asked = {
            "arguments": arguments,
            "timeout_s": timeout_s,
            "output": str(self._output),
        }
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(asked) + os.linesep)
        self._zygote.stdin.flush()
        status = self._answer()["status"]
        if not self._report.is_file():
            return status, "", 0
        told = json.loads(self._report.read_text(encoding="utf-8"))
        if told["foreign"]:
            raise DSparkError(f"not the copy was imported, but {told['foreign'][0]}")
        return status, next(iter(told["failed"]), ""), told["passed"]

    def _answer(self) -> dict[str, int | None]:
        assert self._zygote.stdout is not None
        line = self._zygote.stdout.readline()
        if not line:
            raise DSparkError("the process that forks the tests has ended")
        found: dict[str, int | None] = json.loads(line)
        return found
