"""The page of modules: a line for each, the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In the order of the data's way; the folders at the top of the repository are part of the package.
FOLDERS = (
    "sglang_dspark/drafter",
    "sglang_dspark/baselines",
    "sglang_dspark/schedule",
    "sglang_dspark/schedule/simulation",
    "sglang_dspark/verify",
    "sglang_dspark/quantisation",
    "sglang_dspark/experts",
    "kernels",
    "sglang_dspark/benchmarks",
    "sglang_dspark/serving",
    "sglang_dspark/serving/step",
    "sglang_dspark/serving/schedule",
    "sglang_dspark/serving/cpu",
    "sglang_dspark/serving/cpu/layers",
    "sglang_dspark/serving/cuda",
    "patches",
    "sglang_dspark/training",
    "sglang_dspark/training/learners",
    "sglang_dspark/evaluation",
    "sglang_dspark/evaluation/analyses",
    "loadtest",
    "loadtest/client",
    "loadtest/servers",
    "loadtest/bench",
    "loadtest/sweep",
    "loadtest/report",
    "sglang_dspark/models",
    "sglang_dspark/common",
    "sglang_dspark/cli",
    "sglang_dspark",
)
_HEAD = """# Modules

Generated from the docstrings: `make docs-reference`. How they work together is in the
[architecture](architecture.md).
"""


def modules_page() -> str:
    """One section a folder, one line a module."""
    return _HEAD + "".join(_section(folder) for folder in FOLDERS)


def _section(folder: str) -> str:
    files = sorted((ROOT / folder).glob("*.py"))
    lines = [f"- `{each.name}`: {summary(each)}\n" for each in files if each.stem != "__init__"]
    about = summary(ROOT / folder / "__init__.py")
    return "\n".join([f"\n## {folder}", f"{about}\n", "".join(lines)]).rstrip() + "\n"


def summary(file: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    text = " ".join(doc.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", text, maxsplit=1)[0]
