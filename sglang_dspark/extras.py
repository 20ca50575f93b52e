"""Check for dependencies that may be missing: SGLang, and libraries that only some commands need.

The extras are declared in `pyproject.toml` and read from the installed metadata.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from types import TracebackType

from sglang_dspark.errors import DSparkError

DISTRIBUTION = "sglang-dspark"
SUPPORTED_SGLANG = "0.5.23"
_OF_COMMANDS = ("loadtest", "train")


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def require_sglang() -> None:
    """Raise DSparkError if SGLang is not installed, without importing it."""
    if find_spec("sglang") is None:
        raise DSparkError(how_to_get("sglang"))


def how_to_get(name: str) -> str:
    """Return one line that says `sglang` or `torch` is not installed and how to install both."""
    return (
        f"{name} is not installed: in a checkout `make setup`, or with an NVIDIA GPU "
        f"`{pip_install('cuda')}`, without one `{pip_install('cpu')}` and "
        f"`pip install --no-deps sglang=={SUPPORTED_SGLANG}`"
    )


def pip_install(extra: str) -> str:
    """Return the command that adds an extra, for a checkout's folder: no index has the package."""
    return f"pip install '.[{extra}]'"


def not_installed(extra: str) -> list[str]:
    """Return the import names of an extra's missing libraries, sorted."""
    return sorted(name for name in _libraries(extra) if find_spec(name) is None)


def require_extra(extra: str) -> None:
    """Raise DSparkError that names the missing libraries of an extra, if any."""
    if missing := not_installed(extra):
        raise DSparkError(f"{', '.join(missing)} not installed: {pip_install(extra)} in a checkout")


def what_brings(error: ModuleNotFoundError) -> str | None:
    """Return the line for a user whose command could not import a library of an extra, else None.

    If both extras have the library, the load test's is named only for an import by its code.
    """
    module = (error.name or "").partition(".")[0]
    if module in ("sglang", "torch"):
        return how_to_get(module)
    having = [extra for extra in _OF_COMMANDS if module in _libraries(extra)]
    if not having:
        return None
    loadtest = any(n.startswith("sglang_dspark.loadtest") for n in _modules(error.__traceback__))
    extra = having[0] if loadtest else having[-1]
    return f"{module} is not installed: {pip_install(extra)} in a checkout"


def _libraries(extra: str) -> set[str]:
    """Return the import names of the libraries that an extra adds."""
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return set()
    added = [r for r in declared if r.marker and not r.marker.evaluate({"extra": ""})]
    wanted = [r for r in added if r.marker and r.marker.evaluate({"extra": extra})]
    return {r.name.lower().replace("-", "_") for r in wanted}


def _modules(traceback: TracebackType | None) -> list[str]:
    """Return the names of the modules in an error's traceback."""
    found = []
    while traceback is not None:
        found.append(str(traceback.tb_frame.f_globals.get("__name__", "")))
        traceback = traceback.tb_next
    return found
