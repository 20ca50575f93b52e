"""Quantise the expert weights of a drafter's checkpoint, and restore them.

A quantised weight W [..., N, K] is stored as up to three tensors (quantisation/layout.py):

    W                   codes, in the format's own dtype, two to a byte for 4-bit codes
    W_scale             a scale for each block
    W_global_scale      a scale for each matrix (NVFP4)

The routed and the shared experts are quantised, `layers.N.mlp.experts.{gate,up,down}_proj` and
`layers.N.mlp.shared_experts.{gate,up,down}_proj.weight`; router, attention, norms and heads are
not. `expert_format` in config.json names the format; without it the weights are unquantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation import bf16, fp8, mxfp4, nvfp4
from sglang_dspark.quantisation.formats import dequantise, expert_format, quantise
from sglang_dspark.quantisation.layout import Quantised, check_columns

CONFIG_KEY = "expert_format"
UNQUANTISED = bf16.NAME
SCALE, GLOBAL_SCALE = "_scale", "_global_scale"
_EXPERT = re.compile(r"layers\.\d+\.mlp\.(experts\.\w+_proj|shared_experts\.\w+_proj\.weight)")
_PACKED = (mxfp4.NAME, nvfp4.NAME)  # two codes to a byte
_TYPES = {  # of codes and scales
    fp8.NAME: (fp8.CODES, torch.float32),
    mxfp4.NAME: (torch.uint8, torch.uint8),
    nvfp4.NAME: (torch.uint8, fp8.CODES),
}


def expert_names(names: Iterable[str]) -> list[str]:
    """Select the names of expert weights among those of a checkpoint's tensors."""
    return [name for name in names if _EXPERT.fullmatch(name)]


def quantise_tensors(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Quantise a checkpoint's expert weights to the format `name`; other tensors are unchanged.

    Raises DSparkError for an unknown format, a checkpoint without experts, NaN or infinite weights,
    and widths that are no multiple of a 4-bit format's block; the last two name the weight.
    """
    expert_format(name)
    chosen = expert_names(tensors)
    if not chosen:
        raise DSparkError("the checkpoint has no expert weights to quantise (layers.N.mlp.experts)")
    out = {key: tensor for key, tensor in tensors.items() if key not in chosen}
    for key in chosen:
        try:
            out |= dict(_parts(key, quantise(tensors[key].float(), name)))
        except DSparkError as error:
            raise DSparkError(f"{key}: {error}") from None
    return out


def _parts(key: str, quantised: Quantised) -> Iterator[tuple[str, Tensor]]:
    yield key, quantised.payload
    if quantised.scales is not None:
        yield key + SCALE, quantised.scales
    if quantised.global_scale is not None:
        yield key + GLOBAL_SCALE, quantised.global_scale


def restore_tensors(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Undo `quantise_tensors`: expert weights in float32 without scales; others are unchanged.

    Raises DSparkError if codes or scales are missing, or do not fit each other.
    """
    expert_format(name)
    if name == UNQUANTISED:
        return dict(tensors)
    chosen = expert_names(tensors)
    scales = {key + suffix for key in chosen for suffix in (SCALE, GLOBAL_SCALE)}
    out = {k: t for k, t in tensors.items() if k not in chosen and k not in scales}
    for key in chosen:
        out[key] = restore(tensors[key], tensors.get(key + SCALE), tensors.get(key + GLOBAL_SCALE),
                           name, key)  # fmt: skip
    return out


def restore(
    payload: Tensor, scales: Tensor | None, overall: Tensor | None, name: str, key: str
) -> Tensor:
    """Restore a weight [..., N, K] float32 from its parts.

    Raises DSparkError, with the weight's name `key`, if they do not fit each other."""
    *rows, columns = payload.shape
    shape = (*rows, columns * 2 if name in _PACKED else columns)
    try:
        return dequantise(Quantised(name, shape, payload, scales, overall))
    except DSparkError as error:
        raise DSparkError(f"{key}: {error}") from None


def quantised_shapes(
    key: str, shape: tuple[int, ...], name: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors that store a weight `key` [..., N, K] in the format."""
    *rows, columns = shape
    yield key, (*rows, columns // 2 if name in _PACKED else columns)
    if name == fp8.NAME:
        yield key + SCALE, fp8.scale_shape(shape)
    elif name in _PACKED:
        block = mxfp4.BLOCK if name == mxfp4.NAME else nvfp4.BLOCK
        yield key + SCALE, (*rows, columns // block)
    if name == nvfp4.NAME:
        yield key + GLOBAL_SCALE, shape[:-2]


def empty_codes(shape: tuple[int, ...], name: str) -> Quantised:
    """Allocate codes and scales of weights [..., N, K] in a quantised format, all zero.

    Raises DSparkError if K is no multiple of the block of a 4-bit format.
    """
    codes, scales = _TYPES[name]
    if name in _PACKED:
        check_columns(shape[-1], mxfp4.BLOCK if name == mxfp4.NAME else nvfp4.BLOCK, name)
    found = dict(quantised_shapes("", shape, name))
    return Quantised(
        name,
        shape,
        torch.zeros(found[""], dtype=codes),
        torch.zeros(found[SCALE], dtype=scales),
        torch.zeros(found[GLOBAL_SCALE], dtype=torch.float32) if GLOBAL_SCALE in found else None,
    )


def relative_error(weight: Tensor, restored: Tensor) -> float:
    """Compute |restored - weight| / |weight|, Frobenius norms; 0 for weights that are all zero."""
    size = float(weight.double().norm())
    difference = float((restored.double() - weight.double()).norm())
    return difference / size if size else 0.0


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Sum the bytes of the tensors in a file, without its header."""
    return sum(t.numel() * torch.empty((), dtype=t.dtype).element_size() for t in tensors.values())
