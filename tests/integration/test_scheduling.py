"""The scheduler on the live server: on by default, ragged in earnest, told in log and metrics."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.prompts import PROMPTS
from tests.integration.serving import Served
from tests.integration.test_features import metric

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

GAMMA = 5


def windows(answers: list[dict[str, Any]]) -> list[int]:
    """Verify windows of each length, 0 .. gamma + 1 tokens, over all answers.

    A server that verifies every draft keeps no histogram: all its windows are whole.
    """
    counts = [0] * (GAMMA + 2)
    for answer in answers:
        meta = answer["meta_info"]
        whole = [0] * (GAMMA + 1) + [meta["spec_verify_ct"]]
        for length, steps in enumerate(meta.get("spec_cap_lens_histogram", whole)):
            counts[length] += steps
    return counts


def counts_at_rest(server: Served) -> tuple[float, float]:
    """Decode steps and accepted drafts since the server's start, once they stand still."""
    names = ("sglang:dspark_steps_total", "sglang:dspark_accepted_drafts_total")
    found = (metric(server, names[0]), metric(server, names[1]))
    time.sleep(0.5)
    again = (metric(server, names[0]), metric(server, names[1]))
    return found if found == again else counts_at_rest(server)


def await_counts(
    server: Served, before: tuple[float, float], meta: dict[str, Any], unread: int = 0
) -> None:
    """The counters grow by what the answer says of itself, while nothing else is asked.

    The answer may be here before the counts, which follow it within a step's time. unread: steps
    that may have been running when it ended; the answer does not count them.
    """
    deadline = time.monotonic() + 30
    while True:
        steps, accepted = (b - a for a, b in zip(before, counts_at_rest(server), strict=True))
        beyond = (steps - meta["spec_verify_ct"], accepted - meta["spec_num_correct_drafts"])
        right = 0 <= beyond[0] <= unread and 0 <= beyond[1] <= GAMMA * unread
        if right or time.monotonic() > deadline:
            break
    assert right, f"counted beyond the answer's own: {beyond}, of {meta}"


def test_one_line_says_what_was_profiled_and_which_mode(dspark: Served) -> None:
    lines = [line for line in dspark.log.splitlines() if "sglang-dspark: mode " in line]
    (line,) = lines
    assert "mode compact, scheduled by confidence, algorithm search" in line
    assert re.search(r"step times of 1 to \d+ tokens .* (measured in|read from) ", line)


def test_numbers_are_float32_where_no_flag_says_otherwise(dspark: Served, plain: Served) -> None:
    """Upstream uses float16, in which this drafter's confidence was NaN."""
    for server in (dspark, plain):
        assert server.request("GET", "/get_server_info").json()["dtype"] == "float32"
    assert dspark.log.count("sglang-dspark: dtype float32") == 1


def test_a_full_server_fills_a_freed_slot_at_once(dspark: Served) -> None:
    """Upstream waits with DSPARK until three of 16 slots are free."""
    ended: list[str] = []

    def ask(name: str) -> dict[str, Any]:
        tokens = {"long": 64, "short": 4, "waiting": 2}[name]
        answer = dspark.generate(PROMPTS[0], tokens, sampling_params={"ignore_eos": True})
        ended.append(name)
        return answer

    dspark.each(ask, ["long"] * 15 + ["short", "waiting"], 17)
    assert set(ended[:2]) == {"short", "waiting"}, ended


def test_ragged_windows_are_verified(dspark_ragged: Served) -> None:
    """Test the window lengths alone; test_greedy_equal compares the tokens."""
    fields = {"max_new_tokens": 48, "sampling_params": {"ignore_eos": True}}
    counts = windows(dspark_ragged.generate_all(PROMPTS[:16], 8, **fields))
    assert counts[0] == 0
    assert counts[1] > 0, "no window without drafts"
    assert sum(steps > 0 for steps in counts) >= 3, counts


def test_a_speed_target_changes_no_token(dspark: Served) -> None:
    """Leave its effect on the schedule to tests/step/test_engine_plans.py."""
    asks = [{"ignore_eos": True}] * 3 + [
        {"ignore_eos": True, "custom_params": {"dspark_speed": 1e4}}
    ]
    answers = dspark.each(
        lambda sampling: dspark.generate(PROMPTS[0], 48, sampling_params=sampling), asks, 4
    )
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
    assert sum(windows(answers)) > 0


def test_sampled_requests_are_scheduled_too(dspark: Served) -> None:
    sampling = {"temperature": 1.0, "ignore_eos": True}
    answers = dspark.generate_all(
        PROMPTS[:4], 4, max_new_tokens=24, sampling_params=sampling, return_logprob=False
    )
    assert all(len(answer["output_ids"]) == 24 for answer in answers)
    assert sum(windows(answers)) > 0


def test_the_log_has_no_complaint_about_what_is_not_used(dspark: Served) -> None:
    """Model classes without a CPU build, and upstream's own table of steps per second."""
    assert "DSpark ragged-verify scheduler enabled" in dspark.log  # said just before the latter
    assert "Ignore import error when loading sglang.srt.models" not in dspark.log
    assert "SPS table is uninitialized" not in dspark.log


def test_metrics_tell_what_was_decided(dspark: Served) -> None:
    """At rest, with no other request, they are those of the answers so far."""
    fields = {"max_new_tokens": 64, "sampling_params": {"ignore_eos": True}}
    for prompt in PROMPTS[:3]:
        before = counts_at_rest(dspark)
        meta = dspark.generate(prompt, **fields)["meta_info"]
        await_counts(dspark, before, meta)
    steps = metric(dspark, "sglang:dspark_steps_total")
    admitted = metric(dspark, "sglang:dspark_admitted_drafts_total")
    assert admitted >= metric(dspark, "sglang:dspark_accepted_drafts_total")
    assert metric(dspark, "sglang:dspark_budget_sum") == admitted
    assert metric(dspark, "sglang:dspark_budget_count") == steps
    timed = metric(dspark, "sglang:dspark_step_seconds_count")
    assert 0 < timed <= steps
    assert metric(dspark, "sglang:dspark_predicted_step_seconds_count") == timed
    assert metric(dspark, "sglang:dspark_step_time_error") >= 0
    assert metric(dspark, "sglang:dspark_calibration_error") >= 0


def test_sglangs_own_gauges_are_filled(dspark_ragged: Served) -> None:
    """They tell of the last 40 steps alone: it asks on until drafts were accepted in those."""
    names = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
    for prompt in PROMPTS[:12]:
        dspark_ragged.generate(prompt, 96, sampling_params={"ignore_eos": True})
        values = [metric(dspark_ragged, name) for name in names]
        if all(value > 0 for value in values):
            break
    assert all(value > 0 for value in values), values


def test_a_profile_names_the_stages_of_a_step(dspark_ragged: Served, tmp_path: Path) -> None:
    """SGLang asks the platform what to profile, and ends where that has no answer."""
    asked = {"output_dir": str(tmp_path), "activities": ["CPU"], "with_stack": False}
    assert dspark_ragged.request("POST", "/start_profile", json=asked).status_code == 200
    dspark_ragged.generate(PROMPTS[0], max_new_tokens=8)
    assert dspark_ragged.request("POST", "/stop_profile").status_code == 200
    [path] = tmp_path.glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {f"dspark:{stage}" for stage in ("step", "plan", "draft", "verify", "learn")} <= named
