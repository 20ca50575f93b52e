"""Fixtures: demo pair (plain, DSPARK, DSPARK with experts) and tiny pair (a dense drafter, one with
experts), each started when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.models.demo import ensure_demo_target
from sglang_dspark.models.drafters import shipped_drafter_path
from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool

PARSER = ("--tool-call-parser", "hermes")  # of the demo target's own format
MOE_DRAFTER = Path(__file__).parents[2] / "drafters" / "smollm2-135m-moe"


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """All servers of the session; none outlives it, even after a failure."""
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
    """A drafter that is often wrong, so that rejection is tested."""
    return tiny_models.build(tmp_path_factory.mktemp("noisy"), noise=0.7)


@pytest.fixture(scope="session")
def plain(pool: ServerPool, demo_target: Path) -> Served:
    """The demo target without speculation."""
    return pool.start("plain", demo_target, "--max-running-requests", "16", *PARSER)


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
def dspark_ragged(pool: ServerPool, demo_target: Path, demo_drafter: Path) -> Served:
    """The demo pair, its drafts verified by confidence alone: ragged windows in every step, however
    busy the machine is."""
    config = pool.folder / "threshold.yaml"
    config.write_text("schedule: {threshold: 0.3}\n")
    return pool.start(
        "dspark-ragged",
        demo_target,
        *DSPARK_FLAGS,
        str(demo_drafter),
        "--max-running-requests",
        "16",
        "--enable-metrics",
        *PARSER,
        "--dspark-config",
        str(config),
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
        "--enable-custom-logit-processor",
        "--dspark-config",
        str(config),
    )


@pytest.fixture(scope="session")
def dspark_moe(pool: ServerPool, demo_target: Path) -> Served:
    """The demo target with the drafter that has experts, all drafts verified: of its own accord the
    scheduler seldom drafts with it here."""
    config = pool.folder / "static-demo-moe.yaml"
    config.write_text("schedule: {mode: static}\n")
    return pool.start(
        "dspark-moe",
        demo_target,
        *DSPARK_FLAGS,
        str(MOE_DRAFTER),
        "--max-running-requests",
        "16",
        "--dspark-config",
        str(config),
    )


@pytest.fixture(scope="session")
def tiny_moe_drafter(noisy: tiny_models.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the tiny target: FP8 experts, four streams, a window of 16; often wrong."""
    folder = tmp_path_factory.mktemp("moe")
    whole = tiny_models.build_moe(folder / "whole", noisy)
    arguments = ["quantize", str(whole), "--format", "fp8", "--out", str(folder / "fp8")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return folder / "fp8"


@pytest.fixture(scope="session")
def published_drafter(
    noisy: tiny_models.TinyPair, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """For the tiny target: published by the library `speculators`, and converted."""
    folder = tmp_path_factory.mktemp("published")
    published = tiny_models.build_published(folder / "published", noisy)
    arguments = ["models", "convert", str(published), "--target", str(noisy.target)]
    ended = CliRunner().invoke(app, [*arguments, "--out", str(folder / "converted")])
    assert ended.exit_code == 0, ended.output
    return folder / "converted"


def all_verified(
    pool: ServerPool, name: str, target: Path, drafter: Path, *more: str, **environment: str
) -> Served:
    """Start a server of the drafter that verifies all drafts. more: further arguments."""
    config = pool.folder / f"{name}.yaml"
    config.write_text("schedule: {mode: static}\n")
    flags = ("--max-running-requests", "16", "--dspark-config", str(config), *more)
    return pool.start(name, target, *DSPARK_FLAGS, str(drafter), *flags, **environment)


@pytest.fixture(scope="session")
def tiny_published(
    pool: ServerPool, noisy: tiny_models.TinyPair, published_drafter: Path
) -> Served:
    """The tiny target with that drafter, all drafts verified."""
    return all_verified(pool, "tiny-published", noisy.target, published_drafter)


@pytest.fixture(scope="session")
def tiny_moe(pool: ServerPool, noisy: tiny_models.TinyPair, tiny_moe_drafter: Path) -> Served:
    """The tiny target with that drafter, all drafts verified."""
    return all_verified(pool, "tiny-moe", noisy.target, tiny_moe_drafter)


@pytest.fixture(scope="session")
def greedy_drafts(pool: ServerPool, noisy: tiny_models.TinyPair) -> Served:
    """The tiny pair; sampled requests have the likeliest tokens as drafts."""
    switch = {"SGLANG_DSPARK_USE_GREEDY_DRAFT": "1"}
    return all_verified(pool, "greedy-drafts", noisy.target, noisy.drafter, **switch)
