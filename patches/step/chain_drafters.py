"""Serve a chain drafter (Eagle3, MTP) by DSPARK, so that its drafts are scheduled.

Upstream: sglang/srt/speculative/dspark_components/dspark_config.py reads a block, a mask token and
a Markov head from a drafter's config.json; a chain drafter has none. In a server with DSPARK our
class (backends/cpu/chain_draft.py, backends/cuda/chain_model.py) replaces that of its architecture
in sglang/srt/models/registry.py. A target whose layers are not captured returns its last hidden
state, which MTP reads.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from sglang_dspark.families.chain.served import EAGLE3, MTP, chain_gamma, is_chain
from sglang_dspark.families.eagle3.model import named_layers, usual_layers
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream
from sglang_dspark.serving.startup import active_device

SEAMS = Seams()


@SEAMS.around(
    "chain-config",
    "sglang.srt.speculative.dspark_components.dspark_config.parse_dspark_draft_config",
    why="upstream's DSPARK refuses a drafter without a Markov head",
)
def chain_config(original: Callable[..., Any], *, draft_hf_config: Any) -> Any:
    """Describe a chain drafter as a block (AROUND hook of `parse_dspark_draft_config`).

    The mask token is never embedded, and there is no Markov head.
    """
    raw = draft_hf_config if isinstance(draft_hf_config, dict) else draft_hf_config.to_dict()
    if not is_chain(raw):
        return original(draft_hf_config=draft_hf_config)
    layers = named_layers(raw)
    return upstream.DSparkDraftConfig(
        num_hidden_layers=1,
        num_target_layers=None,
        gamma=chain_gamma(raw),
        target_layer_ids=None if layers is None else list(layers),
        mask_token="",
        mask_token_id=0,
        markov_rank=1,
        markov_head_type="vanilla",
    )


@SEAMS.after(
    "chain-features",
    "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state."
    "resolve_spec_aux_hidden_state_config",
    signature="(*, server_args, model_config, spec_algorithm, is_draft_worker)",
    why="upstream spaces layers evenly for a drafter that names none",
)
def choose_features(config: Any, *, model_config: Any, **unused: Any) -> Any:
    """Choose the target's features (AFTER hook of `resolve_spec_aux_hidden_state_config`).

    MTP reads the last hidden state, so no layer; Eagle3 the layers that EAGLE3 would capture.
    """
    if not config.is_dspark or config.draft_model_config is None:
        return config
    drafter = config.draft_model_config.hf_config
    if drafter.architectures == [MTP]:
        config.dflash_use_aux_hidden_state, config.dflash_target_layer_ids = False, None
    elif drafter.architectures == [EAGLE3] and named_layers(drafter.to_dict()) is None:
        layers = int(model_config.hf_text_config.num_hidden_layers)
        config.dflash_target_layer_ids = list(usual_layers(layers))
    return config


@SEAMS.before(
    "chain-model",
    "sglang.srt.models.registry._ModelRegistry.is_arch_supported",
    signature="(self, architecture)",
    why="upstream's class of the architecture works with another worker alone",
)
def use_chain_model(registry: Any, architecture: str) -> None:
    """Replace upstream's class by ours for DSPARK (BEFORE hook of `is_arch_supported`)."""
    if architecture not in (EAGLE3, MTP) or upstream.get_spec().speculative_algorithm != "DSPARK":
        return
    backend = "cpu.chain_draft" if active_device() == "cpu" else "cuda.chain_model"
    registry.models[architecture] = import_module(f"sglang_dspark.backends.{backend}").ChainModel
