"""Sees where our modules read a tensor's value on the host while a step is launched.

On a GPU each such read waits for all work before it. On a CPU a tensor of the host and one of the
device are the same kind: the step's own code is watched, and functions of HOST_ONLY are skipped,
whose docstrings say that their tensors are the host's. A read in a rule of `verify/` counts for its
caller: the step, or an operator that replaces one which a CPU lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

READS = (
    "item", "tolist", "numpy", "cpu", "nonzero", "__array__",
    "__int__", "__float__", "__bool__", "__index__", "__contains__",
)  # fmt: skip
OURS = ("sglang_dspark.step", "sglang_dspark.backends.cuda")
RULES = "sglang_dspark.verify"
HOST_ONLY = {"row_generations"}


@contextmanager
def watched() -> Iterator[list[str]]:
    """The reads that our modules made meanwhile, each with its place."""
    seen: list[str] = []
    kept = {name: Tensor.__dict__.get(name) for name in READS}
    for name in READS:
        setattr(Tensor, name, _noting(getattr(Tensor, name), name, seen))
    try:
        yield seen
    finally:
        for name, original in kept.items():
            if original is None:
                delattr(Tensor, name)  # it was inherited
            else:
                setattr(Tensor, name, original)


def _noting(read: Callable[..., Any], name: str, seen: list[str]) -> Callable[..., Any]:
    def noted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        module, function = _module(frame), frame.f_code.co_name
        if _asked_by(frame).startswith(OURS) and function not in HOST_ONLY:
            seen.append(f"{name} in {module}.{function}, line {frame.f_lineno}")
        return read(tensor, *args, **options)

    return noted


def _asked_by(frame: FrameType | None) -> str:
    """The module of a frame; of a rule the module that asked it."""
    while frame is not None and _module(frame).startswith(RULES):
        frame = frame.f_back
    return "" if frame is None else _module(frame)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
