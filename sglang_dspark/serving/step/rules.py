"""What a step's requests ask for that SGLang's DSPARK (0.5.23) leaves out, known on the host.

Upstream's penalties have no effect, it never reads a seed, and its law of verified rows leaves out
min-p and normalises between top-k and top-p (`build_speculative_verify_target_probs`,
sglang/srt/speculative/dflash_utils.py). A step that asks for none of this has `Rules()`, and costs
what it did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dspark.serving.step.penalties import OutputCounts, StepPenalties, penalties_of
from sglang_dspark.serving.step.seeds import Seeds, seeds_of


@dataclass(frozen=True)
class Rules:
    """seeds: of the requests that have one. penalties: of those that have any. own_law: whether
    the accept rule is ours, as upstream's would not be lossless.
    """

    seeds: Seeds | None = None
    penalties: StepPenalties | None = None
    own_law: bool = False


def rules_of(worker: Any, counts: OutputCounts, batch: Any) -> Rules:
    """The rules of a decode step; nothing of the device is read."""
    info = batch.sampling_info
    if info is None:
        return Rules()
    penalties = penalties_of(counts, batch, worker.model_runner.req_to_token_pool)
    if info.is_all_greedy:
        return Rules(penalties=penalties)
    seeds = seeds_of(batch)
    both = info.need_top_k_sampling and info.need_top_p_sampling
    own_law = seeds is not None or bool(info.need_min_p_sampling or both)
    return Rules(seeds, penalties, own_law)
