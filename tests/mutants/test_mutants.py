"""The list of mutants does not rot: its texts and tests exist, and two of its entries are run."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from sglang_dspark.errors import DSparkError
from tests.mutants.__main__ import chosen, judged
from tests.mutants.catalogue import ALL
from tests.mutants.mutant import Mutant
from tests.mutants.tree import ROOT, Tree

TEST = "tests/verify/test_exact_distribution.py::test_greedy_rule_emits_the_greedy_chain"


in_a_clone = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git lists what to copy")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("mutant", ALL, ids=lambda each: each.name)
def test_its_text_and_its_tests_are_there(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(source)
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    mutant.check(ROOT)
    assert mutant.tests


@pytest.mark.parametrize("test", sorted({t for each in ALL for t in each.tests if "::" in t}))
def test_the_test_named_is_defined(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_list_covers_its_areas() -> None:
    names = Counter(mutant.name for mutant in ALL)
    assert max(names.values()) == 1, "two mutants of one name"
    assert 100 <= len(ALL) <= 150, "one that generated mutants would draw needs no entry"
    areas = {mutant.area for mutant in ALL if not mutant.equivalent}
    assert areas >= {
        "SLA", "accept", "admission", "block rule", "budget", "calibration", "commit", "guard",
        "listed distribution", "metrics", "ranks", "relay", "seeded sampling",
        "served draft distribution", "step distribution", "target distribution",
    }  # fmt: skip


@in_a_clone
def test_two_mutants_end_to_end(tree: Tree) -> None:
    """A harmful one is killed by name, one that changes nothing survives: the copy is what ran."""
    tree.prove()
    (greedy,) = chosen("greedy bonus from one row too early", servers=False)
    verdict = judged(tree, greedy)
    assert verdict.what == "killed"
    assert verdict.why == TEST.removeprefix("tests/")
    idle = Mutant("idle", "", greedy.file, "accept_greedy", "draft.shape", "(draft.shape)", (TEST,))
    assert judged(tree, idle).what == "survived"
    before = (ROOT / greedy.file).read_bytes()
    assert (tree.folder / greedy.file).read_bytes() == before


@in_a_clone
def test_a_mutant_that_no_test_could_run_with_proves_nothing(tree: Tree) -> None:
    file = "sglang_dspark/verify/greedy.py"
    broken = Mutant("broken", "", file, "", "from torch import Tensor", "import no_such", (TEST,))
    assert judged(tree, broken).what == "unfit"
    gone = Mutant(
        "gone", "", file, "accept_greedy", "draft.shape", "()", ("tests/verify/test_none.py",)
    )
    assert judged(tree, gone).what == "survived"


def test_moved_code_is_one_line() -> None:
    mutant = Mutant("moved", "", "sglang_dspark/errors.py", "", "no_such_name", "1", (TEST,))
    with pytest.raises(DSparkError, match=r"occurs 0 times in .*errors\.py") as caught:
        mutant.check(ROOT)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "-k", "no such mutant"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "mutants: no mutant's name or area holds 'no such mutant'\n"


SOURCE = """
def f(a):
    b = g(a)  # one
    b = g(a)
    return b + a


class C:
    def f(self):
        if True:
            h()
            return 1
"""


@pytest.mark.parametrize(
    ("function", "old", "new", "changed"),
    [
        ("f", "b + a", "b - a", ("return b + a", "return (b - a)")),
        (
            "f",
            "b = g(a)\nreturn b + a",
            "return a",
            ("    b = g(a)\n    return b + a", "    return a"),
        ),
        ("C.f", "h( )", "pass", ("h()", "pass")),
        (
            "C.f",
            "h()\nreturn 1",
            "k()\nreturn 2",
            ("h()\n            return 1", "k()\n            return 2"),
        ),
    ],
)
def test_code_is_found_in_any_layout(
    function: str, old: str, new: str, changed: tuple[str, str]
) -> None:
    mutant = Mutant("one", "", "a.py", function, old, new, (TEST,))
    before, after = changed
    assert mutant.applied(SOURCE) == SOURCE.replace(before, after)


@pytest.mark.parametrize(
    ("function", "old", "times"), [("f", "g(a)", 2), ("g", "a", 0), ("C.f", "b + a", 0)]
)
def test_code_that_does_not_occur_once_is_refused(function: str, old: str, times: int) -> None:
    with pytest.raises(DSparkError, match=f"its code occurs {times} times in a.py::{function}"):
        Mutant("one", "", "a.py", function, old, "1", (TEST,)).applied(SOURCE)
