"""Test reopening a sweep's folder: the same arms continue, others are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep import setup as sweep_setup
from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.loadtest.sweep.run_dir import RunInfo
from sglang_dspark.models.identity import target_sha256

FLAGS = ["--speculative-algorithm=DSPARK", '--json-model-override-args={"a": "b c"}']
ARM = {"about": "drafts", "drafter": "dspark", "arguments": FLAGS, "config": {"cpu": {1: "x"}}}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Change = Callable[[Path, pytest.MonkeyPatch], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Arms, and a drafter in two shards."""
    for name in ("arms", "target", "drafter"):
        (tmp_path / name).mkdir()
    (tmp_path / "arms" / "plain.yaml").write_text(yaml.safe_dump({"about": "no drafts"}))
    write_arm(tmp_path)
    (tmp_path / "drafter" / "config.json").write_text('{"block_size": 2}')
    for name in SHARDS:
        (tmp_path / "drafter" / name).write_bytes(name.encode())
    return tmp_path


def write_arm(folder: Path, **other: Any) -> None:
    (folder / "arms" / "mine.yaml").write_text(yaml.safe_dump({**ARM, **other}))


def started(folder: Path, run: Path) -> RunInfo:
    """A start of the sweep, of which nothing runs yet."""
    config = SweepConfig(
        arms=["plain", "mine"],
        arms_folder=folder / "arms",
        drafters={"dspark": str(folder / "drafter")},
        concurrency=[1],
    )
    arms = sweep_setup.choose_arms(config)
    drafters = sweep_setup.drafter_folders(config, arms)
    places = sweep_setup.place_arms(config, arms, folder / "target", drafters, "cpu", run)
    records = sweep_setup.arm_records(places, drafters)
    fresh = sweep_setup.new_run(config, records, "a CPU").model_copy(update={"commit": "c0ffee"})
    return sweep_setup.open_run(run, fresh)


def test_a_drafter_in_shards_is_known_by_all_of_them(folder: Path) -> None:
    plain, mine = started(folder, folder / "run").arms
    assert plain.drafter_sha256 is None
    assert mine.drafter_sha256 == target_sha256(folder / "drafter")


def test_a_sweep_goes_on_from_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports and folders of the commands may be others; the record stays the one of the start."""
    before = started(folder, folder / "run")
    monkeypatch.chdir(folder)
    moved = run_dir.read_run(folder / "run")
    command = moved.arms[1].command.replace("--port 30001", "--port 31001")
    command = command.replace(str(folder), "elsewhere")
    assert command != moved.arms[1].command
    arms = [moved.arms[0], moved.arms[1].model_copy(update={"command": command})]
    config = {**moved.config, "arms_folder": "arms", "drafters": {"dspark": "drafter"}}
    moved = moved.model_copy(update={"arms": arms, "config": config})
    run_dir.write(folder / "run" / run_dir.RUN_FILE, moved)
    assert started(folder, Path("run")) == moved
    assert before.arms[0] == moved.arms[0]


def new_weights(folder: Path, _: pytest.MonkeyPatch) -> None:
    (folder / "drafter" / SHARDS[1]).write_bytes(b"others")


def new_torch(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {**sweep_setup._versions(), "torch": "9.0"}
    monkeypatch.setattr(sweep_setup, "_versions", lambda: versions)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (new_weights, "drafter_sha256 of arm mine"),
        (new_torch, "version of torch"),
        (lambda f, _: write_arm(f, config={"cpu": {2: "x"}}), "config of arm mine"),
        (lambda f, _: write_arm(f, environment={"A": "1"}), "environment of arm mine"),
        (lambda f, _: write_arm(f, arguments=[*FLAGS, "--x=1"]), "command of arm mine"),
        (lambda f, _: write_arm(f, name="other", arguments=FLAGS[:1]), "command of arm other"),
    ],
)
def test_another_arm_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Change, said: str
) -> None:
    started(folder, folder / "run")
    written = (folder / "run" / run_dir.RUN_FILE).read_bytes()
    assert started(folder, folder / "run").name == "sweep"
    change(folder, monkeypatch)
    with pytest.raises(DSparkError, match=f"holds a sweep with another .*{said}") as error:
        started(folder, folder / "run")
    assert "\n" not in str(error.value)
    assert "of arm plain" not in str(error.value)
    assert (folder / "run" / run_dir.RUN_FILE).read_bytes() == written
