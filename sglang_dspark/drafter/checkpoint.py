"""Reading and writing drafters in the format that stock SGLang 0.5.23 serves as DSPARK."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.errors import DSparkError


def _stored(name: str) -> str:
    """Name in the file: the backbone's modules stand at the top level there."""
    return name.removeprefix("backbone.")


def save_drafter(drafter: DSparkDrafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `config.json` and `model.safetensors` into `path`, each to a temporary name first."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {_stored(k): v.to(dtype).contiguous() for k, v in drafter.state_dict().items()}
    weights, config = path / "model.safetensors", path / "config.json"
    save_file(tensors, f"{weights}.tmp", {"format": "pt"})
    Path(f"{config}.tmp").write_text(json.dumps(drafter.config.to_json(), indent=2) + "\n")
    os.replace(f"{weights}.tmp", weights)
    os.replace(f"{config}.tmp", config)


def load_drafter(path: Path, embed_tokens: Tensor, lm_head: Tensor) -> DSparkDrafter:
    """Load a drafter in float32 and attach it to the target's embedding and LM head [V, d].

    Raises DSparkError for a missing, truncated or foreign checkpoint and for another target.
    """
    path = Path(path)
    config = DrafterConfig.from_dir(path)
    if tuple(embed_tokens.shape) != (config.vocab_size, config.hidden_size):
        raise DSparkError(
            f"{path} was trained for a target with vocabulary {config.vocab_size} and hidden size "
            f"{config.hidden_size}, this target has {embed_tokens.shape[0]} and "
            f"{embed_tokens.shape[1]}; use the drafter of this target"
        )
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DSparkError(f"no safetensors weights in {path}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(str(file)))
        except (SafetensorError, OSError) as error:
            raise DSparkError(f"{file} cannot be read ({error}); copy or train it again") from None
    drafter = DSparkDrafter(config)
    _fill(drafter, tensors, path)
    drafter.attach(embed_tokens, lm_head)
    return drafter.eval()


def _fill(drafter: DSparkDrafter, tensors: dict[str, Tensor], path: Path) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            found = tensors.get(_stored(name))
            if found is None:
                raise DSparkError(
                    f"{path}: weight {_stored(name)} is missing; the file is incomplete or its "
                    "config.json describes another drafter"
                )
            if found.shape != parameter.shape:
                raise DSparkError(
                    f"{path}: {_stored(name)} is {tuple(found.shape)}, config.json says "
                    f"{tuple(parameter.shape)}"
                )
            parameter.copy_(found)
