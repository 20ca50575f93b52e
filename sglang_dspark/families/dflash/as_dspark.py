"""Convert a DFlash drafter to DSpark, so that SGLang's DSPARK worker serves and schedules it.

DFlash is DSpark's backbone without a sequential head (paper, 3.1). SGLang's DSPARK requires such a
head: here it has rank 1 and no effect, or only excludes tokens outside the draft vocabulary. There
is no confidence head; a server estimates confidence from the draft's distribution
(`drafter/draft_confidence.py`). SGLang's own DFLASH drafts the likeliest token at any temperature
and verifies every draft.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_dspark.drafter.heads import restrict_vocabulary
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.families.dflash.model import DFlashDrafter


def as_dspark(drafter: DFlashDrafter) -> DSparkDrafter:
    """Return the DSpark drafter, not attached to a target, whose drafts are those of `drafter`.

    In both, row 0 of the window, the anchor's, drafts nothing: `sample_from_anchor` is false.
    """
    config = replace(
        drafter.config.shape,
        sample_from_anchor=False,
        confidence_head=False,
        confidence_head_with_markov=False,
        markov_rank=1,
        markov_head_type="vanilla",
    )
    made = DSparkDrafter(config)
    made.backbone.load_state_dict(drafter.backbone.state_dict())
    with torch.no_grad():
        made.markov_head.markov_w1.weight.zero_()
        made.markov_head.markov_w2.weight.zero_()
    if drafter.draft_ids is not None:
        restrict_vocabulary(made.markov_head, drafter.draft_ids)
    return made
