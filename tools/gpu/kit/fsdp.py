"""Training by FSDP2 in one process with a real device, beside the same steps without it.

torchrun starts this module anew with `worker`; there the trainer shards its parameters (NCCL on a
GPU, gloo without one), and the losses of a few steps, the held-out measurement and the drafter must
be those of a process alone. Status 1 where they are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from sglang_dspark.training.config import RunConfig, load_config
from sglang_dspark.training.distributed import World
from sglang_dspark.training.setup import prepare
from tools.gpu.files import write_whole
from tools.gpu.kit.device import device_name, say
from tools.gpu.kit.runs import answer_prompts, device_here, run_config
from tools.gpu.packing.arrival import kit_home

STEPS = 6
MOST_LOSS, MOST_WEIGHT = 1e-3, 1e-2  # apart, where rounding decides: products are bfloat16


@dataclass(frozen=True)
class Trained:
    """losses: of each step; held_out: of the averaged weights; sharded: whether FSDP2 did it."""

    losses: tuple[float, ...]
    held_out: float
    sharded: bool


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        return worker(Path(sys.argv[2]), Path(sys.argv[3]))
    device, home = device_here(), kit_home()
    say(device=device_name(), measured=device == "cuda", steps=STEPS)
    cfg = run_config("dspark", home, device, tiny=True)
    answer_prompts(cfg, device, 60.0)
    folder = home / "fsdp"
    alone, sharded = (at(cfg, folder / name) for name in ("alone", "sharded"))
    expected = trained(alone, World.join(device))
    found = by_torchrun(sharded, folder)
    apart = max(abs(a - b) for a, b in zip(expected.losses, found.losses, strict=True))
    weights = furthest(alone.run_dir, sharded.run_dir)
    say(
        backend="nccl" if device == "cuda" else "gloo",
        losses=expected.losses,
        losses_by_fsdp=found.losses,
        sharded=found.sharded,
        loss_apart=apart,
        held_out_apart=abs(expected.held_out - found.held_out),
        weights_apart=weights,
    )
    fine = found.sharded and apart <= MOST_LOSS and weights <= MOST_WEIGHT
    return 0 if fine and len(set(expected.losses)) == STEPS else 1


def at(cfg: RunConfig, folder: Path) -> RunConfig:
    """The run in a folder that nothing is in yet, of so few steps."""
    for file in (folder / "state.safetensors",):
        file.unlink(missing_ok=True)
    return cfg.model_copy(
        update={
            "run_dir": folder,
            "schedule": cfg.schedule.model_copy(update={"steps": STEPS}),
        }
    )


def trained(cfg: RunConfig, world: World) -> Trained:
    """Train in this process's world, and leave the drafter in the run's folder."""
    trainer, _ = prepare(cfg, world=world)
    losses = []
    while trainer.step < STEPS:
        sums = trainer.train_step()
        losses.append(float(sums[0] / sums[1]))
    held_out = trainer.validate()["held_out_loss"]
    trainer.save()
    sharded = any(isinstance(each, DTensor) for each in trainer.learner.module.parameters())
    return Trained(tuple(losses), held_out, sharded)


def by_torchrun(cfg: RunConfig, folder: Path) -> Trained:
    """The same in a process that torchrun started."""
    config, out = folder / "sharded.yaml", folder / "sharded.json"
    write_whole(config, cfg.model_dump_json())  # JSON is YAML
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", "tools.gpu.kit.fsdp", "worker", str(config), str(out)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    found = json.loads(out.read_text())
    return Trained(tuple(found["losses"]), found["held_out"], found["sharded"])


def worker(config: Path, out: Path) -> int:
    """What torchrun starts."""
    cfg = load_config(config)
    world = World.join(cfg.schedule.device)
    found = trained(cfg, world)
    world.leave()
    write_whole(out, json.dumps(vars(found)))
    world.end()
    return 0


def furthest(one: Path, other: Path) -> float:
    """Largest difference between weights of the two drafters."""
    first, second = (load_file(str(run / "drafter" / "model.safetensors")) for run in (one, other))
    assert first.keys() == second.keys(), "drafters of different shapes"
    return max(float((first[k].double() - second[k].double()).abs().max()) for k in first)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
