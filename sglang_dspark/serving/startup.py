"""Share rules of start-up between both entry points: off switch, SGLang's version, failures.

SGLang only logs exceptions from plugins and hooks (sglang/srt/plugins/__init__.py) and
would then serve without us; `stop` therefore ends the process with one line on stderr. It
imports no sglang, so that both entry points can use it before anything else is loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import NoReturn

from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import SUPPORTED_SGLANG
from sglang_dspark.serving import upstream

WHAT_TO_DO = f"install sglang=={SUPPORTED_SGLANG} or set DSPARK_DISABLE=1"
PLUGIN_NAME = "dspark"
PLATFORM_NAME = "dspark_cpu"
SERVER_PID = "_SGLANG_DSPARK_SERVER_PID"
_TRUE = frozenset({"1", "true", "yes", "on"})


def check_version(found: str) -> None:
    """Raise `DSparkError` unless `found` is the SGLang version whose seams we support."""
    if found != SUPPORTED_SGLANG:
        raise DSparkError(
            f"sglang {found} is not supported (only {SUPPORTED_SGLANG}); {WHAT_TO_DO}"
        )


def switched_off() -> str | None:
    """Return the reason why this package must not change SGLang; None when it is on.

    `DSPARK_DISABLE=1` turns both entry points off, and so does an `SGLANG_PLUGINS` that does not
    name `dspark` (SGLang itself then never calls the plugin, but still may call the platform).
    """
    if os.environ.get("DSPARK_DISABLE", "").strip().lower() in _TRUE:
        return "DSPARK_DISABLE is set"
    chosen = os.environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in chosen.split(",") if name.strip()}
    if names and PLUGIN_NAME not in names:
        return f"SGLANG_PLUGINS={chosen} does not name {PLUGIN_NAME}"
    return None


def platform_left_out() -> bool:
    """Return whether `SGLANG_PLUGINS` names our plugin but not our CPU platform."""
    names = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")}
    return PLUGIN_NAME in names and PLATFORM_NAME not in names


_started_by: set[int] = set()  # the marked process that started this one, seen when marked itself


def mark_server() -> None:
    """Record this process as one whose children are SGLang's, for `stop`; call when set up.

    Its own mark replaces its parent's, which `stop` also needs.
    """
    if _parent_is_marked():
        _started_by.add(os.getppid())
    os.environ[SERVER_PID] = str(os.getpid())


def _parent_is_marked() -> bool:
    parent = os.getppid()
    return parent in _started_by or os.environ.get(SERVER_PID) == str(parent)


def stop(message: str) -> NoReturn:
    """Print one line on stderr and end this process, and the server it belongs to, with status 1.

    The process that the user started has spawned no other yet: SystemExit suffices, and passes
    through SGLang's `except Exception`. A child (scheduler, detokenizer, ...) must also wake its
    parent, which would wait for it: SIGQUIT, upstream's own signal for a failed child, makes the
    parent kill the whole tree. It is sent only to a parent that called `mark_server`.
    """
    line = " ".join(f"sglang-dspark: {message}".split())
    print(line, file=sys.stderr, flush=True)
    if multiprocessing.parent_process() and _parent_is_marked():
        os.kill(os.getppid(), signal.SIGQUIT)
    raise SystemExit(1)


def cpu_platform_active() -> bool:
    """Return whether SGLang resolved to our CPU platform in this process."""
    return type(upstream.current_platform).__module__.startswith("sglang_dspark.")


def active_device() -> str:
    """Return the device that selects seams: `cpu`, `cuda`, or `none` for another platform."""
    import torch

    if cpu_platform_active():
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "none"
