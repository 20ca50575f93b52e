"""Make one of two tensor-parallel ranks diverge: the server ends and logs the reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil
import pytest

from tests.faults.conftest import CONFIG, Note, start_live
from tests.faults.live import LIMIT_S, Live, Outcome
from tests.faults.test_stops import USERS, lost, restart, under_load
from tests.integration import tiny_models
from tests.integration.serving import ServerPool
from tests.rehearsal.test_ranks import bound_cores

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.xdist_group("faults")]


class Split(NamedTuple):
    """A fault of one rank alone. lines: of the log; named: as in the table."""

    fault: str
    text: str
    lines: tuple[str, ...]
    named: str


SPLITS = (
    Split(
        "rank-differs",
        "one of two ranks decodes another batch",
        ("rank 1 decodes", "restart the server and report this"),
        "`rank … decodes … requests, rank … in step … others`",
    ),
    Split(
        "draft-raises-on-a-follower",
        "the drafter raises on one of two ranks",
        ("RuntimeError: injected on one rank",),
        "the drafter's error in the log",
    ),
)


@pytest.fixture(scope="module")
def ranks(
    pool: ServerPool, pair: tiny_models.TinyPair, expected: list[list[int]]
) -> Iterator[Live]:
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": bound_cores()}
    yield start_live(pool, "ranks", pair, expected, "--tp-size", "2", config=CONFIG, **cores)
    pool.stop("ranks")


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.fault)
def test_one_rank_does_something_else(ranks: Live, note: Note, split: Split) -> None:
    """No client gets a wrong answer or waits without end."""
    ranks.lossless()
    ranks.at_rest()
    first = psutil.Process(ranks.served.process.pid)
    family = [first, *first.children(recursive=True)]
    with ThreadPoolExecutor(USERS) as threads:
        asked = under_load(ranks, threads)
        ranks.arm(split.fault)
        began = time.monotonic()
        errors = lost(asked, ranks)
    gone = psutil.wait_procs(family, LIMIT_S)
    ended = time.monotonic() - began
    assert not gone[1], f"still there: {gone[1]}"
    assert ended < LIMIT_S
    for line in split.lines:
        assert line in ranks.served.log
    restart(ranks)
    recovered = time.monotonic() - began + ranks.recovered()
    ranks.lossless()
    ranks.at_rest()
    note(
        Outcome(
            split.text,
            f"no token is sent; the server logs the reason and ends within {ended:.0f} s",
            split.named,
            recovered,
            errors,
            USERS,
        )
    )
