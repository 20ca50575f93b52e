"""The pages on extending the package: every path and name in them exists, their rules hold."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from sglang_dspark.benchmarks.operators import OPERATORS
from sglang_dspark.families.registry import NAMES
from tests.docs.pages import DOCS, ROOT, spans

PAGES = sorted(DOCS.glob("extending-*.md"))
MOST_LINES = 60
FILES = ("__init__", "shape", "model", "checkpoint", "proposer", "learner")  # of a family's folder
ELSEWHERE = {  # family -> its files outside its folder
    "dspark": {"model": "drafter/model.py", "checkpoint": "drafter/checkpoint.py"},
    "eagle3": {"proposer": "families/chain/proposer.py"},
    "mtp": {"proposer": "families/chain/proposer.py"},
}
_GROUPED = ("test_grouped_gemm", "experts")
TOGETHER = {  # kernel -> test and benchmark that it shares with others; "" where it has its own
    "accept_block": ("", "accept"),
    "accept_sampled": ("", "accept"),
    "accept_listed": ("", "accept"),
    "accept_greedy": ("", "greedy"),
    "commit_write": ("", "commit"),
    "markov_sample": ("", "markov"),
    "grouped_gemm": _GROUPED,
    "fp8_rows": _GROUPED,
    "routing": _GROUPED,
}


@cache
def sources() -> str:
    """Source text of the package, the tests and the tools."""
    folders = ("sglang_dspark", "kernels", "patches", "tests", "tools")
    files = (file for name in folders for file in sorted((ROOT / name).rglob("*.py")))
    return "\n".join(file.read_text() for file in files)


def operators() -> list[str]:
    """Modules of `kernels/` that launch a kernel, or offer a launch under the name `..._triton`."""
    launch = re.compile(r"_kernel\[|^def \w+_triton\(", re.MULTILINE)
    files = sorted((ROOT / "kernels").glob("*.py"))
    return [file.stem for file in files if launch.search(file.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_is_one_screen_for_named_readers(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MOST_LINES
    assert page.read_text().split("\n\n")[1].startswith("For engineers who ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_exist(page: Path) -> None:
    """`NAME` stands for each family, or for the operator that is copied."""
    example = {"extending-families": NAMES, "extending-kernels": ("admission",)}
    paths = [s for s in spans(page) if re.fullmatch(r"[\w./-]+/([\w.-]+\.(py|md|yaml))?", s)]
    assert paths
    for path in paths:
        if path.startswith("sglang/srt/"):
            continue  # SGLang's own
        for name in example.get(page.stem, ("",)):
            found = path.replace("NAME", name)
            assert any((d / found).exists() for d in (ROOT, ROOT / "sglang_dspark")), found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_functions_exist(page: Path) -> None:
    """Functions, classes and constants in backticks are defined or used in the source."""
    for span in spans(page):
        named = re.fullmatch(r"([A-Za-z]+_\w+|[A-Z][a-z]+[A-Z]\w+|[A-Z_]{5,})(\(.*\))?", span)
        if named and "NAME" not in span and not named[1].startswith("sm_"):
            assert re.search(rf"\b{named[1]}\b", sources()), span


def test_each_family_has_the_files_that_the_page_lists() -> None:
    page = (DOCS / "extending-families.md").read_text()
    listed = re.findall(r"^\| `(\w+)\.py` \|", page, re.MULTILINE)
    assert listed == list(FILES)
    for name in NAMES:
        for file in FILES:
            outside = ELSEWHERE.get(name, {}).get(file)
            path = outside or f"families/{name}/{file}.py"
            assert (ROOT / "sglang_dspark" / path).is_file(), path


def test_each_operator_has_a_test_and_a_benchmark() -> None:
    page = " ".join((DOCS / "extending-kernels.md").read_text().split())
    found = operators()
    assert set(TOGETHER) <= set(found)
    assert "admission" in found
    for name in found:
        test, benchmark = TOGETHER.get(name, ("", ""))
        assert (ROOT / "tests/kernels" / f"{test or f'test_{name}'}.py").is_file(), name
        assert (ROOT / "sglang_dspark/benchmarks" / f"{benchmark or name}.py").is_file(), name
        if benchmark:
            assert f"`sglang_dspark/benchmarks/{benchmark}.py`" in page, name
    timed = {TOGETHER.get(name, ("", name))[1] for name in found} - {"experts"}
    assert timed == set(OPERATORS)


def test_contributing_links_to_each_page() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for page in (*PAGES, ROOT / "patches/README.md"):
        assert f"({page.relative_to(ROOT).as_posix()})" in text, page
    assert all(f"{page.name}" in (ROOT / "mkdocs.yml").read_text() for page in PAGES)


def test_each_architecture_with_passes_of_its_own_is_served_by_a_test() -> None:
    """Classes of `require_plain_target` are those of `ARCHITECTURES` (extending-targets, 7)."""
    passes = (ROOT / "sglang_dspark/backends/cpu/layers/direct_forward.py").read_text()
    tiny = (ROOT / "tests/integration/tiny_models.py").read_text().partition("\nHOOKED")[0]
    served = re.findall(r'^    "\w+": \(\w+, (\w+ForCausalLM)\),', tiny, re.MULTILINE)
    assert set(re.findall(r"upstream\.(\w+ForCausalLM): upstream\.", passes)) == set(served)
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= set(served)
