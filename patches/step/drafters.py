"""Serve drafters without a confidence head or with experts, which SGLang does not; refuse others.

Upstream: sglang/srt/models/dspark.py builds the head in the mode `compact` without reading
`enable_confidence_head`, and sglang/srt/speculative/dspark_components/dspark_planner.py raises
where there is none. Our step estimates confidence from the draft's distribution instead
(drafter/draft_confidence.py). Nothing changes for a drafter with a head, or in SGLang's own modes.

sglang/srt/models/registry.py, `_ModelRegistry`, is a dict of classes; `is_arch_supported` is
called before it returns a class. SGLANG_EXTERNAL_MODEL_PACKAGE fills the same dict, but
there is one such package, and the user may need it.

A drafter that does not fit the target is refused before any process is spawned.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_dspark.backends import drafter_check
from sglang_dspark.drafter.config import MOE_ARCHITECTURE
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import mode

SEAMS = Seams()


SEAMS.before(
    "drafter-check",
    "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
    why="upstream finds a drafter that does not fit late, with a traceback, or not at all",
)(drafter_check.check_drafter)


@SEAMS.around(
    "headless-model",
    "sglang.srt.models.dspark.build_confidence_head",
    why="upstream builds the head of a checkpoint that has none, and then misses its weights",
)
def head_of(original: Callable[[Any], Any], config: Any) -> Any:
    """Return None for a checkpoint without a head (AROUND hook of `build_confidence_head`)."""
    has_head = getattr(config, "enable_confidence_head", True) is not False
    return None if mode.estimates_confidence(has_head=has_head) else original(config)


@SEAMS.around(
    "headless-planner",
    "sglang.srt.speculative.dspark_components.dspark_planner.DSparkVerifyPlanner.__init__",
    signature="(self, *, draft_model, gamma, model_runner, device, tp_rank, "
    "verify_num_draft_tokens, tp_sync)",
    why="upstream raises for a drafter without a head in every mode that schedules",
)
def plan_without_head(
    original: Callable[..., None], planner: Any, *, draft_model: Any, **options: Any
) -> None:
    """Accept a draft model without a head (AROUND hook of the planner's `__init__`).

    Upstream's constructor only checks that a head exists. `carries_confidence` then returns
    False, so upstream relays nothing.
    """
    headless = draft_model.confidence_head is None and mode.estimates_confidence(has_head=False)
    if not headless:
        original(planner, draft_model=draft_model, **options)
        return
    original(planner, draft_model=SimpleNamespace(confidence_head=SimpleNamespace()), **options)
    planner.draft_model, planner._confidence_head = draft_model, None


@SEAMS.before(
    "moe-drafter",
    "sglang.srt.models.registry._ModelRegistry.is_arch_supported",
    signature="(self, architecture)",
    why="SGLang has drafters with experts inside DeepSeek-V4 alone",
)
def add_moe_drafter(registry: Any, architecture: str) -> None:
    """Import our class when SGLang looks for it (BEFORE hook of `is_arch_supported`)."""
    if architecture == MOE_ARCHITECTURE and architecture not in registry.models:
        from sglang_dspark.backends.moe.moe_model import DSparkMoEModel

        registry.models[architecture] = DSparkMoEModel
