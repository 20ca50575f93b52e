"""Check a machine before servers start: versions, compilers, our planner, modules they import.

Each check is a row with its seconds, and the reason if it failed; a failure does not end the stage.
`imports` runs as its own process (`python -m tools.gpu.kit.preflight`) while models are built, so
that the modules' bytecode is compiled for the servers that start later.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tools.gpu.kit.device import say

PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "sglang", "sglang-kernel")
COMPILERS = ("nvcc", "c++", "ninja")
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.dspark",
    "sglang.srt.speculative.dspark_components.dspark_worker_v2",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.layers.attention.triton_backend",
    "sglang_dspark.plugin",
    "sglang_dspark.backends.cuda.attach",
    "sglang_dspark.kernels.accept_block",
    "sglang_dspark.kernels.accept_listed",
    "sglang_dspark.kernels.markov_sample",
)


def preflight() -> bool:
    """Run the quick checks; return whether all passed."""
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": versions,
        "compilers": compilers,
        "planner": planner,
        "triton": triton_key,
    }
    return all([checked(name, check) for name, check in checks.items()])


def checked(name: str, check: Callable[[], dict[str, Any]]) -> bool:
    """Print the row of one check; return whether it passed."""
    began, row = time.monotonic(), {}
    try:
        row = check()
    except (
        Exception
    ) as error:  # a broken package may raise any exception; the row has it, the stage continues
        row = {"failed": f"{type(error).__name__}: {error}"[:500]}
    say(row={"preflight": name, "seconds": round(time.monotonic() - began, 2), **row})
    return "failed" not in row


def versions() -> dict[str, Any]:
    """Return versions of Python and of the packages that determine the compiled code."""
    found: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def compilers() -> dict[str, Any]:
    """Return the first line of each compiler's version, nvcc's last; a missing one is a failure."""
    found: dict[str, Any] = {}
    toolkit = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    for name in COMPILERS:
        path = toolkit if name == "nvcc" and os.access(toolkit, os.X_OK) else shutil.which(name)
        if path is None:
            found[name] = None
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
        lines = (done.stdout or done.stderr).strip().splitlines() or [f"status {done.returncode}"]
        found[name] = lines[0 if name != "nvcc" else -1]
    absent = [name for name in COMPILERS if found[name] is None]
    return {**found, **({"failed": f"no {', '.join(absent)}"} if absent else {})}


def planner() -> dict[str, Any]:
    """Compile the planner's search by Numba and find K of a small batch."""
    import numpy as np

    from sglang_dspark.schedule.budget import Costs, Workspace, search
    from sglang_dspark.schedule.gains import gains

    requests, gamma = 8, 5
    tokens = np.arange(requests * (gamma + 1) + 1, dtype=np.float64)
    costs = Costs(tokens=1e-3 + 1e-5 * tokens, fixed=1e-4, draft=np.full(gamma + 1, 1e-4))
    confidence = np.full((requests, gamma), 0.9, np.float32)  # [R, gamma]
    found = search(gains(confidence), costs, Workspace(requests, gamma))
    if not found.drafts:
        raise ValueError("the search admits no draft where drafts are nearly free")
    return {"admitted": int(found.drafts)}


def triton_key() -> dict[str, Any]:
    """Return the key of Triton's cache: kernels cached under another key are not used."""
    from triton.runtime.cache import triton_key as key

    return {"key": key()[:16]}


def imports() -> int:
    """Import the servers' modules, a row each; return 1 if an import fails."""
    passed = [checked(f"import {name}", lambda name=name: _imported(name)) for name in MODULES]  # type: ignore[misc]
    return 0 if all(passed) else 1


def _imported(name: str) -> dict[str, Any]:
    import_module(name)
    return {}


if __name__ == "__main__":
    sys.exit(imports())
