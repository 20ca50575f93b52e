"""Prepare an environment in which SGLang's servers start on a faked GPU.

It requires a network, a C compiler, 9 GB of disk, and 5 to 15 minutes the first time. A second call
continues where the first stopped, or checks a complete folder. The folder then has `venv` (the GPU
machine's packages, `machine.txt`), `home` ($KIT_HOME with the parcel of `tools/gpu/pack`), `stub`
(a `libcuda.so.1` of empty functions), `cuda` (a link to the toolkit) and `ready`.
`tools/gpu/faked/python` runs this environment's Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_dspark.common.hashes import file_sha256
from sglang_dspark.errors import DSparkError
from tools.gpu.files import write_whole
from tools.gpu.packing.parcels import all_parcels
from tools.gpu.packing.pieces import pack
from tools.gpu.packing.wheels import PYTHONS

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = Path(__file__).with_name("machine.txt")
# nvcc of PyPI, if no toolkit is installed; with torch's runtime wheel they form a toolkit.
TOOLKIT = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
)
_RUNS = ROOT / "runs" / "gpu"
_DRIVER = "libcuda.so.1"


@dataclass(frozen=True)
class Environment:
    """Paths of one environment. downloads: wheels, shared by all environments."""

    folder: Path
    downloads: Path

    @property
    def python(self) -> Path:
        """Return the interpreter of the virtual environment."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def site(self) -> Path:
        """Return the folder of the installed parcel of SGLang."""
        return self.folder / "home" / "sglang"


def main() -> int:
    """Prepare; return 0 if the environment is ready, or 1 after printing the error on one line."""
    options = _options()
    here = Environment(options.folder.resolve(), options.downloads.resolve())
    ready = here.folder / "ready"
    try:
        ready.unlink(missing_ok=True)
        _require_compiler()
        version = _install_packages(here, options.python)
        _link_toolkit(here, options.cuda)
        _install_parcels(here, version, models=options.models)
        write_stub(sorted(here.site.glob("sgl_kernel/**/*.so")), here.folder / "stub")
        ready.touch()
        say(_import_server(here))
    except (DSparkError, OSError) as error:
        ready.unlink(missing_ok=True)
        print(f"faked: {error}", file=sys.stderr)
        return 1
    named = "" if here.folder == _RUNS / "faked" else f"FAKED_GPU={here.folder} "
    say(f"ready: {named}tools/gpu/faked/python -m sglang.launch_server ...")
    return 0


def say(line: str) -> None:
    """Print one line of progress."""
    print(f"faked: {line}", flush=True)


def driver_functions(libraries: Sequence[Path]) -> list[str]:
    """Return the names of the driver's functions that these shared libraries import, sorted."""
    names: set[str] = set()
    for library in libraries:
        table = _output(["nm", "-D", "--undefined-only", str(library)])
        names |= set(re.findall(r"\bU (cu[A-Z]\w*)$", table, flags=re.MULTILINE))
    return sorted(names)


def write_stub(libraries: Sequence[Path], folder: Path) -> None:
    """Compile a `libcuda.so.1` of the functions that `libraries` import from it; all return 0.

    Raises DSparkError if there is no library or the compiler fails.
    """
    if not libraries:
        raise DSparkError("the parcel has no library of sgl_kernel; run tools/gpu/pack again")
    functions = driver_functions(libraries)
    source, stub = folder / "libcuda.c", folder / _DRIVER
    code = "".join(f"int {name}(void) {{ return 0; }}\n" for name in functions)
    if stub.is_file() and source.is_file() and source.read_text() == code:
        return
    say(f"{_DRIVER}: {len(functions)} empty functions")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(source, code)
    _output(["cc", "-shared", "-fPIC", f"-Wl,-soname,{_DRIVER}", "-o", str(stub), str(source)])


def find_toolkit(candidates: Sequence[Path]) -> Path | None:
    """Return the first folder with `bin/nvcc`, `include` and a `lib64` or `lib`."""
    for folder in candidates:
        libraries = (folder / "lib64").is_dir() or (folder / "lib").is_dir()
        if (folder / "bin" / "nvcc").is_file() and (folder / "include").is_dir() and libraries:
            return folder
    return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/gpu/faked/prepare", description=__doc__)
    folder = Path(os.environ.get("FAKED_GPU", _RUNS / "faked"))
    parser.add_argument("--folder", type=Path, default=folder, help="default: %(default)s")
    parser.add_argument(
        "--downloads", type=Path, default=_RUNS / "downloads", help="wheels and weights, kept"
    )
    parser.add_argument(
        "--python",
        default=_default_python(),
        help=f"an interpreter of {' or '.join(PYTHONS)}; default: %(default)s",
    )
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    parser.add_argument(
        "--cuda", type=Path, default=toolkit, help="a toolkit; where it is none, PyPI's is used"
    )
    parser.add_argument(
        "--models", action="store_true", help="the demo's models too, for stages that need them"
    )
    return parser.parse_args()


def _default_python() -> str:
    """Return python3.12 if it runs, else this interpreter.

    A version manager's python3.12 may exist and only print an error."""
    try:
        done = subprocess.run(["python3.12", "--version"], capture_output=True)
    except FileNotFoundError:
        return sys.executable
    return "python3.12" if done.returncode == 0 else sys.executable


def _require_compiler() -> None:
    """Raise DSparkError if the compilers of Triton's launchers and JIT modules are missing."""
    absent = [name for name in ("cc", "c++", "nm") if shutil.which(name) is None]
    if absent:
        raise DSparkError(f"no {', '.join(absent)}: install gcc, g++ and binutils")


def _install_packages(here: Environment, python: str) -> str:
    """Create the virtual environment and install `machine.txt`; return its Python's version."""
    ask = "import sys; print(f'{sys.version_info.major}.{sys.version_info.minor}')"
    made = here.python.is_file()
    version = _output([str(here.python) if made else python, "-c", ask]).strip()
    if version not in PYTHONS:
        raise DSparkError(f"{python} is Python {version}; name one of {' or '.join(PYTHONS)}")
    if not made:
        say(f"Python {version} in {here.python.parents[1]}")
        _output([python, "-m", "venv", str(here.python.parents[1])])
    stamp, wanted = here.python.parents[1] / ".machine", file_sha256(PACKAGES)
    if not stamp.is_file() or stamp.read_text() != wanted:
        say("packages of machine.txt, 3 GB where they are not downloaded yet")
        _pip_install(here, ["--requirement", str(PACKAGES)])
        write_whole(stamp, wanted)
    return version


def _link_toolkit(here: Environment, toolkit: Path) -> None:
    """Link the toolkit as `cuda`; install PyPI's if `toolkit` has no nvcc."""
    found = find_toolkit([toolkit])
    if found is None:
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        wheels = Path(_output([str(here.python), "-c", ask]).strip()) / "nvidia" / "cu13"
        if find_toolkit([wheels]) is None:
            say(f"no toolkit in {toolkit}: nvcc of PyPI")
            _pip_install(here, TOOLKIT)
        found = find_toolkit([wheels])
        if found is None:
            raise DSparkError(f"no nvcc in {toolkit} nor in {wheels}: name a toolkit by --cuda")
        _complete_toolkit(found)
    link = here.folder / "cuda"
    link.unlink(missing_ok=True)
    link.symlink_to(found)


def _complete_toolkit(folder: Path) -> None:
    """Add the names under which SGLang looks for libraries: lib64, libcudart.so."""
    for link, target in (("lib64", "lib"), ("lib/libcudart.so", "libcudart.so.13")):
        if not (folder / link).exists():
            (folder / link).symlink_to(target)


def _install_parcels(here: Environment, version: str, *, models: bool) -> None:
    """Pack what a server needs and install it as the kit does on the GPU machine."""
    pieces = here.folder / "pieces"
    contents = all_parcels(here.downloads, version)
    pack(contents if models else contents[:1], pieces, 48 << 20, say)
    # `environment` writes the plugin's entry points, which servers outside of the kit need too.
    install = (
        "import sys; from pathlib import Path; from tools.gpu.packing import arrival\n"
        "wrong = arrival.take_in(Path(sys.argv[1]), Path(sys.argv[2]), print)\n"
        "arrival.environment(Path(sys.argv[2]))\n"
        "sys.exit(wrong[0] if wrong else 0)"
    )
    home = here.folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    _output([str(here.python), "-c", install, str(pieces), str(home)])


def _import_server(here: Environment) -> str:
    """Import a server's first modules; return the versions and the faked device."""
    code = (
        "import sglang.kernels.jit.utils, sgl_kernel, torch, transformers, triton\n"
        "print(torch.cuda.get_device_name(), '(faked), torch', torch.__version__, 'Triton',"
        " triton.__version__, 'transformers', transformers.__version__)"
    )
    variables = {**os.environ, "FAKED_GPU": str(here.folder)}
    return _output([str(Path(__file__).with_name("python")), "-c", code], variables).splitlines()[
        -1
    ]


def _pip_install(here: Environment, wanted: Sequence[str]) -> None:
    """Download wheels into `downloads` and install them from there, without an index."""
    here.downloads.mkdir(parents=True, exist_ok=True)
    kept = ["--find-links", str(here.downloads), "--only-binary=:all:", "--quiet"]
    pip = [str(here.python), "-m", "pip"]
    _output([*pip, "download", *kept, "--dest", str(here.downloads), *wanted])
    _output([*pip, "install", *kept, "--no-index", *wanted])


def _output(command: Sequence[str], variables: dict[str, str] | None = None) -> str:
    """Run a command in the tree; return its stdout.

    If it fails, raises DSparkError with its last ERROR line, else with the last line of stderr.
    """
    given = {**os.environ, "PYTHONPATH": str(ROOT)} if variables is None else variables
    try:
        done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    except FileNotFoundError:
        raise DSparkError(f"{command[0]} is not installed") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        errors = [line for line in said if line.startswith("ERROR")]
        raise DSparkError(f"{Path(command[0]).name} failed: {(errors or said)[-1]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
