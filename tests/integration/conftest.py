"""Fixtures: demo pair (plain and DSPARK) and tiny pair, each started when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dspark.models.demo import ensure_demo_target
from sglang_dspark.models.drafters import shipped_drafter_path
from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """All servers of the session; whatever happens, none outlives it."""
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.stop_all()


@pytest.fixture(scope="session")
def demo_target() -> Path:
    return ensure_demo_target()


@pytest.fixture(scope="session")
def demo_drafter(pytestconfig: pytest.Config) -> Path:
    chosen = pytestconfig.getoption("--drafter")
    return Path(chosen) if chosen else shipped_drafter_path()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.TinyPair:
    """A drafter that is right at every greedy step."""
    return tiny_models.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.TinyPair:
    """A drafter that is often wrong, for what rejection has to mend."""
    return tiny_models.build(tmp_path_factory.mktemp("noisy"), noise=0.7)


@pytest.fixture(scope="session")
def plain(pool: ServerPool, demo_target: Path) -> Served:
    """The demo target without speculation."""
    return pool.start("plain", demo_target, "--max-running-requests", "16")


@pytest.fixture(scope="session")
def dspark(pool: ServerPool, demo_target: Path, demo_drafter: Path) -> Served:
    """The demo target with the shipped drafter."""
    return pool.start(
        "dspark",
        demo_target,
        *DSPARK_FLAGS,
        str(demo_drafter),
        "--max-running-requests",
        "16",
        "--enable-metrics",
    )


@pytest.fixture(scope="session")
def tiny_dspark(pool: ServerPool, noisy: tiny_models.TinyPair) -> Served:
    """The tiny target with the drafter that is often wrong, all drafts verified.

    The scheduler would not draft: a tiny target's pass costs no more than the draft.
    """
    config = pool.folder / "static.yaml"
    config.write_text("schedule: {mode: static}\n")
    return pool.start(
        "tiny-dspark",
        noisy.target,
        *DSPARK_FLAGS,
        str(noisy.drafter),
        "--max-running-requests",
        "32",
        "--dspark-config",
        str(config),
    )
