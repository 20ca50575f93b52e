"""Training on a device that is not the host's: nothing of the one meets what is of the other."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.families.dflash.shape import DFlashShape
from sglang_dspark.families.eagle3.shape import Eagle3Shape
from sglang_dspark.families.mtp.shape import MTPShape
from sglang_dspark.training.distributed import World
from sglang_dspark.training.setup import prepare
from tests.training import pretended

SHAPES = {
    "dspark": None,
    "dflash": DFlashShape(
        kind="dflash", gamma=3, layers=1, target_layer_ids=(0, 1), draft_vocab=40, mask_token_id=3
    ),
    "eagle3": Eagle3Shape(kind="eagle3", gamma=3, target_layer_ids=(0, 1), draft_vocab=40),
    "mtp": MTPShape(kind="mtp", gamma=3, target_layer_ids=(0, 1), draft_vocab=40),
}


def test_two_devices_do_not_mix() -> None:
    """The other tests rely on this."""
    with pretended.cuda() as device:
        there, here = torch.arange(4.0, device=device), torch.arange(4.0)
        assert there.device.type == "cuda"
        assert (there + there).device == there.device
        assert torch.equal((there * 2).cpu(), here * 2)
        assert torch.equal(there[torch.tensor([1, 2])].cpu(), here[1:3])
        assert here.to(device)[2].item() == 2.0
        for mixed in (lambda: there + here, lambda: here[there.long()]):
            with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
                mixed()


@pytest.mark.parametrize("cached", [True, False], ids=["stored states", "computed states"])
@pytest.mark.parametrize("kind", SHAPES)
def test_every_kind_trains_there(config, tmp_path, kind: str, cached: bool) -> None:
    """The same losses as on the host, from the first step on, and what is measured."""
    shape = SHAPES[kind] or config.drafter
    data = config.data.model_copy(update={"cache": cached})
    cfg = config.model_copy(update={"drafter": shape, "data": data})
    losses = {}
    for name in ("here", "there"):
        mine = cfg.model_copy(update={"run_dir": tmp_path / name})
        if name == "there":
            with pretended.cuda() as device:
                losses[name] = steps(mine, World(device=device))
        else:
            losses[name] = steps(mine, World())
    assert losses["there"] == pytest.approx(losses["here"], rel=0.06)  # half products there


def steps(cfg, world: World) -> list[float]:
    """Losses of two steps, and of held-out draws."""
    trainer, _ = prepare(cfg, world=world)
    sums = [trainer.train_step().cpu() for _ in range(2)]
    return [*(float(each[0] / each[1]) for each in sums), trainer.validate()["held_out_loss"]]
