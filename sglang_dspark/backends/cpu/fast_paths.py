"""The short forms of a CPU server: each is taken where it fits, and says why where it does not.

A short form asks once, of a model, a runner or a worker, for all that it takes for granted; each
`need` that does not hold is a reason. The first one goes to the log, once a server process, and
upstream's code runs. What differs from batch to batch (grammar, log-probabilities, rows) is asked
anew each time and is not told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from sglang_dspark.serving import upstream

logger = logging.getLogger(__name__)
T = TypeVar("T")
_told: set[tuple[str, str]] = set()


class UnfitError(Exception):
    """A short form does not serve this; the text says what it would need."""


def need(holds: object, why: str) -> None:
    """Raise `UnfitError(why)` unless it holds."""
    if not holds:
        raise UnfitError(why)


def need_class(what: str, value: object, *kinds: type) -> None:
    """Raise `UnfitError` with the class found unless it is one of `kinds`.

    what: the value's name in the line, such as `its head`.
    """
    why = upstream.other_class(what, value, *kinds)
    if why is not None:
        raise UnfitError(why)


def tell(path: str, why: object) -> None:
    """Log once a server process why a short form is off."""
    if (path, str(why)) not in _told:
        _told.add((path, str(why)))
        logger.info("sglang-dspark: off: %s: %s", path, why)


def taken(path: str, find: Callable[[], T]) -> T | None:
    """What `find` returns; None where it raises `UnfitError`, and one line in the log.

    path: the short form's name, such as `one call for all layers of LlamaModel`.
    """
    try:
        return find()
    except UnfitError as unfit:
        tell(path, unfit)
        return None


def fits(path: str, require: Callable[[], None]) -> bool:
    """Whether `require` raises no `UnfitError`; where it does, one line in the log."""

    def found() -> bool:
        require()
        return True

    return taken(path, found) is not None
