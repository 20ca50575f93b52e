"""Check a drafter against its target before a server loads any weight.

drafter/checkpoint.py checks, for every command alike, which drafters can be computed at all. Here
are SGLang's further requirements: the layout that the generic dense draft classes of
sglang/srt/models/dspark.py read (their loader leaves missing backbone weights uninitialised without
a message), layers whose features the target returns, and the flags of the start.
Imports no sglang; backends/drafter_check.py calls it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.drafter import speculators
from sglang_dspark.drafter.checkpoint import (
    DrafterFiles,
    check_drafter,
    fill_parameters,
    own_shapes,
    save_drafter,
    stored_name,
)
from sglang_dspark.drafter.config import (
    DENSE_ARCHITECTURES,
    DFLASH_ARCHITECTURE,
    GEMMA4_ARCHITECTURE,
    OTHER_ARCHITECTURES,
    DrafterConfig,
    architecture_of,
    read_config,
)
from sglang_dspark.drafter.families import has_rope_by_layer_type
from sglang_dspark.drafter.fields import raw_config
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.drafter.reduced_vocabulary import HEAD
from sglang_dspark.drafter.target_fit import Target, require_depth, require_sizes
from sglang_dspark.drafter.weight_files import (
    FLOATS,
    Stored,
    load_tensors,
    require_shapes,
    stored_tensors,
    wrapper_prefix,
)
from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import SUPPORTED_SGLANG

# Targets that return a layer's output as the next layer's input (`layers_to_capture` in their
# forward): no input follows the last layer, and the first request would end the server.
LAST_LAYER_UNREADABLE = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
# Fields that SGLang's classes, or Transformers' config of the model type, read only at the top
# level of config.json, with other defaults than ours or none.
_TOP_LEVEL = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "markov_rank",
    "markov_head_type",
)
_TOP_LEVEL_IF_NESTED = (
    "enable_confidence_head",
    "confidence_head_with_markov",
    "max_position_embeddings",
    "rms_norm_eps",
    "sample_from_anchor",
)
_DFLASH_ALONE = ("block_size", "target_layer_ids", "num_target_layers")  # not in dspark_config
_QUANTISED_KNOWN = (  # tensors of a quantised dense drafter whose shapes are known
    "markov_head.markov_w1.weight",
    "confidence_head.proj.weight",
    "confidence_head.proj.bias",
    "hidden_norm.weight",
    "norm.weight",
)


def validate_drafter(
    path: Path,
    target: Target,
    *,
    block_size: int | None = None,
    draft_tokens: int | None = None,
    needs_confidence: bool = False,
    weights: bool = True,
) -> None:
    """Raise `DSparkError` unless the drafter in directory `path` fits `target`.

    block_size, draft_tokens: values of --speculative-dspark-block-size (gamma) and
    --speculative-num-draft-tokens (gamma + 1); without the former gamma is the drafter's own.
    needs_confidence: the requested verify mode reads the confidence head.
    weights: False checks only config.json, for a drafter whose weights are not here yet.
    Architectures of other families (OTHER_ARCHITECTURES) are only checked for whole files.
    """
    path = Path(path)
    raw = read_config(path)
    architecture = architecture_of(raw, path)
    if architecture in OTHER_ARCHITECTURES:
        if weights:
            stored_tensors(path)
        return
    if architecture in DENSE_ARCHITECTURES and raw.get("quantization_config") is not None:
        files = _quantised(path, raw, target, weights)
    else:
        files = check_drafter(path, target, weights=weights)
    require_served(files, target)
    _check_gamma(path, files.config.gamma, block_size, draft_tokens)
    if needs_confidence and not files.config.confidence_head:
        raise DSparkError(
            f"drafter {path} has no confidence head (enable_confidence_head is false), which "
            "SGLANG_RAGGED_VERIFY_MODE needs; unset it, or use a drafter that has one"
        )
    _require_layout(path, files.stored, needs_confidence=needs_confidence)


def require_served(files: DrafterFiles, target: Target) -> None:
    """Raise DSparkError if SGLang cannot draft with these files on this target, in any layout."""
    if files.config.family != "qwen3":
        raise DSparkError(
            f"drafter {files.path}: SGLang {SUPPORTED_SGLANG} has no draft model for "
            f"{GEMMA4_ARCHITECTURE}; "
            "dspark eval and dspark calibrate read it, or serve another drafter"
        )
    require_readable_layers(files.path, files.config.target_layer_ids, target)


def require_readable_layers(path: Path, layer_ids: Collection[int], target: Target) -> None:
    """Raise DSparkError where the target does not return the features of one of these layers."""
    layers = target.num_layers
    if layers is None:
        return
    if layers - 1 in layer_ids and target.architecture in LAST_LAYER_UNREADABLE:
        raise DSparkError(
            f"drafter {path} reads the output of the target's last layer ({layers - 1}), which "
            f"SGLang {SUPPORTED_SGLANG} does not hand out for {target.architecture}; "
            f"use a drafter trained on layers 0..{layers - 2}"
        )
    if max(layer_ids) >= layers:
        raise DSparkError(
            f"drafter {path} reads layer {max(layer_ids)} of the target, which has {layers}; use a "
            "drafter trained for this target"
        )


def _quantised(path: Path, raw: dict[str, Any], target: Target, weights: bool) -> DrafterFiles:
    """Check a dense drafter with `quantization_config`, which SGLang computes.

    Only the shapes of the heads' tables and norms are checked.
    """
    config = DrafterConfig.from_json(raw, path, computed=False)
    require_sizes(path, config.hidden_size, config.vocab_size, target)
    require_depth(path, raw, target)
    stored = stored_tensors(path) if weights else {}
    if weights:
        own = own_shapes(config, path)
        require_shapes(path, {n: own[n] for n in _QUANTISED_KNOWN if n in own}, stored)
    return DrafterFiles(path, raw, config, stored)


def _require_layout(path: Path, stored: Stored, *, needs_confidence: bool) -> None:
    """Raise DSparkError for a drafter that we can read and SGLang cannot, in its present layout."""
    raw = raw_config(path)
    if speculators.MARK in raw:
        raise DSparkError(
            f"drafter {path} has the layout of Speculators ({speculators.MARK} in config.json), "
            f"which SGLang does not read; {_convert(path)}"
        )
    found = next(_unread_by_sglang(raw, stored, needs_confidence), None)
    if found is not None:
        raise DSparkError(f"drafter {path}: SGLang does not read {found}; {_convert(path)}")


def _convert(path: Path) -> str:
    return f"write one that it reads: dspark models convert {path} --target TARGET --out FOLDER"


def _unread_by_sglang(
    raw: Mapping[str, Any], stored: Stored, needs_confidence: bool
) -> Iterator[str]:
    """Yield the parts of config.json and the weight names that SGLang would not find."""
    if has_rope_by_layer_type(raw):
        yield "rope_theta by layer type in config.json (it would use 10000)"
    if raw.get("draft_vocab_size") not in (None, raw.get("vocab_size")):
        yield "draft_vocab_size in config.json (it would draft over the whole vocabulary)"
    dflash, dspark = raw.get("dflash_config") or {}, raw.get("dspark_config") or {}
    for name in _TOP_LEVEL:
        if raw.get(name) is None:
            yield f"config.json without {name} at its top level"
    for name in _TOP_LEVEL_IF_NESTED:
        if (name in dflash or name in dspark) and raw.get(name) is None:
            yield f"{name} below the top level of config.json"
    for name in _DFLASH_ALONE:
        if name in dspark and name not in dflash and raw.get(name) is None:
            yield f"{name} in dspark_config"
    prefix = wrapper_prefix(stored)
    if prefix is not None:
        yield f"weights whose names are prefixed with `{prefix}`"
    if needs_confidence:  # `load_weights` of models/dspark.py compares the whole name
        for tensor in stored.values():
            if tensor.name.startswith("model.confidence_head."):
                yield f"the weight {tensor.name}"


def _check_gamma(
    path: Path, trained: int, block_size: int | None, draft_tokens: int | None
) -> None:
    """Require a draft no longer than the trained block, and both arguments for it to agree.

    SGLang reads another gamma only from the block size, and then requires draft_tokens to be
    gamma + 1 (speculative_hook.py). Raises DSparkError.
    """
    gamma = trained if block_size is None else block_size
    if not 1 <= gamma <= trained:
        raise DSparkError(
            f"drafter {path} was trained for blocks of {trained} tokens, but gamma {gamma} was "
            f"asked for; set --speculative-dspark-block-size (gamma) to 1..{trained}, or leave it "
            "out"
        )
    if draft_tokens not in (None, gamma + 1):
        raise DSparkError(
            f"drafter {path} drafts blocks of {gamma} tokens, for which "
            f"--speculative-num-draft-tokens must be {gamma + 1}, not {draft_tokens}; leave it "
            f"out, and for a shorter draft set --speculative-dspark-block-size to 1..{trained}"
        )


def convert_drafter(source: Path, out: Path, target: Target) -> None:
    """Write the drafter in `source` into `out`, in the widest of its weights' types up to float32.

    target: the model to draft for. Nothing is written for a drafter that a server would refuse;
    quantised experts are written restored. A reduced vocabulary becomes a part of the Markov
    weights (drafter/heads.py). A DFlash drafter becomes one without a sequential and a confidence
    head (families/dflash/as_dspark.py).
    Raises DSparkError for such a drafter, and when `out` cannot be written.
    """
    if DFLASH_ARCHITECTURE in (raw_config(source).get("architectures") or ()):
        _convert_dflash(source, out, target)
        return
    files = check_drafter(source, target)
    require_served(files, target)
    drafter = DSparkDrafter(_of_target(files.config, target))
    own_head = files.reduction is not None and HEAD in files.stored
    tensors = files.load(_target_head(target) if own_head else None)
    fill_parameters(drafter, tensors, stored_name)
    save_drafter(drafter, out, _common_dtype(tensors))


def _convert_dflash(source: Path, out: Path, target: Target) -> None:
    from sglang_dspark.families.dflash.as_dspark import as_dspark
    from sglang_dspark.families.dflash.checkpoint import read_dflash

    drafter = as_dspark(read_dflash(source, target))
    drafter.config = _of_target(drafter.config, target)
    require_served(DrafterFiles(source, raw_config(source), drafter.config, {}), target)
    save_drafter(drafter, out, _common_dtype(load_tensors(stored_tensors(source))))


def _of_target(config: DrafterConfig, target: Target) -> DrafterConfig:
    """Set the target's depth in the drafter's configuration, if it is known."""
    layers = config.num_target_layers if target.num_layers is None else target.num_layers
    return replace(config, num_target_layers=layers)


def _target_head(target: Target) -> Tensor:
    """Read the target's LM head [V, d], which may be its embedding.

    Raises DSparkError if its files contain neither in floats.
    """
    path = Path(target.path)
    try:
        stored = stored_tensors(path)
    except DSparkError as error:
        raise DSparkError(f"target {path}: its LM head cannot be read ({error})") from None
    shape = (target.vocab_size, target.hidden_size)
    for name in (HEAD, "embed_tokens.weight", "language_model.embed_tokens.weight"):
        if name in stored and stored[name].shape == shape and stored[name].dtype in FLOATS:
            return load_tensors({name: stored[name]})[name]
    raise DSparkError(
        f"target {path}: its files hold no LM head {list(shape)} in floats to compare the "
        f"drafter's {HEAD} with; name the target's folder with weights in float32, bfloat16 or "
        "float16"
    )


def _common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the type that holds every weight; the routers' biases are float32 in any file.

    In a narrower type a finite value could become infinite.
    """
    kinds = [t.dtype for name, t in tensors.items() if not name.endswith("e_score_correction_bias")]
    return min(reduce(torch.promote_types, kinds), torch.float32, key=lambda kind: kind.itemsize)
