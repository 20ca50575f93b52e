"""Test that the pool does every part once, by any thread, awake or asleep."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
import pytest

from sglang_dspark.backends.cpu.threads import pool_library, pool_threads

pytestmark = pytest.mark.skipif(pool_library() is None, reason="no pool on this machine")


WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@pytest.fixture(scope="module")
def pool() -> ctypes.CDLL:
    found = pool_library()
    assert found is not None
    pool_threads(3)
    return found


def run(pool: ctypes.CDLL, work: object, length: int, threads: int) -> None:
    start = pool["dspark_pool_run"]
    start.argtypes = (WORK, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    start(work, None, length, threads)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 36, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_place_is_done_once(pool: ctypes.CDLL, length: int, threads: int) -> None:
    done = np.zeros(length, np.int64)

    @WORK
    def work(data: int, first: int, end: int) -> None:
        assert 0 <= first < end <= length
        done[first:end] += 1

    for times in range(1, 30):
        run(pool, work, length, threads)
        assert (done == times).all()  # when it returns, not later


def test_others_take_parts_and_are_woken_for_it(pool: ctypes.CDLL) -> None:
    for pause in (0.0, 0.05):  # behind it they sleep
        seen: set[int] = set()
        joined = threading.Event()

        @WORK
        def work(
            data: int,
            first: int,
            end: int,
            seen: set[int] = seen,
            joined: threading.Event = joined,
        ) -> None:
            seen.add(threading.get_ident())
            if len(seen) >= 2:
                joined.set()
            joined.wait(30.0)

        time.sleep(pause)
        run(pool, work, 64, 3)
        assert len(seen) >= 2


def test_a_waiting_pool_takes_no_time(pool: ctypes.CDLL) -> None:
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25


def test_a_job_within_a_job_and_one_beside_it_are_done_alone(pool: ctypes.CDLL) -> None:
    done = np.zeros((16, 8), np.int64)

    @WORK
    def work(data: int, first: int, end: int) -> None:
        for row in range(first, end):

            @WORK
            def inner(data: int, begin: int, stop: int, row: int = row) -> None:
                done[row, begin:stop] += 1

            run(pool, inner, 8, 3)

    beside = [threading.Thread(target=run, args=(pool, work, 16, 3)) for _ in range(4)]
    for each in beside:
        each.start()
    for each in beside:
        each.join(30)
        assert not each.is_alive()
    assert (done.sum(1) == 4 * 8).all()


def test_a_forked_process_does_all_itself(pool: ctypes.CDLL) -> None:
    done = np.zeros(32, np.int64)

    @WORK
    def work(data: int, first: int, end: int) -> None:
        done[first:end] += 1

    child = os.fork()
    if child == 0:
        run(pool, work, 32, 3)
        os._exit(0 if (done == 1).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_kernel_gets_the_pools_threads(pool: ctypes.CDLL) -> None:
    assert pool_threads(3) == 3
    assert sum(each.name.startswith("products-") for each in threading.enumerate()) >= 2
    assert pool_threads(1) == 1
