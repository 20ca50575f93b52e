"""The tiny pair that attends, plain and with faults at hand; the record of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.live import CHECKS, FLAGS, LIMIT_S, LONG, PROMPTS, SITE, TOKENS, Live, Outcome
from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool

Note = Callable[[Outcome], None]
CONFIG = "schedule: {threshold: 0.3, profile_seconds: 30}\n"  # drafts whether or not it pays


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.stop_all()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.TinyPair:
    """A token depends on all before it; two of three drafts are right, as confidence predicts."""
    return tiny_models.build_attending(tmp_path_factory.mktemp("attending"))


def answers(served: Served, tokens: int) -> list[list[int]]:
    """Greedy tokens of every prompt."""
    sampling = {"ignore_eos": True}
    found = served.generate_all(PROMPTS, 4, max_new_tokens=tokens, sampling_params=sampling)
    return [each["output_ids"] for each in found]


@pytest.fixture(scope="session")
def expected(pool: ServerPool, pair: tiny_models.TinyPair) -> Iterator[list[list[int]]]:
    """The plain server's long answers."""
    plain = pool.start("plain", pair.target, "--max-running-requests", "16")
    yield answers(plain, LONG)
    pool.stop("plain")


def start_live(
    pool: ServerPool,
    name: str,
    pair: tiny_models.TinyPair,
    expected: list[list[int]],
    *arguments: str,
    config: str = CONFIG,
    **environment: str,
) -> Live:
    """A scheduled server whose faults are armed by files in a folder of its own."""
    folder = pool.folder / f"{name}-faults"
    folder.mkdir(exist_ok=True)
    settings = folder / "dspark.yaml"
    settings.write_text(config)
    variables = {
        "PYTHONPATH": str(SITE),
        "DSPARK_FAULTS": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        **CHECKS,
        **environment,
    }
    named = ("--dspark-config", str(settings))
    flags = (*DSPARK_FLAGS, str(pair.drafter), *FLAGS, *named, *arguments)
    served = pool.start(name, pair.target, *flags, **variables)
    served.http.timeout = LIMIT_S
    short = [each[:TOKENS] for each in expected]
    return Live(served, folder, short, expected)


@pytest.fixture(scope="session")
def live(pool: ServerPool, pair: tiny_models.TinyPair, expected: list[list[int]]) -> Iterator[Live]:
    """The server that gets most faults, one after another."""
    yield start_live(pool, "live", pair, expected)
    pool.stop("live")


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Record the result of a fault; `python -m tests.faults` publishes it."""
    return lambda outcome: record_property("outcome", outcome.text())
