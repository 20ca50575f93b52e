"""Generated mutants: what is changed, what is left alone, and how a sample is drawn."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from tests.mutants.generated import __main__ as program
from tests.mutants.generated import tests_of
from tests.mutants.generated.equivalent import EQUIVALENT
from tests.mutants.generated.judge import Judge, Verdict, What
from tests.mutants.generated.operators import Site, generate
from tests.mutants.generated.sample import all_sites, area_of, drawn
from tests.mutants.generated.tests_of import SOURCES, Recorded, read_recorded
from tests.mutants.tree import ROOT


def mutated(source: str) -> set[str]:
    """All mutants of a source, each as its whole text."""
    return {site.applied(source.encode()).decode() for site in generate("a.py", source)}


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("x = a < b\n", {"x = (a <= b)\n", "x = (a >= b)\n"}),
        ("x = a is None\n", {"x = (a is not None)\n"}),
        ("x = a - b\n", {"x = (a + b)\n"}),
        ("x = a and b\n", {"x = (a or b)\n"}),
        ("x = not a\n", {"x = (a)\n"}),
        ("x = 0\n", {"x = 1\n"}),
        ("x = 2\n", {"x = 1\n", "x = 3\n"}),
        ("x = 0.5\n", {"x = 1.0\n"}),
        ("x = True\n", {"x = False\n"}),
        ("x += y\n", {"x -= y\n", "pass\n"}),
        ("a.b = c\n", {"pass\n"}),
        ("f()\n", {"pass\n"}),
        ("raise E(1)\n", {"pass\n"}),
        ("x = f(a, b=c)\n", {"x = f(a)\n"}),
        ("x = max(a)\n", {"x = min(a)\n"}),
        ("x = t.amin(1)\n", {"x = t.amax(1)\n", "x = t.amin(0)\n", "x = t.amin(2)\n"}),
        ("x = a if b else c\n", {"x = a if not (b) else c\n"}),
        ("if a:\n    b = c\n", {"if not (a):\n    b = c\n"}),
        ("async def f():\n    g()\n", {"async def f():\n    pass\n"}),
        (
            "é = 1\nx = é - a\n",
            {"é = 0\nx = é - a\n", "é = 2\nx = é - a\n", "é = 1\nx = (é + a)\n"},
        ),
    ],
)
def test_mutants_of_a_statement(source: str, mutants: set[str]) -> None:
    assert mutated(source) == mutants


@pytest.mark.parametrize(
    "source",
    [
        '"""Words."""\n',
        "x: int\n",
        "def f(a: int | None) -> list[int]: ...\n",
        "x = f'{a + 1}'\n",
        "log.info('%d', a + 1)\n",
        "assert a < b\n",
        "x = 'a'\n",
        "@cache(1)\ndef f(): ...\n",
    ],
)
def test_what_no_test_should_hold_is_left_alone(source: str) -> None:
    assert mutated(source) == set()


def test_names_stay_when_lines_move_and_tell_alike_ones_apart() -> None:
    source = "def f():\n    g(0)\n    g(0)\n"
    names = [site.name for site in generate("a.py", source)]
    assert len(set(names)) == len(names) == 4
    assert names == [site.name for site in generate("a.py", "import os\n\n" + source)]


def test_a_changed_source_is_refused() -> None:
    [site] = generate("a.py", "x = a - b\n")
    with pytest.raises(ValueError, match=r"a\.py has changed"):
        site.applied(b"y = c + d\n")


def test_a_larger_draw_begins_with_the_smaller_one() -> None:
    sites = generate("a.py", "x = [1, 2, 3, 4, 5, 6, 7, 8, 9]\n")
    assert drawn(sites, 9, 1)[:4] == drawn(sites, 4, 1)
    assert drawn(sites, 9, 1) != drawn(sites, 9, 2)
    assert sorted(drawn(sites, 18, 1), key=sites.index) == sites


def test_tests_of_a_line_are_the_fastest_that_run_it() -> None:
    [site, *_] = generate("a.py", "def f():\n    g()\n    h()\n")
    recorded = Recorded(
        {
            "a.py": {
                1: {"t/a.py::import"},
                2: {"t/a.py::slow", "t/b.py::fast"},
                3: {"t/c.py::other"},
            }
        },
        {"t/a.py::slow": 9.0, "t/b.py::fast": 1.0, "t/c.py::other": 0.5},
    )
    assert recorded.tests_of(site, 100.0) == ["t/b.py::fast", "t/a.py::slow"]
    assert recorded.tests_of(site, 5.0) == ["t/b.py::fast"]
    assert recorded.files_of(site, ["t/b.py::fast", "t/a.py::slow"], 5.0) == ["t/b.py"]


def test_the_tests_of_machine_code_are_those_of_its_folder() -> None:
    [site, *_] = generate("product/schedule/sort.py", "def f():\n    g()\n")
    seconds = {"tests/schedule/test_sort.py::slow": 9.0, "tests/schedule/test_a.py::fast": 1.0}
    seconds["tests/verify/test_sort.py::other"] = 1.5
    expected = ["tests/schedule/test_a.py::fast", "tests/schedule/test_sort.py::slow"]
    for lines in ({}, {site.file: {9: {"tests/schedule/test_sort.py::slow"}}}):  # 9: not compiled
        recorded = Recorded(lines, seconds)
        tests = recorded.tests_of(site, 100.0)
        assert tests == expected
    assert recorded.files_of(site, tests, 9.5) == ["tests/schedule/test_sort.py"]


def test_equivalent_mutants_exist_and_are_argued() -> None:
    known = {site.name for site in all_sites(ROOT)}
    for name, why in EQUIVALENT.items():
        assert name in known, f"{name}: the code has changed: judge it anew"
        assert len(why.split()) >= 4, name
        assert area_of(name)
        assert Path(name.split("::")[0]).suffix == ".py"


def test_a_record_of_other_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / SOURCES).write_text("of another commit", encoding="utf-8")
    with pytest.raises(DSparkError, match="recorded with other source: remove it"):
        read_recorded(tmp_path)


class Scripted(Judge):
    """A judge whose runs are scripted: which tests fail with the mutant, and which without it."""

    def __init__(self, recorded: Recorded, fails: set[str], fails_clean: set[str]) -> None:
        self._recorded, self._clean = recorded, set[str]()
        self._fails, self._fails_clean, self._in_force = fails, fails_clean, False

    @contextlib.contextmanager
    def _with_fault(self, site: Site) -> Iterator[None]:
        self._in_force = True
        yield
        self._in_force = False

    def _run(
        self, tests: Sequence[str], timeout_s: float | None = None
    ) -> tuple[int | None, str, int]:
        fails = self._fails if self._in_force else self._fails_clean
        for place, test in enumerate(tests):
            if test in fails:
                return 1, test, place
        return 0, "", len(tests)


@pytest.mark.parametrize(
    ("fails", "fails_clean", "what", "why"),
    [
        ({"t/a.py::first"}, set(), "killed", "t/a.py::first"),
        ({"t/b.py::second"}, set(), "killed", "t/b.py::second"),
        ({"t/a.py::first"}, {"t/a.py::first"}, "survived", "2 tests passed"),
        ({"t/a.py::first", "t/b.py::second"}, {"t/a.py::first"}, "killed", "t/b.py::second"),
        (set(), set(), "survived", "2 tests passed"),
    ],
)
def test_a_mutant_is_killed_by_a_test_that_passes_without_it(
    fails: set[str], fails_clean: set[str], what: What, why: str
) -> None:
    [site, *_] = generate("a.py", "def f():\n    g()\n")
    seconds = {"t/a.py::first": 1.0, "t/b.py::second": 2.0}
    judge = Scripted(Recorded({"a.py": {2: set(seconds)}}, seconds), fails, fails_clean)
    assert judge.judge(site) == Verdict(site.name, what, why)


class Missing(Scripted):
    """A judge in whose copy a mutant changes the parameters of one test."""

    def __init__(self, folder: Path, recorded: Recorded) -> None:
        super().__init__(recorded, {"t/b.py::second"}, set())
        self._output = folder / "output"

    def _run(
        self, tests: Sequence[str], timeout_s: float | None = None
    ) -> tuple[int | None, str, int]:
        if self._in_force and "t/a.py::first[40]" in tests:
            self._output.write_text("ERROR: not found: /copy/t/a.py::first\n(no match)\n")
            return 4, "", 0
        return super()._run(tests, timeout_s)


def test_a_test_that_the_mutant_renames_is_passed_over(tmp_path: Path) -> None:
    [site, *_] = generate("a.py", "def f():\n    g()\n")
    seconds = {"t/a.py::first[40]": 1.0, "t/b.py::second": 2.0}
    judge = Missing(tmp_path, Recorded({"a.py": {2: set(seconds)}}, seconds))
    assert judge.judge(site) == Verdict(site.name, "killed", "t/b.py::second")


@pytest.mark.parametrize(
    ("fails", "what", "why"),
    [
        ({"t/new.py"}, "killed", "t/new.py"),
        ({"t/old.py"}, "survived", "2 tests passed"),
    ],
)
def test_named_test_files_judge_alone_and_without_a_record(
    fails: set[str], what: What, why: str
) -> None:
    [site, *_] = generate("a.py", "def f():\n    g()\n")
    judge = Scripted(Recorded(), fails, set())
    assert judge.judge_with(site, ["t/more.py", "t/new.py"]) == Verdict(site.name, what, why)


def test_a_named_test_file_that_fails_without_a_mutant_is_refused() -> None:
    [site, *_] = generate("a.py", "def f():\n    g()\n")
    with pytest.raises(DSparkError, match=r"t/new\.py fails without a mutant"):
        Scripted(Recorded(), {"t/new.py"}, {"t/new.py"}).judge_with(site, ["t/new.py"])


class Killing(Scripted):
    """A judge by whose named files one mutant dies; it asks for no record."""

    def __init__(self, folder: Path, recorded: Recorded, tests: Sequence[str]) -> None:
        assert not recorded.lines
        assert tests == ["t/new.py"]
        super().__init__(recorded, {"t/new.py"}, set())

    @contextlib.contextmanager
    def _with_fault(self, site: Site) -> Iterator[None]:
        self._in_force = site.before == "dies"
        yield
        self._in_force = False

    def close(self) -> None:
        pass


def test_only_survivors_are_judged_anew_and_only_kills_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [old, *_] = generate("sglang_dspark/verify/a.py", "def f():\n    g()\n")
    dies, lives, killed, fresh = (
        replace(old, before=name) for name in ("dies", "lives", "killed", "fresh")
    )
    before = [
        Verdict(dies.name, "survived", "9 tests passed"),
        Verdict(lives.name, "survived", "9 tests passed"),
        Verdict(killed.name, "killed", "t/old.py::test"),
    ]
    path = tmp_path / program.VERDICTS
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in before), encoding="utf-8")
    monkeypatch.setattr(program, "Judge", Killing)
    monkeypatch.setattr(program, "all_sites", lambda root: [dies, lives, killed, fresh])
    program.main(count=4, seed=1, jobs=1, files=["t/new.py"], out=tmp_path)
    assert program.read_verdicts(path) == {
        dies.name: Verdict(dies.name, "killed", "t/new.py"),
        **{each.name: each for each in before[1:]},
    }


def test_a_recording_in_which_no_test_ran_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xdist ends with the status of failed tests where its workers collect different ones."""
    unsteady = tmp_path / "test_unsteady.py"
    unsteady.write_text(
        "import os\n\nimport pytest\n\n\n"
        "@pytest.mark.parametrize('pid', [os.getpid()])\ndef test_it(pid):\n    pass\n"
    )
    monkeypatch.setattr(tests_of, "FOLDERS", (str(unsteady),))
    with pytest.raises(DSparkError, match="pytest ran no test"):
        tests_of.record(tmp_path / "record")
    assert not (tmp_path / "record").exists()
