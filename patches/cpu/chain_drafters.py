"""Serve an Eagle3 drafter by DSPARK on a CPU, so that its drafts are scheduled.

Upstream: sglang/srt/speculative/dspark_components/dspark_config.py reads a block, a mask token and
a Markov head from a drafter's config.json; an Eagle3 drafter has none. The class that
sglang/srt/models/registry.py has for its architecture is run by EAGLE3's worker; in a server with
DSPARK ours takes its place (backends/cpu/chain_model.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.families.eagle3.model import ARCHITECTURE
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

SEAMS = Seams(device="cpu")
DEFAULT_GAMMA = 5  # drafts a step where config.json names no number


@SEAMS.around(
    "cpu-chain-config",
    "sglang.srt.speculative.dspark_components.dspark_config.parse_dspark_draft_config",
    why="upstream's DSPARK refuses a drafter without a Markov head",
)
def chain_config(original: Callable[..., Any], *, draft_hf_config: Any) -> Any:
    """AROUND hook of `parse_dspark_draft_config`: describe an Eagle3 drafter as a block.

    The mask token is never embedded, and there is no Markov head.
    """
    raw = draft_hf_config if isinstance(draft_hf_config, dict) else draft_hf_config.to_dict()
    if raw.get("architectures") != [ARCHITECTURE]:
        return original(draft_hf_config=draft_hf_config)
    return upstream.DSparkDraftConfig(
        num_hidden_layers=1,
        num_target_layers=None,
        gamma=raw.get("gamma") or DEFAULT_GAMMA,
        target_layer_ids=list(raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        mask_token="",
        mask_token_id=0,
        markov_rank=1,
        markov_head_type="vanilla",
    )


@SEAMS.before(
    "cpu-chain-model",
    "sglang.srt.models.registry._ModelRegistry.is_arch_supported",
    signature="(self, architecture)",
    why="upstream's class of the architecture works with EAGLE3's worker alone",
)
def use_chain_model(registry: Any, architecture: str) -> None:
    """BEFORE hook of `is_arch_supported`: put our class in the place of upstream's for DSPARK."""
    if architecture == ARCHITECTURE and upstream.get_spec().speculative_algorithm == "DSPARK":
        from sglang_dspark.backends.cpu.chain_model import ChainModel

        registry.models[architecture] = ChainModel
