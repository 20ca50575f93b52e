"""Refuse a drafter that does not fit the target, before any process is spawned.

Upstream: sglang/srt/arg_groups/speculative_hook.py, `handle_speculative_decoding`, the
step of argument resolution that first reads the drafter. The comparison itself is in
sglang_dspark/serving/checkpoint.py. Upstream checks drafters bundled in the target's checkpoint or
in an object store. For a Hub id the configuration is fetched here, as upstream does a
moment later; its weights are checked only if they are already in the local cache.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.backends.cuda import features
from sglang_dspark.drafter.config import (
    MOE_ARCHITECTURE,
    DrafterConfig,
    architecture_of,
    read_config,
)
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.sharding import Split, check_split
from sglang_dspark.extras import SUPPORTED_SGLANG
from sglang_dspark.families.chain.served import ALGORITHMS, EAGLE3, is_chain
from sglang_dspark.families.eagle3.checkpoint import check_eagle3
from sglang_dspark.families.mtp.checkpoint import check_mtp
from sglang_dspark.serving import mode, startup, upstream
from sglang_dspark.serving.checkpoint import require_readable_layers, validate_drafter
from sglang_dspark.serving.config import current_config
from sglang_dspark.serving.target_features import returns_features

logger = logging.getLogger(__name__)


def check_drafter(server_args: Any) -> None:
    """Set a drafter's mode and dtype (BEFORE hook of `handle_speculative_decoding`)."""
    args = upstream.resolving_view(server_args)
    if str(args.speculative_algorithm).upper() != "DSPARK":
        return
    try:
        _check(server_args, args)
        _name_dtype(server_args, args)
    except DSparkError as error:
        startup.stop(str(error))


def _check(server_args: Any, args: Any) -> None:
    drafter = args.speculative_draft_model_path
    if drafter is None:
        _require_bundled(server_args, args)
        return
    path = drafter_folder(args)
    if path is None:
        return
    fetched = not Path(drafter).exists()
    weights = not fetched or any(path.glob("*.safetensors"))
    raw = read_config(path)
    if is_chain(raw):
        _check_chain(server_args, path, args, raw["architectures"][0], weights=weights)
        return
    _check_moe(path, args)
    _choose_mode(server_args, path, args)
    _require_positions(server_args, path)
    _warn_of_overrides(path, args)
    target = _target(server_args, args)
    _require_features(path, target)
    validate_drafter(
        path,
        target,
        block_size=args.speculative_dspark_block_size,
        draft_tokens=args.speculative_num_draft_tokens,
        needs_confidence=_reads_confidence(path),
        weights=weights,
    )


def _name_dtype(server_args: Any, args: Any) -> None:
    """Name the target's dtype where the server's is `auto`, so that the drafter gets it too.

    For `auto` SGLang reads the file of each model, and uses float16 for a float32 model. The
    verify pass then ends in a product of two types. On a CPU the platform has named float32.
    """
    if args.dtype == "auto" and str(args.device) != "cpu":
        dtype = str(upstream.model_config_of(server_args).dtype).removeprefix("torch.")
        upstream.declare_resolution(server_args, "sglang-dspark", dtype=dtype)


def _check_chain(
    server_args: Any, path: Path, args: Any, architecture: str, *, weights: bool
) -> None:
    """Check that an Eagle3 or MTP drafter has one rank and our step, and fits the target."""
    alternative = (
        f"--speculative-algorithm {ALGORITHMS[architecture]} serves it, and verifies every draft"
    )
    if str(args.device) != "cpu":
        why = _unscheduled(server_args, args)
        if why is not None:
            raise DSparkError(
                f"drafter {path} ({architecture}) runs once a token, which DSPARK does only where "
                f"it schedules: {why}; {alternative}"
            )
    if int(args.tp_size) > 1:
        raise DSparkError(
            f"drafter {path} ({architecture}) runs once a token, which DSPARK does on one rank "
            f"alone; {alternative}"
        )
    if (args.speculative_draft_load_format or args.load_format) == "dummy":
        raise DSparkError(
            f"drafter {path} ({architecture}) has the shape of its file's weights, so DSPARK makes "
            "up none; set --speculative-draft-load-format auto"
        )
    _choose_mode(server_args, path, args)
    _require_positions(server_args, path)
    target = _target(server_args, args)
    if architecture == EAGLE3:
        layers = check_eagle3(path, target, weights=weights).target_layer_ids
        _require_layers(path, layers, args, alternative)
        _require_features(path, target)
        require_readable_layers(path, layers, target)
    else:
        check_mtp(path, target, weights=weights)


def _require_layers(path: Path, layers: tuple[int, ...], args: Any, alternative: str) -> None:
    """Require layers that SGLang returns, and that its class projects on a GPU."""
    if list(layers) != sorted(set(layers)) or layers[0] < 0:
        raise DSparkError(
            f"drafter {path} reads the target's layers {list(layers)}, which SGLang returns "
            f"once each and in ascending order; {alternative}"
        )
    if len(layers) == 1 and str(args.device) != "cpu":
        raise DSparkError(
            f"drafter {path} reads one layer of the target, whose features SGLang's class does "
            f"not project on a GPU; {alternative}"
        )


def _require_features(path: Path, target: Target) -> None:
    """Require features of layers; patches/step/targets.py raises only when weights are loaded."""
    if not returns_features(target.architecture):
        raise DSparkError(
            f"drafter {path} reads features of the target's layers, and {target.architecture} of "
            f"SGLang {SUPPORTED_SGLANG} has neither a hook for them nor model.layers with a "
            "logits_processor and an lm_head; remove --speculative-algorithm"
        )


def _require_positions(server_args: Any, path: Path) -> None:
    """Require as many positions of the drafter as of the server; SGLang raises later."""
    most = read_config(path).get("max_position_embeddings")
    served = upstream.model_config_of(server_args).context_len
    allowed = upstream.envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get()
    if isinstance(most, int) and most < served and not allowed:
        raise DSparkError(
            f"drafter {path} knows {most} positions (max_position_embeddings), the server has "
            f"{served}; set --context-length {most}"
        )


def _warn_of_overrides(path: Path, args: Any) -> None:
    """Log the drafter's settings that --json-model-override-args changes: SGLang applies it to both
    models (sgl-project/sglang#35841), and its rotation was trained as its file says."""
    own = read_config(path)
    changed = json.loads(args.json_model_override_args or "{}")
    names = sorted(name for name, value in changed.items() if own.get(name) != value)
    if names:
        logger.warning(
            "sglang-dspark: --json-model-override-args changes the drafter's %s too; drafts may be "
            "accepted less often",
            ", ".join(names),
        )


def drafter_folder(args: Any) -> Path | None:
    """Return the folder of the drafter's config.json, fetched from the Hub if it is a Hub id.

    None: the drafter is bundled in the target's checkpoint, or is in an object store. Raises
    DSparkError where there is no such drafter.
    """
    drafter = args.speculative_draft_model_path
    if drafter is None or drafter == args.model_path or "://" in drafter:
        return None
    path = Path(drafter)
    return path if path.exists() else _fetch_config(drafter, args)


def _fetch_config(drafter: str, args: Any) -> Path:
    """Fetch config.json of the Hub id `drafter`; return its folder in the local cache."""
    if drafter.count("/") != 1 or drafter[0] in "/.~" or drafter[-1] == "/":
        raise DSparkError(f"drafter {drafter} does not exist; check --speculative-draft-model-path")
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(
            drafter,
            "config.json",
            revision=args.speculative_draft_model_revision,
            cache_dir=args.download_dir,
        )
    except (OSError, ValueError) as error:  # the Hub's own errors are OSErrors
        raise DSparkError(
            f"drafter {drafter} is no directory here and its config.json cannot be fetched from "
            f"the Hub ({type(error).__name__}); check --speculative-draft-model-path"
        ) from error
    return Path(file).parent


def _require_bundled(server_args: Any, args: Any) -> None:
    """Require a drafter in a local target, without a drafter path."""
    folder = Path(args.model_path)
    if not folder.is_dir() or (folder / "dspark" / "config.json").is_file():
        return
    if not upstream.checkpoint_bundles_dspark_draft(
        upstream.model_config_of(server_args).hf_config
    ):
        raise DSparkError(
            f"DSPARK needs a drafter and the target {folder} carries none; set "
            "--speculative-draft-model-path"
        )


def _target(server_args: Any, args: Any) -> Target:
    model = upstream.model_config_of(server_args)
    config = model.hf_text_config
    return Target(
        path=str(args.model_path),
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        num_layers=int(config.num_hidden_layers),
        architecture=(model.hf_config.architectures or [""])[0],
    )


def _check_moe(path: Path, args: Any) -> None:
    """Require that a drafter with experts fits the ranks, the device and the cache. With data-
    parallel attention its ranks are fewer than --tp-size, and it is checked when it is built."""
    if architecture_of(read_config(path), path) != MOE_ARCHITECTURE:
        return
    drafter = DrafterConfig.from_dir(path)
    if int(args.attn_dp_size) == 1:
        split = Split.of_rank(0, int(args.tp_size), int(args.ep_size))
        check_split(drafter, split, f"drafter {path}")
    if str(args.device).split(":")[0] not in ("cpu", "cuda"):
        raise DSparkError(
            f"drafter {path} has experts, which are served on CPUs and on NVIDIA GPUs, not on "
            f"{args.device}; use a dense drafter"
        )
    if drafter.window is not None and args.enable_unified_memory:
        raise DSparkError(
            f"drafter {path} has a window, which is not read from a unified memory pool; remove "
            "--enable-unified-memory"
        )


def _choose_mode(server_args: Any, path: Path, args: Any) -> None:
    """Set our choice of the drafts to verify before SGLang loads the heads."""
    device = str(args.device)
    if device == "cpu":
        mode.host_verifies_all()  # raises for modes that only SGLang's step has
        target = upstream.model_config_of(server_args)
        if upstream.mambaish_config(target) and not _is_qwen3_5(target):
            raise DSparkError(
                "DSPARK cannot serve this on a CPU: the target keeps a recurrent state other than "
                "that of Qwen3.5's gated delta rule layers; remove --speculative-algorithm"
            )
        if args.enable_lora or args.lora_paths:
            raise DSparkError(
                "SGLang's LoRA layers need memory pinned for a GPU, so it serves no adapter on a "
                "CPU; merge the adapter into the checkpoint and remove --enable-lora, --lora-paths"
            )
        mode.prepare(confidence_head=_has_head(path))
    elif device.startswith("cuda") and mode.choice().ours:
        why = obstacle(server_args, args)
        if why is None:
            mode.prepare(confidence_head=True)
        else:
            logger.warning("sglang-dspark: every draft is verified: %s", why)


def _unscheduled(server_args: Any, args: Any) -> str | None:
    """Return the reason why a chain drafter's steps on this device would not be ours, or None."""
    device = str(args.device).split(":")[0]
    if device != "cuda":
        return f"the device is {device}"
    if not mode.choice().ours:
        return mode.choice().reason
    if args.enable_unified_memory:
        return "its context is not kept in a unified memory pool; remove --enable-unified-memory"
    if args.speculative_draft_window_size is not None:
        return "its attention has no window; remove --speculative-draft-window-size"
    if args.speculative_draft_attention_backend == "trtllm_mha":
        return "trtllm_mha was not tried with it; set another --speculative-draft-attention-backend"
    return obstacle(server_args, args)


def obstacle(server_args: Any, args: Any) -> str | None:
    """Return the reason why a GPU server verifies every draft; None: it is scheduled.

    server_args: SGLang's record. args: a view of it.
    """
    return features.obstacle(_start(server_args, args))


def _has_head(path: Path) -> bool:
    return bool(read_config(path).get("enable_confidence_head"))


def _start(server_args: Any, args: Any) -> features.Start:
    target = upstream.model_config_of(server_args)
    chosen = current_config().schedule
    return features.Start(
        args,
        recurrent=upstream.mambaish_config(target) is not None,
        delta_rule=_has_delta_rule(target),
        variables=dict(os.environ),
        by_lengths=chosen.threshold is not None or chosen.algorithm == "early-stop",
        generation=torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0,
        own_attention=upstream.is_minimax_sparse(target.hf_config)
        or hasattr(target.hf_text_config, "wrap_attention_backend"),
    )


def _has_delta_rule(target: Any) -> bool:
    """Return whether a target's states are of gated delta rule layers that SGLang's backend runs.

    Jet's layers write their states themselves, before drafts are accepted.
    """
    config = upstream.hybrid_gdn_config(target)
    return config is not None and not type(config).__name__.startswith("Jet")


def _is_qwen3_5(target: Any) -> bool:
    """Return whether a target is of the family whose layers all have an operator on a CPU.

    The norm of Qwen3-Next's is a Triton kernel.
    """
    model_type = str(getattr(upstream.hybrid_gdn_config(target), "model_type", ""))
    return _has_delta_rule(target) and model_type.startswith("qwen3_5")


def _reads_confidence(path: Path) -> bool:
    """Return whether upstream will build the confidence head: in every mode but `static`.

    Not for a drafter without a head that we still schedule (patches/step/drafters.py).
    """
    if mode.estimates_confidence(has_head=_has_head(path)):
        return False
    try:
        return upstream.read_ragged_verify_mode() is not upstream.RaggedVerifyMode.STATIC
    except ValueError as error:
        raise DSparkError(str(error)) from error
