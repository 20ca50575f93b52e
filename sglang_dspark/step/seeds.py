"""Draw drafts and first tokens of requests with a seed by seed and position.

SGLang reads a request's `sampling_seed` (OpenAI: `seed`) only under
--enable-deterministic-inference, and its DSPARK never reads it. verify/seeded.py defines the
draws, `accept.py` the accept rule. A batch without seeds costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.verify.sampling import truncate_all
from sglang_dspark.verify.seeded import rows_at_once, seeded_choice, waits

_FIRST = "dspark_first_seeds"  # attribute of a prefill's sampling info
_DRAFT = "dspark_draft_seeds"  # attribute of a step's sampling info


@dataclass(frozen=True)
class Seeds:
    """rows: [S] int64, places in the batch of sampled requests with a seed. values: [S] int64."""

    rows: Tensor
    values: Tensor


@dataclass(frozen=True)
class DraftSeeds:
    """seeds: of a step that drafts. anchors: [R] int64, positions of its anchors. waits:
    verify/seeded.py's function, or a faster one."""

    seeds: Seeds
    anchors: Tensor
    waits: Callable[[Tensor, Tensor, Tensor], Tensor] = waits

    def drawn(
        self,
        columns: Tensor,
        logits: Tensor,
        temperatures: Tensor,
        place: int,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Replace the tokens of seeded requests in columns [R] by draws at draft position `place`.

        logits: [R, n] of that position. temperatures: [R] > 0. tokens: [n] token ids of the
        columns; None: each its own index.
        """
        if tokens is None:
            tokens = torch.arange(logits.shape[1], device=logits.device)
        together = rows_at_once(len(tokens))
        parts = zip(self.seeds.rows.split(together), self.seeds.values.split(together), strict=True)
        for rows, values in parts:
            race = logits[rows].float() / temperatures[rows, None]
            delays = self.waits(values, self.anchors[rows] + place, tokens)
            choice = (race - delays.log()).argmax(-1)
            columns = columns.index_copy(0, rows, choice.to(columns.dtype))
        return columns


def seeds_of(batch: Any) -> Seeds | None:
    """Return the seeds of a batch's sampled requests, or None."""
    settings = [req.sampling_params for req in batch.reqs]
    seeded = [r for r, s in enumerate(settings) if s.sampling_seed is not None and s.top_k > 1]
    if not seeded:
        return None
    rows, values = (
        upstream.async_h2d(each, dtype=torch.int64, device=batch.seq_lens.device)
        for each in (seeded, [settings[r].sampling_seed for r in seeded])
    )
    return Seeds(rows, values)


@contextmanager
def seeded_prefill(batch: Any) -> Iterator[None]:
    """Let `first_tokens` draw a prefill's first tokens by the requests' seeds."""
    info = batch.sampling_info
    found = None if info is None or info.is_all_greedy else seeds_of(batch)
    if found is None:
        yield
        return
    setattr(info, _FIRST, found)
    try:
        yield
    finally:
        delattr(info, _FIRST)


def first_tokens(tokens: Tensor, probs: Tensor, sampling_info: Any, positions: Tensor) -> Tensor:
    """Replace the tokens [R] of seeded requests by seeded draws from probs [R, V] before cuts.

    positions: [R], of the prompts' last tokens. Outside `seeded_prefill` tokens are unchanged.
    """
    seeds: Seeds | None = getattr(sampling_info, _FIRST, None)
    if seeds is None:
        return tokens
    rows = seeds.rows
    distribution = truncate_all(
        probs[rows].float(),
        sampling_info.top_ks[rows],
        sampling_info.top_ps[rows],
        sampling_info.min_ps[rows],
    )
    choice = seeded_choice(distribution, seeds.values, positions[rows].long())
    return tokens.index_copy(0, rows, choice.to(tokens.dtype))


@contextmanager
def seeded_draft(proposer: Any, batch: Any, seeds: Seeds | None) -> Iterator[None]:
    """Let `draft_block` draw a draft by the requests' seeds, after the draft's graph.

    The graph contains upstream's sampler, which has no seeds: its tokens are not used.
    """
    if seeds is None:
        yield
        return
    info, in_graph = batch.sampling_info, proposer._draft_sampler
    proposer._draft_sampler = None
    setattr(info, _DRAFT, DraftSeeds(seeds, batch.seq_lens.long()))
    try:
        yield
    finally:
        delattr(info, _DRAFT)
        proposer._draft_sampler = in_graph


def draft_seeds(sampling_info: Any) -> DraftSeeds | None:
    """Return the seeds that `seeded_draft` set for `draft_block`."""
    return getattr(sampling_info, _DRAFT, None)


def draft_block(
    drawn: DraftSeeds,
    *,
    base_logits: Tensor,
    anchor_tokens: Tensor,
    draft_hidden: Tensor | None,
    sampling_info: Any,
    markov_head: Any,
    noise: Any,
    device: Any,
    tp_sync: Any,
) -> Any:
    """Run upstream's `sample_draft_block` step by step, with the draws of seeded requests.

    base_logits: [R, gamma, n]. anchor_tokens: [R]. Returns upstream's `DraftBlockResult`.
    """
    params = upstream.resolve_draft_params(
        sampling_info=sampling_info, bs=len(base_logits), device=device
    )
    logits = _step_logits(markov_head, base_logits)
    state, previous, drafted = markov_head.init_state(draft_hidden), anchor_tokens.long(), []
    for place in range(base_logits.shape[1]):
        tokens, state = upstream._draft_step(
            markov_head,
            previous,
            base_logits[:, place],
            hidden_states=None if draft_hidden is None else draft_hidden[:, place],
            state=state,
            temperatures=params.step_temperatures,
            noise=noise,
            step=place,
            logits_out=logits[:, place],
        )
        tokens = drawn.drawn(tokens, logits[:, place], params.temperatures, place)
        previous = tp_sync.sync(upstream.SpecTpSyncSite.DSPARK_DRAFT, tokens)
        drafted.append(previous)
    noise.offset.add_(1)
    return draft_result(torch.stack(drafted, dim=1), params, logits)


def draft_result(tokens: Tensor, params: Any, logits: Tensor | None = None) -> Any:
    """Return upstream's `DraftBlockResult` of tokens [R, gamma].

    params: upstream's, of the requests. logits: [R, gamma, V]; None: drafts are argmax choices.
    """
    return upstream.DraftBlockResult(
        draft_tokens=tokens,
        corrected_logits=logits,
        greedy_mask=params.greedy_mask,
        temperatures=params.temperatures,
        greedy_draft=logits is None,
    )


def _step_logits(markov_head: Any, base_logits: Tensor) -> Tensor:
    """Allocate the logits of all steps, as upstream does."""
    requests, gamma, width = base_logits.shape
    return base_logits.new_empty(
        (requests, gamma, upstream.step_logits_width(markov_head, width)),
        dtype=markov_head.step_logits_dtype(base_logits.dtype),
    )
