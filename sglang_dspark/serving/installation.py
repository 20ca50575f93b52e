"""Check the installation, for `dspark doctor`: versions, imports of torch and SGLang, its kind.

The kind is a checkout's CPU lock, or SGLang's own CUDA pins.
"""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import brief
from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import SUPPORTED_SGLANG, how_to_get, pip_install, version
from sglang_dspark.serving.startup import check_version

PACKAGES = ("sglang-dspark", "sglang", "torch", "transformers", "triton", "numpy", "safetensors")
IMPORTED = {"torch": "torch", "sglang": "sglang.srt.platforms"}  # SGLang needs torch
CPU_LOCK = Path("requirements") / "cpu.lock"
NVIDIA_DRIVER = Path("/dev/nvidiactl")
CHECKOUT = Path(__file__).resolve().parents[2]
CUDA_INSTALL = f"{pip_install('cuda')} in a checkout"
CPU_INSTALL = (
    f"{pip_install('cpu')} in a checkout and pip install --no-deps sglang=={SUPPORTED_SGLANG}"
)


def advice() -> str:
    """Return the command that repeats an installation like this one."""
    if (CHECKOUT / "Makefile").is_file():
        return f"in {CHECKOUT}: make clean setup, which makes .venv anew"
    if NVIDIA_DRIVER.exists():
        return f"{CUDA_INSTALL}, in a new virtual environment"
    return (
        f"without an NVIDIA GPU {CPU_INSTALL}, in a new virtual environment; with one: "
        + CUDA_INSTALL
    )


def versions() -> tuple[dict[str, str | None], list[str]]:
    """Return versions of Python and each package, None if absent, and the problems with them."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found |= {name: version(name) for name in PACKAGES}
    wrong = []
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        wrong.append(f"Python {platform.python_version()} is not supported; use 3.11 or 3.12")
    wrong += [how_to_get(name) for name in IMPORTED if found[name] is None]
    if found["sglang"] is not None:
        try:
            check_version(found["sglang"])
        except DSparkError as error:
            wrong.append(str(error))
    return found, wrong


def import_faults(found: dict[str, str | None]) -> list[str]:
    """Return the first error at the import of torch or SGLang, if they are installed.

    A missing shared library is an OSError, a wrong one often an ImportError; other code may raise
    any exception when it is imported.
    """
    for name, module in IMPORTED.items():
        if found[name] is None:
            return []
        try:
            import_module(module)
        except Exception as error:
            said = brief(error) or "without a word"
            return [f"{name} {found[name]} cannot be imported: {type(error).__name__}: {said}"]
    return []


def kind() -> tuple[dict[str, Any], list[str]]:
    """Return the kind of this installation, and the problems with its GPU."""
    import torch

    driver, usable = NVIDIA_DRIVER.exists(), torch.cuda.is_available()
    built_for = torch.version.cuda
    if built_for is not None and (driver or usable):
        wrong = (
            f"torch is built for CUDA {built_for}, but no GPU can be used; check the driver with "
            "nvidia-smi"
        )
        install = {"kind": "cuda", "expected": "sglang-dspark[cuda]", "cuda": built_for}
        return install, [] if usable else [wrong]
    # PyPI's own torch is built for CUDA; without a GPU it still computes on the CPU.
    install = {"kind": "cpu", "expected": str(CPU_LOCK)}
    if built_for is not None:
        install["cuda"] = built_for
    wrong = f"an NVIDIA GPU is here, but torch is a CPU build; {CUDA_INSTALL}"
    return install, [wrong] if driver else []


def compare_with_lock(install: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Add to `install` the differences from the CPU lock, if there is one (in a checkout).

    Returns problems (absent packages) and notes (other versions).
    """
    lock = CHECKOUT / CPU_LOCK
    if not lock.is_file():
        return [], [f"{CPU_LOCK} is not part of this installation: not compared"]
    differing = {
        name: {"lock": wanted, "installed": version(name)}
        for name, wanted in read_lock(lock).items()
        if (version(name) or "").split("+")[0] != wanted.split("+")[0]
    }
    install["differs_from_lock"] = differing
    missing = sorted(name for name, pair in differing.items() if pair["installed"] is None)
    changed = sorted(set(differing) - set(missing))
    return (
        [f"missing from the CPU lock: {', '.join(missing)}"] if missing else [],
        [f"other versions than the CPU lock: {', '.join(changed)}"] if changed else [],
    )


def read_lock(path: Path) -> dict[str, str]:
    """Map package to version, by the `name==version` lines of a lock file for this Python."""
    from packaging.requirements import InvalidRequirement, Requirement

    pins: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split(" --hash")[0].split("#")[0].strip().rstrip("\\").strip()
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue  # an option line, a hash, a comment
        exact = [s.version for s in wanted.specifier if s.operator == "=="]
        if exact and (wanted.marker is None or wanted.marker.evaluate()):
            pins[wanted.name] = exact[0]
    return pins
