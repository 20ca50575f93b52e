"""Decide once whether a fast path supports a model, runner or worker, and log why not.

Each requirement of a fast path is one `require`; the first that is not met is logged once a server
process, and upstream's code runs. Conditions that differ from batch to batch (grammar,
log-probabilities, rows) are checked each time and not logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from sglang_dspark.backends.cpu import csrc
from sglang_dspark.serving import upstream

logger = logging.getLogger(__name__)
T = TypeVar("T")
_logged: set[tuple[str, str]] = set()


class UnsupportedError(Exception):
    """A fast path lacks support; the text names the requirement."""


def require(holds: object, why: str) -> None:
    """Raise `UnsupportedError(why)` unless it holds."""
    if not holds:
        raise UnsupportedError(why)


def require_class(what: str, value: object, *kinds: type) -> None:
    """Raise `UnsupportedError` with the actual class unless it is one of `kinds`.

    what: the value's name in the line, for example `its head`.
    """
    why = upstream.other_class(what, value, *kinds)
    if why is not None:
        raise UnsupportedError(why)


def require_library() -> None:
    """Require the C++ library and a processor that it supports."""
    why = csrc.why_not()
    require(why is None, str(why))


def log_off(path: str, why: object) -> None:
    """Log why a fast path is off, once a server process."""
    if (path, str(why)) not in _logged:
        _logged.add((path, str(why)))
        logger.info("sglang-dspark: off: %s: %s", path, why)


def find_or_log(path: str, find: Callable[[], T]) -> T | None:
    """Call `find` and return its result; log and return None where it raises `UnsupportedError`.

    path: the fast path's name, for example `one call for all layers of LlamaModel`.
    """
    try:
        return find()
    except UnsupportedError as error:
        log_off(path, error)
        return None


def supported(path: str, check: Callable[[], object]) -> bool:
    """Return whether `check` raises no `UnsupportedError`; log the reason where it does."""
    return find_or_log(path, lambda: (check(), True)) is not None
