"""Small drafters of every kind, with random weights, and drafters that have lost their head."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.drafter import DrafterConfig, DSparkDrafter


def tiny_config(**changes: object) -> DrafterConfig:
    fields: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "gamma": 4,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "mask_token_id": 3,
        "markov_rank": 8,
    }
    return DrafterConfig(**{**fields, **changes})  # type: ignore[arg-type]


def tiny_drafter(seed: int = 0, **changes: object) -> DSparkDrafter:
    torch.manual_seed(seed)
    drafter = DSparkDrafter(tiny_config(**changes))
    c = drafter.config
    drafter.attach(
        torch.randn(c.vocab_size, c.hidden_size), torch.randn(c.vocab_size, c.hidden_size)
    )
    return drafter.eval()


def strip_head(drafter: Path) -> None:
    """Take the confidence head out of a drafter's folder, and the calibration of it."""
    config = drafter / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"enable_confidence_head": False})
    )
    file = drafter / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if not k.startswith("confidence_head.")}
    save_file(tensors, file, {"format": "pt"})
    (drafter / "sts.json").unlink(missing_ok=True)


def copy_without_head(source: Path, out: Path) -> Path:
    """Write the drafter in `source` into `out`, without its confidence head."""
    shutil.copytree(source, out)
    strip_head(out)
    return out
