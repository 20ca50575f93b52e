"""Find and read the tensors in a drafter's directory.

The files are those that SGLang loads (model_loader/weight_utils.py,
`filter_duplicate_safetensors_files`): the ones that the shard index names, or every safetensors
file if there is no index. Headers are read first; values are read one tensor at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_dspark.common.files import FAULTS, brief, fault, load_json
from sglang_dspark.errors import DSparkError

INDEX = "model.safetensors.index.json"
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by a tensor's name without prefixes
_AGAIN = "fetch or export the drafter again"
_MODEL = "model."
_COMPILED = "_orig_mod."  # of torch.compile, before any module's name
_PARALLEL = "module."  # of DistributedDataParallel, before all others
_ALIASES = {  # names of SGLang's native export (models/dflash.py, `load_weights`)
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
FLOATS = ("F64", "F32", "BF16", "F16")
# First parts of tensor names of all kinds of drafters. If such a tensor is not read, the file is of
# another drafter than its config.json. Other names are ignored, as copies of the target's weights.
_PARTS = frozenset(
    {
        "aux_hidden_norms",
        "aux_norm_high",
        "aux_norm_low",
        "aux_norm_mid",
        "candidate_selector",
        "confidence_head",
        "embed_proj",
        "fc",
        "fc_norm",
        "hidden_norm",
        "input_norm",
        "layers",
        "markov_head",
        "midlayer",
        "norm",
        "prefix_gru",
    }
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. name: as in the file. dtype: safetensors' name, such as `BF16`."""

    file: Path
    name: str
    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        """Return the bytes of its values."""
        bits = re.search(r"\d+", self.dtype)  # BOOL has no width in its name: a byte
        return math.prod(self.shape) * (8 if bits is None else int(bits[0])) // 8


Stored = Mapping[str, StoredTensor]  # by the name without prefixes


def bare_name(name: str) -> str:
    """Return a tensor's name without the prefixes of wrappers and `model.`, and unaliased."""
    bare = name.replace(_COMPILED, "")
    bare = bare.removeprefix(_MODEL).removeprefix(_PARALLEL).removeprefix(_MODEL)
    return _ALIASES.get(bare, bare)


def wrapper_prefix(stored: Stored) -> str | None:
    """Return the prefix that a wrapper of torch has left in a name, which SGLang does not strip."""
    for tensor in stored.values():
        plain = tensor.name.removeprefix(_MODEL)
        if bare_name(tensor.name) != _ALIASES.get(plain, plain):
            return _COMPILED if _COMPILED in tensor.name else _PARALLEL
    return None


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files that hold the drafter in `path`.

    Raises DSparkError if there is none, the index is broken, or it names a file that is missing.
    """
    there = {file.name: file for file in sorted(Path(path).glob("*.safetensors"))}
    indexed = _indexed_files(Path(path))
    missing = sorted((indexed or set()) - there.keys())
    if missing or not there:
        raise DSparkError(
            f"drafter {path} has no {brief(missing[0] if missing else 'safetensors file')}; fetch "
            "or export it again (a checkout slimmed for a GPU: tools/gpu/slim --undo)"
        )
    if indexed is not None:
        return [there[name] for name in sorted(indexed)]
    if there.keys() == {"consolidated.safetensors", "model.safetensors"}:  # as SGLang does
        return [there["model.safetensors"]]
    return list(there.values())


def _indexed_files(path: Path) -> set[str] | None:
    """Return the file names that a shard index names; None if there is no index."""
    if not (path / INDEX).is_file():
        return None
    try:
        names = load_json(path / INDEX)["weight_map"].values()
    except (OSError, *FAULTS) as error:
        raise DSparkError(
            f"drafter {path}: {INDEX} cannot be read ({fault(error)}); {_AGAIN}"
        ) from error
    if not names:
        raise DSparkError(f"drafter {path}: {INDEX} names no file; remove it, or {_AGAIN}")
    return {str(name) for name in names}


def stored_tensors(path: Path, rename: Callable[[str], str] = bare_name) -> dict[str, StoredTensor]:
    """Read the headers of the drafter's files. rename: a name in a file -> the name to find it by.

    Raises DSparkError if a file is missing, truncated or corrupt, or if two tensors have one name,
    e.g. from a stale file next to new ones.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="numpy") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a mapping)
                    part = weights.get_slice(name)
                    tensor = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
                    other = found.setdefault(rename(name), tensor)
                    if other is not tensor:
                        raise _twice(path, other, tensor)
        except (SafetensorError, OSError, *FAULTS) as error:
            raise DSparkError(
                f"drafter {path}: {brief(file.name, 60)} is truncated or corrupt "
                f"({fault(error)}); {_AGAIN}"
            ) from error
    return found


def _twice(path: Path, one: StoredTensor, other: StoredTensor) -> DSparkError:
    places = " and ".join(f"{brief(t.file.name, 60)} ({brief(t.name, 60)})" for t in (one, other))
    return DSparkError(
        f"drafter {path}: one weight is stored twice, in {places}; remove the file that is not the "
        f"drafter's, or add the {INDEX} that names its files"
    )


def load_tensors(stored: Stored) -> dict[str, Tensor]:
    """Read the values of tensors, by the names of `stored`. Raises DSparkError on failure."""
    loaded: dict[str, Tensor] = {}
    for file in {tensor.file for tensor in stored.values()}:
        try:
            with safe_open(file, framework="pt") as weights:
                for name, tensor in stored.items():
                    if tensor.file == file:
                        loaded[name] = weights.get_tensor(tensor.name)
        except (SafetensorError, OSError, RuntimeError, *FAULTS) as error:
            raise DSparkError(
                f"drafter {file.parent}: {brief(file.name, 60)} cannot be read ({fault(error)}); "
                f"{_AGAIN}"
            ) from None
    return {name: loaded[name] for name in stored}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a drafter's directory, by their names without prefixes."""
    return load_tensors(stored_tensors(path))


def require_shapes(path: Path, expected: Shapes, stored: Stored) -> None:
    """Raise DSparkError unless every expected tensor is in the files with its shape."""
    for name, shape in expected.items():
        found = stored.get(name)
        if found is None:
            raise _lacking(path, name, shape, stored)
        if found.shape != shape:
            raise DSparkError(
                f"drafter {path}: the weight {name} has shape {list(found.shape)}, but config.json "
                f"implies {list(shape)}; {_AGAIN}"
            )


def _lacking(path: Path, name: str, shape: Shape, stored: Stored) -> DSparkError:
    hint = _AGAIN
    prefixed = next((t.name for t in stored.values() if t.name.endswith(f".{name}")), None)
    if prefixed is not None:
        hint = f"its names are prefixed ({brief(prefixed, 80)}): remove the prefix"
    elif name.startswith("confidence_head."):
        hint = (
            "use a drafter with trained confidence weights, or set enable_confidence_head to false "
            "in its config.json"
        )
    return DSparkError(f"drafter {path} lacks the weight {name} {list(shape)}; {hint}")


def require_floats(path: Path, names: Iterable[str], stored: Stored) -> None:
    """Raise DSparkError for a tensor that is stored in another type than floats of 16 bits or more.

    Codes of a quantised weight would be read as the weight itself.
    """
    for name in names:
        if stored[name].dtype not in FLOATS:
            raise DSparkError(
                f"drafter {path}: the weight {name} is stored as {stored[name].dtype}, quantised "
                "without a format that config.json names; export the drafter in float32, bfloat16 "
                "or float16"
            )


def require_all_read(path: Path, expected: Collection[str], stored: Stored) -> None:
    """Raise DSparkError for a tensor of a drafter's own parts that `expected` does not name."""
    for name in stored:
        unread = name.partition(".")[0] in _PARTS and name not in expected
        if unread and "rotary_emb." not in name:
            raise DSparkError(
                f"drafter {path}: nothing reads the weight {brief(name, 80)}, because config.json "
                "describes a drafter without it (its architectures, head type, layers or biases); "
                f"correct that, or {_AGAIN}"
            )


def require_finite(path: Path, names: Iterable[str], stored: Stored) -> None:
    """Raise DSparkError for a tensor with NaN or infinite values in float32."""
    for name in names:
        if not is_finite(load_tensors({name: stored[name]})[name]):
            raise not_finite(path, name)


def not_finite(path: Any, name: str) -> DSparkError:
    """Make the error of a weight with NaN or infinite values."""
    return DSparkError(f"drafter {path}: the weight {name} holds NaN or infinite values; {_AGAIN}")


def is_finite(weight: Tensor) -> bool:
    """Return whether all values are finite in float32.

    It tests the extremes, which needs no memory: any NaN is an extreme in torch.
    """
    if weight.numel() == 0:
        return True
    weight = weight.float() if weight.dtype == torch.float64 else weight
    return bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all())
