"""Two processes with FSDP2 do what one does: losses, weights, measurement, checkpoint, resume."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from sglang_dspark.training.setup import prepare
from tests.training.test_run import _in

STEPS = 6

WORKER = """
import json, sys
from pathlib import Path
from sglang_dspark.training.config import load_config
from sglang_dspark.training.distributed import World
from sglang_dspark.training.setup import prepare
world = World.join("cpu")
trainer, note = prepare(load_config(Path(sys.argv[1])), world=world)
losses = []
trainer.validate()  # must leave no trace in training
while trainer.step < int(sys.argv[2]):
    sums = trainer.train_step()
    losses.append(float(sums[0] / sums[1]))
means = trainer.validate()
trainer.save()
if world.leads:
    Path(sys.argv[3]).write_text(json.dumps([note, losses, means]))
world.leave()
"""


def _two_processes(cfg, steps, tmp_path):
    """Train to `steps` in two processes: (note, losses, held-out means)."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "c.yaml").write_text(cfg.model_dump_json())
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(tmp_path / "worker.py")]
    command += [str(tmp_path / "c.yaml"), str(steps), str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
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
    _, losses, measured = _two_processes(cfg, STEPS, tmp_path)
    assert losses == pytest.approx(expected, abs=1e-4)
    assert len(set(losses)) == STEPS
    for key in ("held_out_loss", "held_out_tau", "held_out_ece"):
        assert measured[key] == pytest.approx(means[key], abs=1e-3)
    for name in ("state.safetensors", "drafter/model.safetensors"):
        one = load_file(str(tmp_path / "one" / name))
        two = load_file(str(tmp_path / "two" / name))
        assert one.keys() == two.keys()
        for key in one:
            difference = (one[key].double() - two[key].double()).abs().max()
            assert float(difference) < 5e-3, key
    # One process goes on from the two processes' state, and two from the one's.
    back, note = prepare(cfg)
    assert note == f"going on from step {STEPS}"
    on = _losses(alone, STEPS + 3)
    assert _losses(back, STEPS + 3) == pytest.approx(on, abs=1e-4)
    single = cfg.model_copy(update={"run_dir": tmp_path / "one"})
    note, losses, _ = _two_processes(single, STEPS + 3, tmp_path)
    assert note == f"going on from step {STEPS}"
    assert losses == pytest.approx(on, abs=1e-4)
