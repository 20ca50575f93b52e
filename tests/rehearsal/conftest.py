"""A target that attends, its drafter, and servers of them: plain, and rehearsed as on CUDA."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool

SITE = Path(__file__).parent / "site"
SLOTS = "16"
PROCESSORS = "--enable-custom-logit-processor"


@dataclass
class Rehearsed:
    """A server that runs CUDA's side of the step, and what its steps wrote down."""

    server: Served
    folder: Path

    def steps(self) -> list[dict[str, Any]]:
        """Every planned step since the start, in order."""
        return [line for line in self._lines() if "step" in line]

    def passes(self, rank: int = 0) -> list[dict[str, Any]]:
        """Every verify pass of a rank since the start, in order."""
        lines = self._lines(f"{rank}.jsonl" if rank else "steps.jsonl")
        return [line for line in lines if "pass" in line]

    def launches(self) -> list[dict[str, Any]]:
        """Every decode step's launch since the start, in order."""
        return [line for line in self._lines() if "reads" in line]

    def context(self) -> dict[str, Tensor]:
        """Keys and values [layers, n, heads, size] of the draft's cache, of the last request that
        was alone, as its last step found them."""
        return load_file(self.folder / "steps.safetensors")

    def table(self) -> dict[str, Any]:
        """The profiled tiers and their seconds."""
        return self._lines()[0]

    def _lines(self, file: str = "steps.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / file).read_text().splitlines()]


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.stop_all()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.TinyPair:
    """A token depends on all before it; what the last one alone says is right two times of three.

    The drafter knows that much, its layers have a say, and so has its confidence: windows differ.
    """
    return tiny_models.build_attending(tmp_path_factory.mktemp("attending"))


@pytest.fixture(scope="session")
def plain(pool: ServerPool, pair: tiny_models.TinyPair) -> Served:
    return pool.start("plain", pair.target, "--max-running-requests", SLOTS, PROCESSORS)


def start_rehearsed(
    pool: ServerPool,
    name: str,
    pair: tiny_models.TinyPair,
    *arguments: str,
    warm_up: bool = False,
    **environment: str,
) -> Rehearsed:
    """Start a server with CUDA's seams under the overlap loop; its warm-up only if asked for."""
    folder = pool.folder / f"{name}-steps"
    folder.mkdir()
    config = pool.folder / "overlap.yaml"
    config.write_text("cpu: {overlap: true}\n")
    server = pool.start(
        name,
        pair.target,
        *DSPARK_FLAGS,
        str(pair.drafter),
        *([] if warm_up else ["--skip-server-warmup"]),
        "--max-running-requests",
        SLOTS,
        "--dspark-config",
        str(config),
        *arguments,
        PYTHONPATH=str(SITE),
        XDG_CACHE_HOME=str(folder),  # a private cache for the planted step times
        DSPARK_REHEARSAL=str(folder),
        **environment,
    )
    return Rehearsed(server, folder)


@pytest.fixture(scope="session")
def rehearsed(pool: ServerPool, pair: tiny_models.TinyPair) -> Rehearsed:
    """In a world where drafting pays."""
    return start_rehearsed(pool, "rehearsed", pair, PROCESSORS)


@pytest.fixture(scope="session")
def slow_drafts(pool: ServerPool, pair: tiny_models.TinyPair) -> Rehearsed:
    """Start a server for which a draft costs twice a pass."""
    return start_rehearsed(pool, "slow-drafts", pair, DSPARK_REHEARSAL_DRAFT="0.05")
