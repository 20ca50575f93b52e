"""Read and write drafters in the format that stock SGLang serves as DSPARK.

`check_drafter` decides whether a directory holds a drafter that can be computed. A server's check,
`dspark eval`, `dspark calibrate` and `dspark models convert` all use it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sglang_dspark.common.atomic_write import permit_as_new, replacing
from sglang_dspark.common.files import brief, fault
from sglang_dspark.drafter.config import DrafterConfig, read_config, reduction_of, require_computed
from sglang_dspark.drafter.fields import raw_config, reading_config
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.drafter.reduced_vocabulary import (
    D2T,
    T2D,
    read_draft_ids,
    require_target_head,
    stored_shapes,
    widen,
)
from sglang_dspark.drafter.speculators import Reduction
from sglang_dspark.drafter.target_fit import Target, require_depth, require_sizes, target_with
from sglang_dspark.drafter.weight_files import (
    INDEX,
    Shape,
    Shapes,
    Stored,
    StoredTensor,
    is_finite,
    load_tensors,
    not_finite,
    require_all_read,
    require_finite,
    require_floats,
    require_shapes,
    stored_tensors,
)
from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation.checkpoint import (
    CONFIG_KEY,
    GLOBAL_SCALE,
    SCALE,
    UNQUANTISED,
    expert_names,
    quantised_shapes,
    restore_tensors,
)

Module = TypeVar("Module", bound=nn.Module)


def stored_name(name: str) -> str:
    """Return a parameter's name in the file, where the backbone's modules are at the top level."""
    return name.removeprefix("backbone.")


def save_drafter(drafter: DSparkDrafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the files that SGLang serves, `config.json` and `model.safetensors`, into `path`.

    Drafters with experts, a window or residual streams are written in the same way, under an
    architecture of our own (drafter/config.py) that stock SGLang rejects. Expert weights are stored
    stacked, `layers.N.mlp.experts.{gate,up,down}_proj` [E, out, in]. They are written unquantised,
    even if they were read quantised; `dspark quantize` quantises them. Raises DSparkError for a
    family of layers that SGLang does not serve.
    """
    if drafter.config.family != "qwen3":
        raise DSparkError(
            f"SGLang serves no {drafter.config.family} drafter; `drafter.deepspec.save_deepspec` "
            "writes it in DeepSpec's format"
        )
    config = replace(drafter.config, expert_format=UNQUANTISED)
    write_checkpoint(path, own_tensors(drafter, dtype), config.to_json())


def own_tensors(drafter: DSparkDrafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the drafter's own weights by their names in a file.

    The routers' biases stay float32: their steps are smaller than the resolution of bfloat16.
    """
    return {
        stored_name(k): v.to(torch.float32 if k.endswith("e_score_correction_bias") else dtype)
        for k, v in drafter.state_dict().items()
    }


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter's directory that passed `check_drafter`.

    raw: its config.json in SGLang's layout. stored: the tensors of its files; empty if not checked.
    reduction: of a Speculators drafter that is stored over a part of the vocabulary.
    """

    path: Path
    raw: dict[str, Any]
    config: DrafterConfig
    stored: dict[str, StoredTensor]
    reduction: Reduction | None = None

    def load(self, lm_head: Tensor | None = None) -> dict[str, Tensor]:
        """Read the drafter's own weights; quantised experts are restored to float32.

        lm_head: the target's [V, d], which is compared with the rows stored of it. Raises
        DSparkError if they differ.
        """
        own = own_shapes(self.config, self.path)
        tensors = load_tensors({name: self.stored[name] for name in own})
        if self.reduction is None:
            return restore_tensors(tensors, self.config.expert_format)
        ids = read_draft_ids(self.path, self.stored, self.config.vocab_size)
        if lm_head is not None:
            require_target_head(self.path, self.stored, ids, lm_head)
        return widen(tensors, ids, self.reduction)


def check_drafter(
    path: Path, target: Target | None = None, *, weights: bool = True
) -> DrafterFiles:
    """Check that a directory holds a DSpark drafter that can be computed and fits the target.

    weights: False checks config.json only. Otherwise names, shapes, types and values of the tensors
    are checked, the values one tensor at a time. Raises DSparkError in one line for the first
    fault.
    """
    path = Path(path)
    raw = read_config(path)
    require_computed(raw, path)
    config = DrafterConfig.from_json(raw, path)
    if target is not None:
        require_sizes(path, config.hidden_size, config.vocab_size, target)
        require_depth(path, raw, target)
    stored = stored_tensors(path) if weights else {}
    reduced = reduction_of(raw_config(path))
    if weights:
        _require_weights(path, config, stored, reduced)
    return DrafterFiles(path, raw, config, stored, reduced)


def own_shapes(config: DrafterConfig, path: Path) -> dict[str, Shape]:
    """Return names and shapes of the tensors in a drafter's files, heads first.

    They are those of the drafter itself, built without memory; quantised experts are codes with
    scales (quantisation/checkpoint.py). Raises DSparkError if sizes overflow.
    """
    tensors = own_tensors(without_memory(lambda: DSparkDrafter(config), path), torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in expert_names(tensors) if config.expert_format != UNQUANTISED else ():
        shapes |= quantised_shapes(name, shapes[name], config.expert_format)
    return dict(sorted(shapes.items(), key=lambda each: "_head." not in each[0]))


def stored_bytes(path: Path) -> dict[str, int]:
    """Add up the bytes of a drafter's tensors by type, in lower case; quantised experts by format.

    Raises DSparkError if config.json or the files cannot be read.
    """
    form, stored = raw_config(path).get(CONFIG_KEY, UNQUANTISED), stored_tensors(path)
    coded: set[str] = set()
    if form != UNQUANTISED:
        coded = {n + part for n in expert_names(stored) for part in ("", SCALE, GLOBAL_SCALE)}
    found: dict[str, int] = {}
    for name, tensor in stored.items():
        kind = f"{form} experts" if name in coded else tensor.dtype.lower()
        found[kind] = found.get(kind, 0) + tensor.nbytes
    return found


def _require_weights(
    path: Path, config: DrafterConfig, stored: Stored, reduced: Reduction | None
) -> None:
    """Raise DSparkError for the first fault of a DSpark drafter's tensors."""
    own = own_shapes(config, path)
    if reduced is not None:
        narrow = own_shapes(replace(config, markov_rank=reduced.rank), path)
        own = stored_shapes(reduced, narrow, config.hidden_size, stored)
    require_shapes(path, own, stored)
    if reduced is not None:
        read_draft_ids(path, stored, config.vocab_size)
    codes = {*_expert_parts(config, own), D2T, T2D}
    floats = [name for name in own if name not in codes]
    require_floats(path, floats, stored)
    skipped = [] if config.confidence_head else [n for n in stored if n.startswith("confidence_")]
    require_all_read(path, {*own, *skipped}, stored)
    require_finite(path, floats, stored)
    for name in (n for n in expert_names(own) if n in codes):
        parts = [each for each in (name, name + SCALE, name + GLOBAL_SCALE) if each in own]
        tensors = load_tensors({each: stored[each] for each in parts})
        try:
            restored = restore_tensors(tensors, config.expert_format)[name]
        except DSparkError as error:
            raise DSparkError(f"drafter {path}: {error}") from None
        if not is_finite(restored):
            raise not_finite(path, name)


def _expert_parts(config: DrafterConfig, own: Shapes) -> Iterator[str]:
    """Yield the names of codes and scales of quantised experts."""
    for name in expert_names(own) if config.expert_format != UNQUANTISED else ():
        yield from (each for each in (name, name + SCALE, name + GLOBAL_SCALE) if each in own)


def load_drafter(
    path: Path, embed_tokens: Tensor, lm_head: Tensor, num_layers: int | None = None
) -> DSparkDrafter:
    """Load a drafter in float32 and attach it to the target's embedding and LM head [V, d].

    num_layers: of the target, if known. Raises DSparkError as `check_drafter` does.
    """
    files = check_drafter(path, target_with(embed_tokens, num_layers))
    drafter = DSparkDrafter(files.config)
    fill_parameters(drafter, files.load(lm_head), stored_name)
    drafter.attach(embed_tokens, lm_head)
    return drafter.eval()


def built(
    make: Callable[[], Module],
    stored: Stored,
    name_in_file: Callable[[str], str],
    path: Path,
) -> Module:
    """Build a drafter of another kind than DSpark with `make` and fill it from its files.

    name_in_file: a parameter's name -> its name in `stored`. Its files are checked first, so no
    memory is allocated for sizes that only config.json claims. Raises DSparkError as
    `check_drafter` does for a drafter's weights.
    """
    names = check_weights(make, stored, name_in_file, path)
    module = make()
    fill_parameters(module, load_tensors({name: stored[name] for name in names}), name_in_file)
    return module


def check_weights(
    make: Callable[[], nn.Module],
    stored: Stored,
    name_in_file: Callable[[str], str],
    path: Path,
) -> Collection[str]:
    """Check the files of a drafter as `built` does; return the names of its tensors."""
    state = without_memory(make, path).state_dict()
    own = {name_in_file(name): tuple(tensor.shape) for name, tensor in state.items()}
    require_shapes(path, own, stored)
    require_floats(path, own, stored)
    require_all_read(path, own, stored)
    require_finite(path, own, stored)
    return own


def without_memory(make: Callable[[], Module], path: Path) -> Module:
    """Make the module that `path`/config.json describes, without memory for its weights.

    Raises DSparkError if sizes overflow.
    """
    with reading_config(path), torch.device("meta"), _Unfilled():
        return make()


class _Unfilled(TorchFunctionMode):
    """A mode that skips `torch.nn.init`, which on `meta` fills nothing and imports the compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return named["tensor"]
        return func(*args, **named)


def fill_drafter(drafter: DSparkDrafter, path: Path) -> None:
    """Copy the weights of a checkpoint directory into a drafter of its shape."""
    fill_parameters(drafter, check_drafter(path).load(), stored_name)


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write `model.safetensors` and `config.json` into `path`, each to a temporary name first.

    `dtype` of the configuration becomes the type of most weights. SGLang chooses its serving type
    by it, and serves a float32 drafter as float16. Raises DSparkError if the files cannot be
    written, or if the directory holds other weight files, which would be read instead of these. An
    earlier checkpoint is then unchanged.
    """
    path = Path(path)
    others = {file.name for file in path.glob("*.safetensors")} - {"model.safetensors"}
    others |= {INDEX} if (path / INDEX).exists() else set()
    if others:
        raise DSparkError(
            f"{path} holds {brief(min(others))} of another checkpoint; name another folder, or "
            "remove it"
        )
    try:
        with (
            replacing(path / "config.json", alone=True) as described,
            replacing(path / "model.safetensors", alone=True) as weights,
        ):
            save_file({k: v.contiguous() for k, v in tensors.items()}, weights, {"format": "pt"})
            permit_as_new(weights)
            described.write_text(json.dumps({**config, **_dtype_of(tensors)}, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise DSparkError(
            f"cannot write the drafter to {path} ({fault(error)}); what was there is kept: free "
            "some disk, or name another folder"
        ) from None


def _dtype_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return `dtype`, the floating-point type of most numbers; empty if there is none."""
    numbers: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.itemsize > 1:  # FP8 is the type of codes
            numbers[tensor.dtype] += tensor.numel()
    if not numbers:
        return {}
    [(dtype, _)] = numbers.most_common(1)
    return {"dtype": str(dtype).removeprefix("torch.")}


def fill_parameters(
    module: nn.Module, tensors: Mapping[str, Tensor], name_in_file: Callable[[str], str]
) -> None:
    """Copy checked tensors into a module's parameters and buffers."""
    with torch.no_grad():
        for name, parameter in module.state_dict(keep_vars=True).items():
            parameter.copy_(tensors[name_in_file(name)])
