"""Training by two processes, of one machine and of two, by the page's commands: as by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.documented import documented
from tests.parallel.machines import lacking, two_machines
from tests.training.conftest import config, target_dir
from tests.training.test_run import _in

__all__ = ["config", "target_dir"]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parallel")]

STEPS, LIMIT_S = 6, 400
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel-training")


@pytest.fixture(scope="module")
def written(config: Any, folder: Path) -> Written:
    """A run's configuration as a file, by the run's name."""

    def write(name: str) -> Path:
        run = _in(
            config,
            folder / name,
            steps=STEPS,
            sequences_per_step=3,  # an odd number: the processes' shares differ
            log_every=1,
            checkpoint_every=STEPS,
            validate_every=STEPS,
        )
        file = folder / f"{name}.yaml"
        file.write_text(run.model_dump_json())  # JSON is YAML
        return file

    return write


@pytest.fixture(scope="module")
def alone(written: Written, folder: Path) -> list[dict[str, float]]:
    """Return the journal of a run in one process."""
    command = [sys.executable, "-m", "sglang_dspark.cli.main", "train", "drafter", "--config"]
    _run([*command, str(written("alone"))])
    return journal(folder / "alone")


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]


def journal(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    losses = [each["loss"] for each in expected if "loss" in each]
    assert len(set(losses)) == STEPS
    assert [each["loss"] for each in found if "loss" in each] == pytest.approx(losses, abs=1e-4)
    for key in ("held_out_loss", "held_out_tau"):
        (one,) = [each[key] for each in expected if key in each]
        assert [each[key] for each in found if key in each] == [pytest.approx(one, abs=1e-3)]


def test_two_processes_train_as_one(
    written: Written, folder: Path, alone: list[dict[str, float]]
) -> None:
    _run(documented("train", FILE=str(written("two"))))
    same(journal(folder / "two"), alone)


@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_two_machines_train_as_one(
    written: Written, folder: Path, alone: list[dict[str, float]]
) -> None:
    file = str(written("machines"))
    with two_machines() as machines:
        processes = [
            machine.start(
                documented(f"train-node-{node}", FILE=file),
                folder / f"machine-{node}.log",
                ONE_THREAD | {"GLOO_SOCKET_IFNAME": machine.cable},
            )
            for node, machine in enumerate(machines)
        ]
        for node in (1, 0):  # where one fails the other waits long for it
            status = processes[node].wait(LIMIT_S)
            assert status == 0, (folder / f"machine-{node}.log").read_text()[-4000:]
    same(journal(folder / "machines"), alone)
