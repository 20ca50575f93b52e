"""A decode step asks our scheduler: whether and how deep to draft, and what to verify.

Upstream (0.5.23): sglang/srt/speculative/dspark_components/dspark_draft.py (`propose`) and
dspark_planner.py (`schedule_layout`, `should_run_compact`, `note_non_decode_step`). Upstream drafts
in every step, gamma positions deep. Without an engine on the object all of them do what they did.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.cpu.seeds import note_anchors


def propose(original: Callable[..., Any], proposer: Any, **step: Any) -> Any:
    """AROUND hook: plan the step, draft as deep as planned, admit; the proposal is gamma wide."""
    from sglang_dspark.serving.schedule.attach import engine_of

    note_anchors(step["sampling_info"], step["verify_window"].positions_2d[:, 0])
    engine = engine_of(proposer)
    if engine is None:
        return original(proposer, **step)
    batch = step["batch"]
    generation = proposer.draft_model_runner.req_to_token_pool.req_generation
    plan = engine.planned() or engine.begin(batch.req_pool_indices, generation, batch.seq_lens).plan
    if not plan.speculates:
        engine.drafted(None, None)
        rest(proposer, batch)
        return _without_draft(proposer, **step)
    depth = plan.budget.depth
    shallow = proposer.__dict__["dspark_proposers"][depth]
    proposal = original(shallow, **step)
    logits = proposal.confidence_raw
    engine.drafted(
        None if logits is None else logits.detach().float(), proposal.draft_block.greedy_mask
    )
    return proposal if depth == proposer.gamma else _widened(proposal, proposer.gamma)


def rest(owner: Any, batch: Any) -> None:
    """Tell the draft model of a worker or proposer that it does not draft in this step."""
    from sglang_dspark.serving.cpu import context_kv

    table = owner.draft_model_runner.req_to_token_pool.req_to_token
    context_kv.rest(owner.draft_model, table, batch.req_pool_indices, batch.seq_lens)


def _without_draft(
    proposer: Any,
    *,
    bs: int,
    device: Any,
    draft_input: Any,
    sampling_info: Any,
    anchor_prepared: bool = False,
    **unused: Any,
) -> Any:
    """A proposal whose drafts are never read, as no draft is verified."""
    from sglang.srt.speculative.dspark_components.dspark_draft import (
        DraftBlockResult,
        DraftProposal,
        resolve_draft_params,
    )

    ids = proposer.draft_block_ids_view(bs=bs, device=torch.device(device))
    if not anchor_prepared:
        ids[:, 0].copy_(draft_input.bonus_tokens.view(-1))
    if sampling_info is None or sampling_info.is_all_greedy:
        params = _greedy_params(bs, device)
    else:
        params = resolve_draft_params(sampling_info=sampling_info, bs=bs, device=device)
    block = DraftBlockResult(
        draft_tokens=_no_tokens(bs, proposer.gamma),
        corrected_logits=None,
        greedy_mask=params.greedy_mask,
        temperatures=params.temperatures,
        greedy_draft=True,
    )
    return DraftProposal(draft_block_ids=ids, draft_block=block)


def _widened(proposal: Any, gamma: int) -> Any:
    """A shallow proposal with tokens and confidences for gamma places; the rest is never read."""
    import msgspec

    block = proposal.draft_block
    return msgspec.structs.replace(
        proposal,
        draft_block=msgspec.structs.replace(block, draft_tokens=_padded(block.draft_tokens, gamma)),
        confidence=_padded(proposal.confidence, gamma),
        confidence_raw=_padded(proposal.confidence_raw, gamma),
    )


def _padded(values: Tensor | None, width: int) -> Tensor | None:
    """values [R, d] with zeros behind: [R, width]."""
    if values is None:
        return None
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


@lru_cache(maxsize=512)
def _no_tokens(bs: int, gamma: int) -> Tensor:
    return torch.zeros(bs, gamma, dtype=torch.int64)


@lru_cache(maxsize=512)
def _greedy_params(bs: int, device: Any) -> Any:
    from sglang.srt.speculative.dspark_components.dspark_draft import resolve_draft_params

    return resolve_draft_params(sampling_info=None, bs=bs, device=torch.device(device))


def schedule_layout(original: Callable[..., Any], planner: Any, **step: Any) -> Any:
    """AROUND hook: the layout of the lengths admitted; None where every draft is verified."""
    from sglang_dspark.serving.schedule.attach import engine_of

    engine = engine_of(planner)
    if engine is None:
        return original(planner, **step)
    from sglang_dspark.serving.schedule.layout import layout_of

    lengths = engine.lengths
    return None if int(lengths.min()) == engine.gamma else layout_of(lengths)


def should_run_compact(original: Callable[..., bool], planner: Any, *, layout: Any) -> bool:
    """AROUND hook: a drafter without a confidence head is loaded in upstream's static mode."""
    from sglang_dspark.serving.schedule.attach import engine_of

    if engine_of(planner) is None:
        return original(planner, layout=layout)
    return layout is not None


def note_non_decode_step(result: None, planner: Any) -> None:
    """AFTER hook: a prefill ran, so the step before it cannot be timed."""
    from sglang_dspark.serving.schedule.attach import engine_of

    engine = engine_of(planner)
    if engine is not None:
        engine.interrupted()


_PLANNER = "sglang.srt.speculative.dspark_components.dspark_planner.DSparkVerifyPlanner"

SEAMS = (
    Seam(
        name="cpu-schedule-draft",
        target="sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose",
        kind="around",
        hook=propose,
        signature="(self, *, batch, draft_input, verify_window, bs, device, target_model, "
        "sampling_info, anchor_prepared=False)",
        why="upstream drafts in every step, however little of it would be verified",
        device="cpu",
    ),
    Seam(
        name="cpu-schedule-lengths",
        target=f"{_PLANNER}.schedule_layout",
        kind="around",
        hook=schedule_layout,
        signature="(self, *, req_pool_indices, prefix_lens, device, confidence, budget, "
        "global_num_reqs=None, dp_tier_num_tokens=None)",
        why="verify lengths come from our planner",
        device="cpu",
    ),
    Seam(
        name="cpu-schedule-ragged",
        target=f"{_PLANNER}.should_run_compact",
        kind="around",
        hook=should_run_compact,
        signature="(self, *, layout)",
        why="upstream verifies all drafts of a drafter that has no confidence head",
        device="cpu",
    ),
    Seam(
        name="cpu-schedule-prefill",
        target=f"{_PLANNER}.note_non_decode_step",
        kind="after",
        hook=note_non_decode_step,
        signature="(self)",
        why="a decode step that waited for a prefill must not count as slow",
        device="cpu",
    ),
)
