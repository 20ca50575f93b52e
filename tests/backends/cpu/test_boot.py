"""Stand-ins take the place of packages that cannot be imported here, and of no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVES = (
    "from sglang_dspark.backends.cpu import boot\n"
    "boot.install_stubs()\n"
    "from sgl_kernel import copy_all_layer_kv_cache_cpu as operator\n"
    "print(operator.__module__)\n"
)


@pytest.mark.parametrize(
    ("code", "taken"),
    [
        ("import sgl_kernel.version\nraise ImportError('no common_ops')", "sgl_kernel_ops"),
        ("def copy_all_layer_kv_cache_cpu(): ...", "sgl_kernel"),
    ],
    ids=["a CUDA build without a GPU", "a CPU build"],
)
def test_kernels_that_can_be_imported_are_kept(tmp_path: Path, code: str, taken: str) -> None:
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "version.py").touch()
    (package / "__init__.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-c", SERVES],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip().rpartition(".")[2] == taken, done.stderr
