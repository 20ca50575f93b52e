"""Processes of a server that are stopped, killed or told to end. The last test ends the server.

(Tests run in the order of their files' names.)
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.faults.conftest import Note
from tests.faults.live import LIMIT_S, LONG, Live, Outcome, await_that, unpoisoned
from tests.integration.serving import START_TIMEOUT_S

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("faults")]

USERS = 4


def under_load(live: Live, threads: ThreadPoolExecutor) -> list[Future[list[int]]]:
    """Long requests in work, each of which puts out tokens."""
    live.served.pool.use(live.served)
    asked = [threads.submit(live.ask, at, LONG) for at in range(USERS)]
    await_that(lambda: live.running() > 0, "no request runs")
    return asked


def lost(asked: Sequence[Future[list[int]]], live: Live) -> int:
    """Count requests with an error, each within the limit; check that all others are right."""
    errors = 0
    for at, future in enumerate(asked):
        try:
            found = future.result(LIMIT_S)
        except (httpx.HTTPError, AssertionError):  # no connection, or a status other than 200
            errors += 1
        else:
            assert found == live.expected_long[at]
    return errors


@pytest.mark.parametrize("seconds", [4.0, pytest.param(15.0, marks=pytest.mark.slow)])
def test_a_scheduler_that_is_stopped_and_continued(live: Live, note: Note, seconds: float) -> None:
    costs = live.costs()
    live.lossless(USERS)
    with ThreadPoolExecutor(USERS) as threads:
        asked = under_load(live, threads)
        scheduler = live.scheduler()
        scheduler.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        scheduler.send_signal(signal.SIGCONT)
        recovered = live.recovered()
        assert lost(asked, live) == 0
    unpoisoned(costs, live.costs())
    live.lossless()
    live.at_rest()
    note(
        Outcome(
            f"the scheduler's process is stopped for {seconds:.0f} s and continued",
            "requests wait; answers are plain decoding's; step times are unchanged",
            "`sglang:dspark_step_time_outliers`",
            recovered,
            0,
            USERS,
        )
    )


@pytest.mark.slow
def test_a_scheduler_that_is_killed(live: Live, note: Note) -> None:
    """Clients get an error at once, the server ends, and a new one answers on the same port."""
    first = psutil.Process(live.served.process.pid)
    family = [first, *first.children(recursive=True)]
    with ThreadPoolExecutor(USERS) as threads:
        asked = under_load(live, threads)
        live.scheduler().kill()
        began = time.monotonic()
        errors = lost(asked, live)
    gone = psutil.wait_procs(family, max(0.0, began + LIMIT_S - time.monotonic()))
    assert not gone[1], f"still there: {gone[1]}"
    ended = time.monotonic() - began
    restart(live)
    recovered = time.monotonic() - began + live.recovered()
    live.lossless()
    live.at_rest()
    note(
        Outcome(
            "the scheduler's process is killed (SIGKILL) under load, then the server is restarted",
            f"the server ends within {ended:.0f} s, clients get an error; the restarted server "
            "uses the caches",
            "SGLang's line in the log",
            recovered,
            errors,
            USERS,
        )
    )


def restart(live: Live) -> None:
    """Start the server anew, where it was."""
    live.served.process.stop()
    live.served.process.start().wait_ready(START_TIMEOUT_S)


@pytest.mark.slow
def test_a_server_that_gets_sigterm_under_load(live: Live, note: Note) -> None:
    """SIGTERM: running requests are answered, then all processes end."""
    first = psutil.Process(live.served.process.pid)
    family = [first, *first.children(recursive=True)]
    with ThreadPoolExecutor(USERS) as threads:
        asked = under_load(live, threads)
        first.terminate()
        began = time.monotonic()
        assert lost(asked, live) == 0
        await_that(lambda: not live.served.process.alive(), "the first process is still there")
        gone = psutil.wait_procs(family, LIMIT_S)
    assert not gone[1], f"still there: {gone[1]}"
    note(
        Outcome(
            "SIGTERM under load",
            "running requests get plain decoding's answers, then all processes end",
            "SGLang's `Gracefully exiting` in the log",
            time.monotonic() - began,
            0,
            USERS,
        )
    )
