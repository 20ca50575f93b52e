"""Numba kernels: the same bits in every compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from numba.core.dispatcher import Dispatcher

from sglang_dspark.backends import cpu
from tests.backends.cpu import compiled_bits

ROOT = Path(__file__).parents[3]


def test_compiled_or_read_from_disk_the_bits_are_the_same(tmp_path: Path) -> None:
    """A server's first start compiles its kernels, later ones read them: the plain server and the
    one that drafts may differ in that."""
    (fresh, compiled), (kept, read) = (bits(tmp_path) for _ in range(2))
    assert (compiled, read) == (0, len(compiled_bits.KERNELS))
    assert fresh == kept == compiled_bits.digest()


def test_a_function_that_may_reorder_sums_hands_nothing_on(tmp_path: Path) -> None:
    """Numba compiles a function for its first caller, with that caller's leave."""
    assert bits(tmp_path, "after a free kernel")[0] == compiled_bits.digest()


def test_no_kernel_may_reorder_sums() -> None:
    """Compilers use such freedom only sometimes, so one machine's results prove nothing."""
    names = [each.name for each in walk_packages(cpu.__path__, f"{cpu.__name__}.")]
    modules = [import_module(name) for name in names]
    found = {each for module in modules for each in vars(module).values() if compiled(each)}
    assert set(compiled_bits.KERNELS) <= found
    assert [
        each.__name__ for each in found if each.targetoptions.get("fastmath") is not False
    ] == []


def compiled(value: Any) -> bool:
    return isinstance(value, Dispatcher)


def bits(cache: Path, *words: str) -> tuple[str, int]:
    """Return what another process computes with this cache, and how many kernels it read."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.cpu.compiled_bits", *words],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    digest, read = done.stdout.split()
    return digest, int(read)
