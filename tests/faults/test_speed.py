"""Tokens per second before and after a pause, on the demo pair under the scheduler's own choice."""

from __future__ import annotations

import itertools
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_dspark.models.demo import ensure_demo_target
from sglang_dspark.models.drafters import shipped_drafter_path
from tests.faults.conftest import Note
from tests.faults.live import Live, Outcome
from tests.integration.prompts import PROMPTS
from tests.integration.serving import DSPARK_FLAGS, ServerPool

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.xdist_group("faults")]

USERS, TOKENS, PAUSE_S, CYCLES = 4, 48, 15.0, 5


def tokens_per_s(live: Live) -> float:
    """Of so many users, over the same two dozen prompts each time."""
    began = time.monotonic()
    sampling = {"ignore_eos": True}
    asked = PROMPTS[:24]
    live.served.generate_all(asked, USERS, max_new_tokens=TOKENS, sampling_params=sampling)
    return len(asked) * TOKENS / (time.monotonic() - began)


def test_a_pause_costs_no_speed_afterwards(pool: ServerPool, note: Note) -> None:
    """The pause happens during requests; speed is measured before and after it."""
    flags = ("--max-running-requests", "16", "--enable-metrics")
    drafter = (*DSPARK_FLAGS, str(shipped_drafter_path()))
    live = Live(pool.start("demo", ensure_demo_target(), *drafter, *flags), pool.folder, [], [])
    for _ in range(3):
        tokens_per_s(live)  # until it has settled how it decodes
    rates = [tokens_per_s(live)]
    for _ in range(CYCLES):
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(tokens_per_s, live)
            time.sleep(1.0)
            scheduler = live.scheduler()
            scheduler.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            scheduler.send_signal(signal.SIGCONT)
            asked.result()
        rates.append(tokens_per_s(live))
    outliers = live.count("sglang:dspark_step_time_outliers")
    live.at_rest()
    pool.stop("demo")
    ratios = sorted(after / before for before, after in itertools.pairwise(rates))
    middle = statistics.median(ratios)
    print(f"tokens/s {[round(rate, 1) for rate in rates]}, after over before {ratios}")
    assert middle > 0.85, "beside a busy neighbour; 0.95 is what an idle machine shows"
    note(
        Outcome(
            f"{CYCLES} pauses of {PAUSE_S:.0f} s within load, demo pair, {USERS} users",
            f"tokens/s after over before: median {middle:.3f} ({ratios[0]:.3f} to "
            f"{ratios[-1]:.3f})",
            f"`sglang:dspark_step_time_outliers` ({outliers:.0f})",
            0.0,
            0,
            CYCLES * 24,
        )
    )
