"""Choose how a step's sampled requests are accepted, from settings on the host.

SGLang's DSPARK ignores penalties and seeds. Its distribution of verified rows ignores
min-p and normalises between top-k and top-p (`build_speculative_verify_target_probs`,
sglang/srt/speculative/dflash_utils.py). Where rows have different cuts, or top-p, it
requires FlashInfer and otherwise raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from sglang_dspark.schedule.budget import Counts
from sglang_dspark.serving import upstream
from sglang_dspark.serving.config import load_config
from sglang_dspark.step.penalties import OutputCounts, StepPenalties, penalties_of
from sglang_dspark.step.seeds import Seeds, seeds_of

MOST_LISTED = 2048  # the largest top-k whose lists are complete (kernels/accept_listed.py)


@dataclass(frozen=True)
class Cuts:
    """Cuts of a step's sampled requests. top_k, top_p, min_p: whether any request has one. most:
    the largest top-k; None where a request has none."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    most: int | None = None

    @property
    def listed(self) -> int | None:
        """Return `most` if every request's kept tokens can be listed, else None."""
        return self.most if self.most is not None and self.most <= MOST_LISTED else None

    @property
    def kinds(self) -> int:
        """Return the number of cuts in use, 0 to 3."""
        return self.top_k + self.top_p + self.min_p


@dataclass(frozen=True)
class Rules:
    """seeds: of the requests that have one. penalties: of those that have any. cuts: of the sampled
    requests; None where all are greedy. own_rule: whether the step needs our accept rule.
    """

    seeds: Seeds | None = None
    penalties: StepPenalties | None = None
    cuts: Cuts | None = None
    own_rule: bool = False


def rules_of(worker: Any, counts: OutputCounts, batch: Any) -> Rules:
    """Return the rules of a decode step, without reading from the device."""
    info = batch.sampling_info
    if info is None:
        return Rules()
    penalties = penalties_of(counts, batch, worker.model_runner.req_to_token_pool)
    if info.is_all_greedy:
        return Rules(penalties=penalties)
    seeds = seeds_of(batch)
    cuts = cuts_of(req.sampling_params for req in batch.reqs)
    return Rules(seeds, penalties, cuts, own_rule(cuts, seeds))


def cuts_of(settings: Iterable[Any]) -> Cuts:
    """Return the cuts of the sampled requests among SGLang's `SamplingParams`.

    SGLang's own flags count greedy requests too, whose top-k is 1.
    """
    sampled = [each for each in settings if each.top_k > 1]
    most = max((each.top_k for each in sampled), default=upstream.TOP_K_ALL)
    return Cuts(
        top_k=any(each.top_k < upstream.TOP_K_ALL for each in sampled),
        top_p=any(each.top_p != 1.0 for each in sampled),
        min_p=any(each.min_p > 0 for each in sampled),
        most=None if most >= upstream.TOP_K_ALL else most,
    )


def own_rule(cuts: Cuts, seeds: Seeds | None) -> bool:
    """Return whether the step needs our accept rule: SGLang's would have another distribution,
    raise, or differ from the configured rule."""
    if seeds is not None or cuts.min_p or cuts.kinds > 1:
        return True
    if cuts.kinds == 0:
        return names_block_rule()
    return not has_flashinfer()


@cache
def has_flashinfer() -> bool:
    """Return whether SGLang's cuts of verified rows can run."""
    return find_spec("flashinfer") is not None


@cache
def names_block_rule() -> bool:
    """Return whether the configuration file itself sets `verify.rule: block`."""
    loaded = load_config()
    return loaded.config.verify.rule == "block" and loaded.origins["verify.rule"] != "default"


def limits_of(reqs: list[Any], gamma: int) -> Counts | None:
    """Return the most drafts of each request (upstream's `Req`), [R] int64; None: gamma for all.

    A request with a custom logit processor that reads the answer gets no drafts: in every row of a
    window it sees the output up to the anchor (patches/step/unsupported.py). With overlap that may
    lack the last token, as in plain decoding.
    """
    if not any(req.custom_logit_processor for req in reqs):
        return None
    return np.array([0 if reads_answer(req) else gamma for req in reqs], np.int64)


def reads_answer(req: Any) -> bool:
    """Return whether a request has a custom logit processor that may read more than its row.

    SGLang's own `DisallowedTokensLogitsProcessor` reads only the row.
    """
    if not req.custom_logit_processor:
        return False
    found = upstream.CustomLogitProcessor.from_str(req.custom_logit_processor)
    return type(found) is not upstream.DisallowedTokensLogitsProcessor
