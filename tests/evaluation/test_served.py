"""Reading a server's counts. `dspark eval --serve` compares a live server with the engine."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import DecodeSettings
from sglang_dspark.evaluation.served import ServedGeneration, counts_from_meta, with_one_gamma
from sglang_dspark.evaluation.statistics import RequestCounts, acceptance
from sglang_dspark.loadtest.bench.acceptance import measure

URL = "http://127.0.0.1:31499"
# 10 steps of gamma 3: 4 accept nothing, 3 one, 1 two, 2 three; the prefill's token on top.
META: dict[str, Any] = {
    "completion_tokens": 22,
    "spec_verify_ct": 10,
    "spec_num_proposed_drafts": 30,
    "spec_num_correct_drafts": 11,
    "spec_correct_drafts_histogram": [4, 3, 1, 2],
    "spec_accept_length": 2.2,
}


def test_counts_give_the_servers_own_accept_length() -> None:
    a = acceptance([counts_from_meta(META, URL)])
    assert a.accept_length == pytest.approx(META["spec_accept_length"])
    assert a.tau == pytest.approx(2.1)
    assert a.cumulative == pytest.approx((0.6, 0.3, 0.2))


def test_short_histogram_is_padded_to_gamma() -> None:
    meta = {**META, "spec_correct_drafts_histogram": [0, 9, 1]}
    assert counts_from_meta(meta, URL).histogram == (0, 9, 1, 0)


def test_histograms_of_a_server_that_schedules_get_one_width() -> None:
    none = {key: value for key, value in META.items() if key != "spec_num_proposed_drafts"}
    none |= {"spec_correct_drafts_histogram": [10], "spec_num_correct_drafts": 0}
    some = {**META, "spec_num_proposed_drafts": 12}
    answers = [ServedGeneration((), counts_from_meta(meta, URL)) for meta in (none, some)]
    assert [each.counts.histogram for each in with_one_gamma(answers)] == [
        (10, 0, 0, 0),
        (4, 3, 1, 2),
    ]


def test_server_without_speculation_is_refused() -> None:
    with pytest.raises(DSparkError, match="does not speculate"):
        counts_from_meta({"completion_tokens": 5}, URL)
    assert counts_from_meta({"completion_tokens": 1}, URL) == RequestCounts(1, ())


@pytest.mark.parametrize(
    ("key", "value"),
    [("spec_num_correct_drafts", 12), ("spec_correct_drafts_histogram", [4, 3, 1, 1])],
)
def test_contradicting_counts_are_refused(key: str, value: object) -> None:
    with pytest.raises(DSparkError, match="contradicts itself"):
        counts_from_meta({**META, key: value}, URL)


def test_no_server_is_one_clear_line() -> None:
    with pytest.raises(DSparkError, match="lost the server at") as caught:
        measure(URL, [[1, 2]], DecodeSettings(max_new_tokens=2))
    assert "\n" not in str(caught.value)
