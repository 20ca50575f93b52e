"""Reading and writing drafters in the format that stock SGLang 0.5.23 serves as DSPARK, and the
parts of it that every drafter's files share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_dspark.common.files import FAULTS, fault
from sglang_dspark.common.writing import replacing
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.fields import reading_config
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation.checkpoint import UNQUANTISED, restore_tensors

Module = TypeVar("Module", bound=nn.Module)


def _stored(name: str) -> str:
    """Name in the file: the backbone's modules stand at the top level there."""
    return name.removeprefix("backbone.")


def save_drafter(drafter: DSparkDrafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write what SGLang serves, `config.json` and `model.safetensors`, into `path`.

    Drafters with experts, a window or residual streams are written in the same way, under an
    architecture of our own (drafter/config.py) that stock SGLang refuses; expert weights are stored
    stacked, `layers.N.mlp.experts.{gate,up,down}_proj` [E, out, in]. They are not quantised here,
    whatever they were read from: `dspark quantize` does that.
    Raises DSparkError for a family of layers that it does not serve.
    """
    if drafter.config.family != "qwen3":
        raise DSparkError(
            f"SGLang serves no {drafter.config.family} drafter; export it in DeepSpec's format"
        )
    config = replace(drafter.config, expert_format=UNQUANTISED)
    write_checkpoint(path, stored_tensors(drafter, dtype), config.to_json())


def stored_tensors(drafter: DSparkDrafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """The drafter's own weights under their names in a file.

    The routers' biases stay float32: their steps are smaller than what bfloat16 resolves.
    """
    return {
        _stored(k): v.to(torch.float32 if k.endswith("e_score_correction_bias") else dtype)
        for k, v in drafter.state_dict().items()
    }


def load_drafter(path: Path, embed_tokens: Tensor, lm_head: Tensor) -> DSparkDrafter:
    """Load a drafter in float32 and attach it to the target's embedding and LM head [V, d].

    Raises DSparkError for a missing, truncated or foreign checkpoint and for another target.
    """
    config = DrafterConfig.from_dir(path)
    check_target(path, config.vocab_size, config.hidden_size, embed_tokens)
    tensors = _restored(path, config)
    drafter = built(lambda: DSparkDrafter(config), tensors, _stored, path)
    drafter.attach(embed_tokens, lm_head)
    return drafter.eval()


def built(
    make: Callable[[], Module],
    tensors: Mapping[str, Tensor],
    stored: Callable[[str], str],
    path: Path,
) -> Module:
    """What `make` makes of `path`/config.json, filled as `fill_parameters` does.

    The file's shapes are looked at first: no memory is taken for sizes that only the config claims.
    """
    with reading_config(path), torch.device("meta"):
        require_tensors(make(), tensors, stored, path)
    module = make()
    fill_parameters(module, tensors, stored, path)
    return module


def fill_drafter(drafter: DSparkDrafter, path: Path) -> None:
    """Copy the weights of a checkpoint directory into a drafter of its shape."""
    fill_parameters(drafter, _restored(path, drafter.config), _stored, path)


def _restored(path: Path, config: DrafterConfig) -> dict[str, Tensor]:
    return restore_tensors(read_tensors(path), config.expert_format)


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write `model.safetensors` and `config.json` into `path`, each to a temporary name first.

    Raises DSparkError when they cannot be written; an earlier checkpoint stays whole then.
    """
    path = Path(path)
    try:
        with (
            replacing(path / "config.json", alone=True) as described,
            replacing(path / "model.safetensors", alone=True) as weights,
        ):
            save_file({k: v.contiguous() for k, v in tensors.items()}, weights, {"format": "pt"})
            described.write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise DSparkError(
            f"cannot write the drafter to {path} ({fault(error)}); what was there is kept: free "
            "some disk, or name another folder"
        ) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint directory, without a leading `model.` in their names.

    Raises DSparkError when there are none or a file is damaged.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise DSparkError(
            f"no safetensors weights in {path}; copy or train them, or in a checkout without "
            "weights run tools/gpu/slim --undo"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(str(file)))
        except (SafetensorError, OSError, RuntimeError, *FAULTS) as error:
            raise DSparkError(
                f"{file} cannot be read ({fault(error)}); copy or train it again"
            ) from None
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def check_target(path: Path, vocab_size: int, hidden_size: int, embed_tokens: Tensor) -> None:
    """Raise DSparkError unless the target's embedding is [vocab_size, hidden_size]."""
    if tuple(embed_tokens.shape) != (vocab_size, hidden_size):
        raise DSparkError(
            f"{path} was trained for a target with vocabulary {vocab_size} and hidden size "
            f"{hidden_size}, this target has {embed_tokens.shape[0]} and "
            f"{embed_tokens.shape[1]}; use the drafter of this target"
        )


def require_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], stored: Callable[[str], str], path: Path
) -> None:
    """DSparkError for a parameter or buffer that is missing in the file or has another shape there;
    other tensors are ignored, as SGLang does. `stored` gives a name in the file."""
    for name, parameter in module.state_dict(keep_vars=True).items():
        found = tensors.get(stored(name))
        if found is None:
            raise DSparkError(
                f"{path}: weight {stored(name)} is missing; the file is incomplete or its "
                "config.json describes another drafter"
            )
        if found.shape != parameter.shape:
            raise DSparkError(
                f"{path}: {stored(name)} is {tuple(found.shape)}, config.json says "
                f"{tuple(parameter.shape)}"
            )


def fill_parameters(
    module: nn.Module, tensors: Mapping[str, Tensor], stored: Callable[[str], str], path: Path
) -> None:
    """Copy tensors into the module's parameters and buffers; raises as `require_tensors` does."""
    require_tensors(module, tensors, stored, path)
    with torch.no_grad():
        for name, parameter in module.state_dict(keep_vars=True).items():
            parameter.copy_(tensors[stored(name)])
