"""Two processes with FSDP2 do what one does: losses, weights, measurement, checkpoint, resume."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from sglang_dspark.cli.train import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.training.distributed import World
from sglang_dspark.training.setup import prepare
from tests.training.test_run import _in

STEPS = 6

WORKER = """
import json, sys
from pathlib import Path
from torch.distributed.tensor import DTensor
from sglang_dspark.training.config import load_config
from sglang_dspark.training.distributed import World
from sglang_dspark.training.setup import prepare
world, results = World.join("cpu"), []
for config, steps in zip(sys.argv[2::2], sys.argv[3::2]):
    trainer, note = prepare(load_config(Path(config)), world=world)
    trainer.validate()  # must leave no trace in training
    losses = []
    while trainer.step < int(steps):
        sums = trainer.train_step()
        losses.append(float(sums[0] / sums[1]))
    parameters = trainer.learner.module.parameters()
    sharded = any(isinstance(each, DTensor) for each in parameters)
    results.append([note, losses, trainer.validate(), sharded])
    trainer.save()
if world.leads:
    Path(sys.argv[1]).write_text(json.dumps(results))
world.leave()
world.end()
"""
# An interpreter that aborts while it ends, as gloo's threads sometimes make it.
ABORTS = """
import atexit, os
from sglang_dspark.training.distributed import World
world = World.join("cpu")
atexit.register(os.abort)
world.leave()
print("all is written")
world.end()
"""
# The same of any program that torchrun starts: a `sitecustomize`.
ENDS_BADLY = """
import atexit, os
if "TORCHELASTIC_RUN_ID" in os.environ:
    atexit.register(os.abort)
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def _processes(size, tmp_path, *runs):
    """Each (config, steps) in so many processes: note, losses, held-out means, sharded of each."""
    (tmp_path / "worker.py").write_text(WORKER)
    out = tmp_path / "out.json"
    command = [*TORCHRUN, str(size), str(tmp_path / "worker.py"), str(out)]
    for number, (cfg, steps) in enumerate(runs):
        file = tmp_path / f"{number}.yaml"
        file.write_text(cfg.model_dump_json())  # JSON is YAML
        command += [str(file), str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[:4000]
    return json.loads(out.read_text())


def _losses(trainer, steps):
    found = []
    while trainer.step < steps:
        sums = trainer.train_step()
        found.append(float(sums[0] / sums[1]))
    return found


def test_two_processes_train_as_one(config, tmp_path):
    # An odd number of sequences: the processes' shares and weights differ.
    cfg = _in(config, tmp_path / "two", sequences_per_step=3, ema=0.9)
    alone, _ = prepare(cfg.model_copy(update={"run_dir": tmp_path / "one"}))
    expected = _losses(alone, STEPS)
    means = alone.validate()
    alone.save()
    one_state = load_file(str(tmp_path / "one" / "state.safetensors"))
    one_drafter = load_file(str(tmp_path / "one" / "drafter" / "model.safetensors"))
    single = alone.cfg
    on = _losses(alone, STEPS + 3)
    # Two processes from the start, and two that go on from the state of one.
    first, second = _processes(2, tmp_path, (cfg, STEPS), (single, STEPS + 3))
    _, losses, measured, sharded = first
    assert sharded
    assert losses == pytest.approx(expected, abs=1e-4)
    assert len(set(losses)) == STEPS
    for key in ("held_out_loss", "held_out_tau", "held_out_ece"):
        assert measured[key] == pytest.approx(means[key], abs=1e-3)
    for one, name in ((one_state, "state"), (one_drafter, "drafter/model")):
        two = load_file(str(tmp_path / "two" / f"{name}.safetensors"))
        assert one.keys() == two.keys()
        for key in one:
            difference = (one[key].double() - two[key].double()).abs().max()
            assert float(difference) < 5e-3, key
    note, losses, *_ = second
    assert note == f"going on from step {STEPS}"
    assert losses == pytest.approx(on, abs=1e-4)
    back, note = prepare(cfg)  # one process goes on from the state of two
    assert note == f"going on from step {STEPS}"
    assert _losses(back, STEPS + 3) == pytest.approx(on, abs=1e-4)


def test_one_process_of_torchrun_trains_as_one_without(config, tmp_path):
    """Its parameters are sharded all the same."""
    cfg = _in(config, tmp_path / "alone")
    alone, _ = prepare(cfg)
    expected = _losses(alone, STEPS)
    alone.save()
    [found] = _processes(1, tmp_path, (_in(config, tmp_path / "sharded"), STEPS))
    _, losses, _, sharded = found
    assert sharded
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(set(losses)) == STEPS
    one, other = (
        load_file(str(tmp_path / name / "drafter" / "model.safetensors"))
        for name in ("alone", "sharded")
    )
    assert one.keys() == other.keys()
    for key in one:
        assert float((one[key].double() - other[key].double()).abs().max()) < 1e-2, key


@pytest.mark.parametrize("size", [1, 2])
def test_a_process_that_has_left_ends_before_its_interpreter_can_abort(size, tmp_path):
    (tmp_path / "aborts.py").write_text(ABORTS)
    # --no-python: torchrun's own Python writes without a buffer, other starters' does not.
    command = [*TORCHRUN, str(size), "--no-python", sys.executable, str(tmp_path / "aborts.py")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout.count("all is written") == size  # what was printed is not lost


@pytest.fixture
def ends_badly(tmp_path, monkeypatch):
    """Interpreters of processes that torchrun starts abort while they end."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ENDS_BADLY)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def test_the_command_ends_before_its_interpreter_can_abort(config, tmp_path, ends_badly):
    file = tmp_path / "train.yaml"
    file.write_text(_in(config, tmp_path / "run", steps=2).model_dump_json())  # JSON is YAML
    command = [*TORCHRUN, "1", "-m", "sglang_dspark.cli.main", "train", "drafter"]
    done = subprocess.run(
        [*command, "--config", str(file)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[:4000]
    assert f"drafter in {tmp_path / 'run' / 'drafter'}" in done.stdout


@pytest.mark.parametrize("stage", [[], ["data"], ["prompts"]])
def test_one_of_several_processes_makes_no_data(stage, config, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "train.yaml"
    file.write_text(_in(config, tmp_path / "run").model_dump_json())
    with pytest.raises(DSparkError, match="torchrun starts `dspark train drafter` alone"):
        CliRunner().invoke(app, [*stage, "--config", str(file)], catch_exceptions=False)
    assert not (tmp_path / "run").exists()


def test_a_process_alone_goes_on():
    World().end()
