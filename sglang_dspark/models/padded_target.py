"""Add layers to a target that change no output: same answers at several times the cost.

The added layers are copies of the target's own with zero output projections of attention and MLP.
They are computed in full and add exactly 0 to the residual stream, so the hidden states that a
drafter reads, and every logit, stay bitwise identical. A drafter keeps its acceptance, while its
share of a step shrinks as with a large target. This measures real text where no large target fits.
The speeds are those of a machine that computes zeros, and the added layers carry no knowledge;
results say so.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.common.atomic_write import permit_as_new
from sglang_dspark.common.files import integer, load_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.models.built import built
from sglang_dspark.models.identity import target_sha256
from sglang_dspark.models.resolve import model_name
from sglang_dspark.models.source import Progress, silent
from sglang_dspark.paths import cache_root

INDEX = "model.safetensors.index.json"
RECORD = "deeper.json"  # the source model and the layer counts
_OWN = ("config.json", INDEX, RECORD, "provenance.json")  # of the source, not copied
_KEPT = "kept-"  # prefix of copied weight files: `model.safetensors` would be read as the model
_LAYER = re.compile(r"(?P<front>.*\blayers\.)(?P<layer>\d+)(?P<rest>\..+)")
_LAST = ("self_attn.o_proj.", "mlp.down_proj.")  # projections into the residual stream
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")  # a pass reads one whole; tied: the second
_FIX = "name another target, or leave `deeper` out"


@dataclass(frozen=True)
class Weights:
    """A model's tensors: file and bytes of each, and the part of layer names before the number."""

    file_of: dict[str, Path]
    bytes_of: dict[str, int]
    front: str

    def layer(self, number: int) -> dict[str, str]:
        """Map the parts of a layer's tensor names after its number to the full names."""
        front = f"{self.front}{number}"
        return {n.removeprefix(front): n for n in self.file_of if n.startswith(f"{front}.")}

    def added(self, layers: int, times: float) -> int:
        """Count the layers to add for a pass to read `times` the bytes of weights; at least 1."""
        layer = sum(self.bytes_of[name] for name in self.layer(0).values())
        head = next((self.bytes_of[name] for name in _HEADS if name in self.bytes_of), 0)
        return max(1, round((times - 1) * (layers * layer + head) / layer))


def ensure_deeper(target: Path, times: float, progress: Progress = silent) -> Path:
    """Return the folder of the target at `times` its cost in the user's cache; build it if missing.

    target: a model in safetensors whose layers are attention and a dense MLP. times: above 1,
    factor on the bytes of weights that a pass reads. Raises DSparkError for another model, and if
    it does not fit on the disk.
    """
    if times <= 1:
        raise DSparkError(f"a target {times:g} times as deep is none; give a number above 1")
    config, layers = _config(target)
    weights = _weights(target)
    added = weights.added(layers, times)
    source, sha256 = model_name(target), target_sha256(target)
    path = _place("models", source, f"{times:g}x", sha256)
    if path.is_dir():
        return path
    with built(path) as out:
        _copy(target, out, without=_OWN, renamed=_KEPT)
        places = {name: _KEPT + file.name for name, file in weights.file_of.items()}
        places |= _add_layers(weights, layers, added, out, progress)
        _write(out / INDEX, {"metadata": {}, "weight_map": places})
        _write(out / RECORD, {"source": source, "sha256": sha256, "layers": [layers, added]})
        _write(out / "config.json", config | {"num_hidden_layers": layers + added})
    return path


def ensure_fitted(drafter: Path, target: Path) -> Path:
    """Return a drafter's folder for a deepened target: a copy with the target's number of layers.

    A drafter whose configuration does not state the number is returned unchanged.
    """
    file = drafter / "config.json"
    with reading(file, "drafter's configuration", "name another drafter"):
        config = load_json(file, finite=False)
    layers = _config(target)[1]
    if config.get("num_target_layers", layers) == layers:
        return drafter
    path = _place("drafters", model_name(drafter), str(layers), target_sha256(drafter))
    if not path.is_dir():
        with built(path) as out:
            _copy(drafter, out, without=("config.json",))
            _write(out / "config.json", config | {"num_target_layers": layers})
    return path


def _config(target: Path) -> tuple[dict[str, Any], int]:
    file = target / "config.json"
    with reading(file, "model's configuration", _FIX):
        config = load_json(file, finite=False)
        layers = integer(config["num_hidden_layers"], 1, 1 << 20)
    if listed := sorted(k for k, v in config.items() if isinstance(v, list) and len(v) == layers):
        raise DSparkError(f"{file}: {', '.join(listed)} speaks of every layer; {_FIX}")
    return config, layers


def _weights(target: Path) -> Weights:
    from safetensors import safe_open

    file_of, bytes_of = {}, {}
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                file_of[name] = file
                part = tensors.get_slice(name)
                count = 1
                for side in part.get_shape():
                    count *= side
                bytes_of[name] = count * (4 if part.get_dtype() == "F32" else 2)
    found = next((m for m in map(_LAYER.fullmatch, file_of) if m), None)
    weights = Weights(file_of, bytes_of, found["front"] if found else "")
    lacking = [last for last in _LAST if not any(f".{last}" in name for name in weights.layer(0))]
    if found is None or lacking:
        what = " and ".join(last.rstrip(".") for last in lacking) or "layers"
        raise DSparkError(f"{target} has no {what} to make zero; {_FIX}")
    return weights


def _add_layers(
    weights: Weights, layers: int, added: int, out: Path, progress: Progress
) -> dict[str, str]:
    """Write the added layers, one file for as many as the target has; return each tensor's file."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    for first in range(0, added, layers):
        tensors: dict[str, torch.Tensor] = {}
        for number in range(first, min(first + layers, added)):
            progress("adding layers", number, added)
            for rest, name in weights.layer(number % layers).items():
                with safe_open(weights.file_of[name], framework="pt") as source:
                    value = source.get_tensor(name)
                zero = any(f".{last}" in rest for last in _LAST)
                new = f"{weights.front}{layers + number}{rest}"
                tensors[new] = torch.zeros_like(value) if zero else value
        file = f"deeper-{first // layers + 1:03d}.safetensors"
        save_file(tensors, out / file, {"format": "pt"})
        permit_as_new(out / file)
        places |= dict.fromkeys(tensors, file)
    return places


def _place(kind: str, name: str, what: str, sha256: str) -> Path:
    folder = cache_root() / "sglang-dspark" / kind
    return folder / f"{name.replace('/', '--')}-{what}-{sha256[:12]}"


def _copy(folder: Path, out: Path, without: tuple[str, ...], renamed: str = "") -> None:
    """Copy the files of a folder. renamed: prefix for the names of weight files."""
    for file in folder.iterdir():
        if file.is_file() and file.name not in without and not file.name.startswith("."):
            front = renamed if file.suffix == ".safetensors" else ""
            shutil.copy2(file, out / (front + file.name))


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
