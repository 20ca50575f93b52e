"""Test which stop patterns are accepted, and that refused ones would have taken long."""

from __future__ import annotations

import re
import time

import pytest

from sglang_dspark.patches.upstream_fixes.request_limits import check_pattern

LINEAR = [
    "a+",
    "[0-9]+",
    "\\d+\\.\\d+",
    "(ab)+c",
    "(?:foo|bar)x?",
    "a{3}",
    "(\\n\\n)+",
    ".*?END",
    "",
]
EXPONENTIAL = ["(a|a)*b", "(a+)+b", "(a?){30}b", "((a{0,9})x?)*b", "(?=(a*)*b)", "(?:(a|b)x?)+?y"]


@pytest.mark.parametrize("pattern", LINEAR)
def test_an_ordinary_pattern_passes(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_a_repeated_choice_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="repeats what can match in several ways"):
        check_pattern(pattern)


@pytest.mark.parametrize("pattern", ["(", "[", "a{2,1}", "(?P<x>a)(?P<x>b)", "\\"])
def test_no_pattern_at_all(pattern: str) -> None:
    with pytest.raises(ValueError, match="is no pattern"):
        check_pattern(pattern)


def test_such_a_pattern_takes_exponential_time() -> None:
    """Four more letters take sixteen times as long: what the refusal is for."""

    def seconds(letters: int) -> float:
        began = time.process_time()
        assert re.search("(a|a)*b", "a" * letters) is None
        return time.process_time() - began

    assert seconds(20) > 4 * seconds(16)
