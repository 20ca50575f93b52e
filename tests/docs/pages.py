"""Collect commands and names in backticks from the pages of docs/, and the code's messages."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GUIDES = sorted(  # of folders, for readers of the code
    guide
    for name in ("sglang_dspark", "kernels", "patches", "loadtest", "tests")
    for guide in (ROOT / name).rglob("README.md")
)
FOR_USERS = (  # written pages of the site's first part; gpu.md is generated
    *("index", "getting-started", "serving", "apis", "drafters", "parallel", "gpu-quickstart"),
    *("operations", "troubleshooting", "load-testing", "correctness", "training"),
)
FOR_OTHERS = (  # for reviewers, or generated
    *("architecture", "scheduler", "losslessness", "results-drafters", "results-load"),
    *(
        "results-targets",
        "results-stability",
        "results-gpu",
        "support",
        "gpu",
        "configuration",
        "metrics",
        "faults",
    ),
)
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_ENDS = {"|", "&&", ";", ">", "||"}


def fenced(page: Path) -> Iterator[list[str]]:
    """Commands in fenced blocks, in words, without variables set in front of them."""
    for block in _FENCE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                continue  # not a command: data of several lines
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            end = next((i for i, word in enumerate(words) if word in _ENDS), len(words))
            if words[:end]:
                yield words[:end]


def spans(page: Path) -> list[str]:
    """Everything in single backticks, on one line each."""
    text = _FENCE.sub("", page.read_text())
    return [" ".join(span.split()) for span in _SPAN.findall(text)]


def sizes(page: Path) -> tuple[int, int]:
    """Words of running text, and words with tables; code and generated blocks do not count."""
    lines = _FENCE.sub("", _GENERATED.sub("", page.read_text())).splitlines()
    running = [line for line in lines if not line.startswith("|")]
    return len(" ".join(running).split()), len(" ".join(lines).split())


def anchors(page: Path) -> set[str]:
    """Return the anchors that `page.md#…` may name: its headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", text).strip().lower().replace(" ", "-") for text in headings}


@cache
def upstream(name: str) -> str:
    """A source file of SGLang, read without importing it."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations is not None
    return (Path(found.submodule_search_locations[0]) / "srt" / name).read_text()


@cache
def messages() -> tuple[str, ...]:
    """Every text of the package's code, what is filled in standing as `…`."""
    found = []
    for folder in ("sglang_dspark", "patches", "loadtest"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%(\.\d+)?[sdfg]", "…", node.value))
    return tuple(" ".join(text.split()) for text in found)
