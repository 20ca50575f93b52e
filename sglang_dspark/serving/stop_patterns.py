"""Stop patterns that may take exponential time are refused: all requests wait for a match.

Upstream (sglang/srt/managers/schedule_batch.py, `_check_str_based_finish`) searches the end
of an answer for `stop_regex` in every step, on the thread that schedules. `(a|a)*b` takes twice as
long with every `a`, and with forty of them no request of the server gets another token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sglang_dspark.common.files import brief

_PARSER: Any = re._parser  # type: ignore[attr-defined]  # what `re.compile` reads patterns by
_CODES: Any = re._constants  # type: ignore[attr-defined]


def check_pattern(pattern: str) -> None:
    """Raises ValueError for a text that is no pattern, and for one that repeats what may itself
    match in several ways: a choice, an option or another repetition."""
    shown = brief(repr(pattern), 60)
    try:
        re.compile(pattern)
        parsed = _PARSER.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        reason = f"{shown} is no pattern: {brief(error)}"
        raise ValueError(f"sampling_params: stop_regex {reason}") from None
    for code, given in _parts(parsed):
        if code in _REPEATS and given[1] > 1 and any(map(_has_ways, _parts(given[2]))):
            raise ValueError(
                f"sampling_params: stop_regex {shown} repeats what can match in several ways, "
                "which may take exponential time; take choices, options and repetitions out of it"
            )


_REPEATS = (_CODES.MAX_REPEAT, _CODES.MIN_REPEAT, _CODES.POSSESSIVE_REPEAT)


def _has_ways(part: tuple[Any, Any]) -> bool:
    code, given = part
    return code == _CODES.BRANCH or (code in _REPEATS and given[0] != given[1])


def _parts(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """A pattern's parts, and theirs."""
    for code, given in parsed:
        yield code, given
        for inner in _inner(given):
            yield from _parts(inner)


def _inner(given: Any) -> Iterator[Any]:
    """The patterns in a part's arguments."""
    if isinstance(given, _PARSER.SubPattern):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _inner(each)
