"""Let SGLang load a drafter without a confidence head in the mode that schedules.

Upstream: sglang/srt/models/dspark.py builds the head in the mode `compact` without reading
`enable_confidence_head`, and sglang/srt/speculative/dspark_components/dspark_planner.py raises
where there is none. Our step estimates confidence from the draft's distribution instead
(drafter/draft_confidence.py). Nothing changes for a drafter with a head, or in SGLang's own modes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import mode


def head_of(original: Callable[[Any], Any], config: Any) -> Any:
    """AROUND hook of `build_confidence_head`: return None for a checkpoint that has no head."""
    has_head = getattr(config, "enable_confidence_head", True) is not False
    return None if mode.estimates_confidence(has_head=has_head) else original(config)


def plan_without_head(
    original: Callable[..., None], planner: Any, *, draft_model: Any, **options: Any
) -> None:
    """AROUND hook of the planner's `__init__`: accept a draft model without a head.

    Upstream's constructor only asks whether there is one. `carries_confidence` then says that there
    is none, so upstream relays nothing.
    """
    headless = draft_model.confidence_head is None and mode.estimates_confidence(has_head=False)
    if not headless:
        original(planner, draft_model=draft_model, **options)
        return
    original(planner, draft_model=SimpleNamespace(confidence_head=SimpleNamespace()), **options)
    planner.draft_model, planner._confidence_head = draft_model, None


SEAMS = (
    Seam(
        name="headless-model",
        target="sglang.srt.models.dspark.build_confidence_head",
        kind="around",
        hook=head_of,
        signature="(config)",
        why="upstream builds the head of a checkpoint that has none, and then misses its weights",
    ),
    Seam(
        name="headless-planner",
        target="sglang.srt.speculative.dspark_components.dspark_planner.DSparkVerifyPlanner."
        "__init__",
        kind="around",
        hook=plan_without_head,
        signature=(
            "(self, *, draft_model, gamma, model_runner, device, tp_rank, verify_num_draft_tokens, "
            "tp_sync)"
        ),
        why="upstream raises for a drafter without a head in every mode that schedules",
    ),
)
