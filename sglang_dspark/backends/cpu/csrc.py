"""Build and load the C++ library of csrc/: matrix products, their thread pool, and operators.

One library holds the kernels of all x86-64 levels and chooses by the processor. It is built once:
by `make setup` or into the wheel, else at the first start into the user's cache, with the system's
compiler or the one in the `ziglang` wheel. Its name contains a hash of sources and flags, so a
library of other sources is never loaded. Without library and compiler, torch multiplies.

`python -m sglang_dspark.backends.cpu.csrc` builds it next to the sources. Module-level imports are
only of the standard library: setup.py runs this file in an environment without other packages.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).with_suffix("")
_PATIENCE_S = 600.0  # Zig takes minutes on a slow machine
_LINUX = sys.platform == "linux"
_X86 = platform.machine() in ("x86_64", "AMD64")
# -ffp-contract=off: multiplications and additions are fused only where the source says so.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno"),  # the latter: sqrt is an instruction
)
_LINK = ("-shared", *(("-Wl,--as-needed",) if _LINUX else ()))  # libstdc++ is not used
_BASELINE = ("-march=x86-64",) if _X86 else ()
_V4 = "-march=x86-64-v4"
_LEVELS = {  # instruction set -> flags
    "avx2": ("-march=x86-64-v3",),
    "avx512": (_V4,),
    "avx512_dot": (_V4, "-mavx512vnni", "-mavx512bf16"),
}
OPERATOR_LEVELS = ("avx2", "avx512") if _X86 else ("generic",)  # of the functions of operator()
OBJECTS = (
    ("pool.cpp", _BASELINE),
    ("library.cpp", _BASELINE),
    *(
        ("matmul.cpp", (f"-DDSPARK_ISA={name}", *flags))
        for name, flags in (_LEVELS if _X86 else {"generic": ()}).items()
    ),
    *(
        (source, (f"-DDSPARK_ISA={name}", *_LEVELS.get(name, ())))
        for source in (
            *("rows.cpp", "attention.cpp", "layers.cpp"),
            *("context.cpp", "delta.cpp", "heads.cpp", "experts.cpp"),
        )
        for name in OPERATOR_LEVELS
    ),
)
ZIG = "ziglang==0.17.1"  # a C++ compiler as a wheel, for machines without one
HOW_TO = f"install a C++ compiler (apt install g++) or `pip install {ZIG}`, and start again"


class BuildError(Exception):
    """No library could be built: there is no compiler, or it failed; the text names the fault."""


@cache
def library() -> ctypes.CDLL | None:
    """Load the library, building it first if missing; None where that fails, logged once."""
    try:
        found = ctypes.CDLL(str(_find()))
    except (BuildError, OSError) as error:
        logger.warning(
            "sglang-dspark: torch multiplies, which is slower: the C++ library of the CPU kernels "
            "is missing: %s; %s",
            error,
            HOW_TO,
        )
        return None
    # All else in csrc/library.cpp and csrc/pool.h are C integers; `operator` binds operators.
    found.dspark_matmul.restype = ctypes.c_void_p
    found.dspark_pool_serve.argtypes, found.dspark_pool_serve.restype = [ctypes.c_void_p], None
    return found


def why_not() -> str | None:
    """Return the reason why torch computes instead of the library; None if the library can."""
    loaded = library()
    if loaded is None:
        return f"the C++ library of the CPU kernels is missing; {HOW_TO}"
    fuses = loaded.dspark_processor() & 1
    return None if fuses else "this processor has no AVX2 and fused multiply-add"


@cache
def operator(
    name: str, *argtypes: Any, returns: Any = None, level: str | None = None
) -> Callable[..., Any] | None:
    """Bind an operator of csrc/ for this processor, or for one of `OPERATOR_LEVELS`.

    argtypes, returns: types of ctypes; c_void_p is for `Tensor.data_ptr()`. A call releases the
    GIL. None where `why_not` has a reason.
    """
    loaded = library()
    bits = 0 if loaded is None else loaded.dspark_processor()
    if loaded is None or not bits & 1:
        return None
    level = level or OPERATOR_LEVELS[-1 if bits & 2 else 0]
    function = loaded[f"dspark_{name}_{level}"]
    function.argtypes, function.restype = argtypes, returns
    return function


def file_name() -> str:
    """Name the library by its sources, flags and kind of machine."""
    digest = hashlib.sha256(repr((FLAGS, _LINK, OBJECTS, sys.platform)).encode())
    for file in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(file.read_bytes())
    return f"libdspark-{digest.hexdigest()[:16]}.so"


def _find() -> Path:
    """Find the library in the package or in the user's cache; build it there if missing.

    Raises BuildError, or OSError where the cache cannot be written.
    """
    from sglang_dspark.common.file_lock import turn
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.paths import cache_root

    name = file_name()
    if (SOURCES / name).is_file():
        return SOURCES / name
    try:
        folder = cache_root() / "sglang-dspark" / "csrc"
    except DSparkError as error:
        raise BuildError(str(error)) from None
    if not (folder / name).is_file():
        with turn(folder / "lock", _PATIENCE_S, lambda: None):  # a server starts several processes
            if not (folder / name).is_file():
                logger.info("sglang-dspark: building the C++ library of the CPU kernels, once")
                build(folder)
    return folder / name


def compilers() -> Iterator[list[str]]:
    """List the commands of C++ compilers, the preferred first; only CXX where it is set."""
    if os.environ.get("CXX"):
        yield shlex.split(os.environ["CXX"])
        return
    yield from ([name] for name in ("g++", "clang++") if shutil.which(name))
    if importlib.util.find_spec("ziglang"):
        yield [sys.executable, "-m", "ziglang", "c++"]


def build(folder: Path) -> Path:
    """Build the library into a folder with the first compiler that succeeds; return its file.

    Raises BuildError, or OSError where the folder cannot be written.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed, name = "there is no C++ compiler", file_name()
    for compiler in compilers():
        with TemporaryDirectory(dir=folder) as room:
            try:
                return _compile(compiler, Path(room)).replace(folder / name)
            except (BuildError, FileNotFoundError) as error:
                failed = f"{shlex.join(compiler)}: {error}"
    raise BuildError(failed)


def _compile(compiler: list[str], room: Path) -> Path:
    """Compile all objects in parallel and link them; return the library in `room`."""
    zig = "ziglang" in compiler
    # Zig writes a cache of about a hundred megabytes.
    own = {"ZIG_GLOBAL_CACHE_DIR": str(room), "ZIG_LOCAL_CACHE_DIR": str(room)} if zig else {}
    environment = {**os.environ, **own}
    objects, running = [], []
    for number, (source, flags) in enumerate(OBJECTS):
        objects.append(str(room / f"{number}.o"))
        if zig:  # its processor names have underscores
            flags = tuple(f.replace("x86-64", "x86_64").replace("64-v", "64_v") for f in flags)
        command = [*compiler, *FLAGS, *flags, "-c", source, "-o", objects[-1]]
        running.append(
            subprocess.Popen(
                command, cwd=SOURCES, env=environment, stderr=subprocess.PIPE, text=True
            )
        )
    said = [each.communicate()[1] for each in running]
    if any(each.returncode for each in running):
        raise BuildError(_first_error("".join(said)))
    made = room / "library.so"
    # As C: for C++ Zig would build an unused C++ library. -s drops the debug data that it adds.
    linker = [*compiler[:-1], "cc", "-Wl,-s"] if zig else compiler
    link = [*linker, *_LINK, *objects, "-o", str(made)]
    done = subprocess.run(link, cwd=SOURCES, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(_first_error(done.stderr))
    return made


def _first_error(said: str) -> str:
    lines = said.strip().splitlines() or ["it failed without a message"]
    return next((line for line in lines if "error" in line), lines[-1])


if __name__ == "__main__":
    try:
        print(build(SOURCES))
    except BuildError as error:
        sys.exit(f"{error}; {HOW_TO}")
