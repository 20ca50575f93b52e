"""Accept sampled steps with top-k on lists of the tokens that the cuts keep.

Emits the tokens of `step.accept.accept` for the same uniforms, seeds and greedy requests included.
Only verified rows are read: the host knows a bound of their number, so they are packed first, and
reads nothing. By the operator of `kernels/accept_listed.py` on a GPU; with seeds, and without
Triton, in torch on the lists of `verify/candidates.py`: some 300 calls, 5 ms of an H200's host.

Memory: 200 MiB for a chunk of rows, for any batch; then in torch about 64 bytes for each of the
R (gamma + 1) (k + 1) entries that the rule judges: 3 MB at 256 requests, gamma 7 and k 20, 134 MB
at k 1,024.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dspark.backends.cuda.accept import unseeded_windows
from sglang_dspark.kernels.accept_listed import accept_listed_triton
from sglang_dspark.kernels.accept_windows import why_not
from sglang_dspark.kernels.platform import runs_on
from sglang_dspark.step.accept import uniforms
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify.acceptance import Acceptance
from sglang_dspark.verify.block import accept_block, walk_at_once
from sglang_dspark.verify.candidates import Candidates, top_candidates
from sglang_dspark.verify.greedy import accept_greedy
from sglang_dspark.verify.rejection import accept_sampled
from sglang_dspark.verify.seeded import accept_seeded, seeded_choice

logger = logging.getLogger(__name__)
_CHUNK = 200 << 20  # bytes
_LOGIT, _CANDIDATE = 13, 330  # bytes that one takes while its chunk is read


@cache
def _say(reason: str) -> None:
    logger.warning("drafts with top-k are accepted in torch: %s", reason)


class Packed(NamedTuple):
    """Rows of ragged windows, packed. request, place: [n] int64, of a packed row. row: [R, width]
    int64, the packed row of each place, of the last one verified behind the window's end."""

    request: Tensor
    place: Tensor
    row: Tensor


class Windows(NamedTuple):
    """Windows over lists of tokens. drafts: [R, gamma], each draft's column in its row, C of one
    that the cuts drop. tokens: [R, gamma + 1, C + 1] ascending. target: the same shape, float32.
    draft_probs: [R, gamma, C + 1] float32, right wherever target is not 0 and at drafts; None: each
    draft is an argmax. likeliest: [R, gamma + 1] argmax of the logits; None: no request is greedy.
    """

    drafts: Tensor
    tokens: Tensor
    target: Tensor
    draft_probs: Tensor | None
    likeliest: Tensor | None


def accept_top_k(
    ids: Tensor,
    lens: Tensor,
    logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
    anchors: Tensor,
    seeds: Seeds | None,
    *,
    most: int,
    rows: int,
    rule: str,
) -> Acceptance:
    """Return what each request of a step emits whose requests all have a top-k.

    Arguments as of `step.accept.accept`. most: no top-k exceeds it. rows: no fewer than the rows
    verified, sum of lens. rule: `verify.rule`.
    """
    if seeds is None and runs_on(logits.device):
        given = unseeded_windows(ids, lens, logits, draft_block, sampling_info)
        reason = why_not(given)
        if reason is None:
            return Acceptance(*accept_listed_triton(given, most=most, rows=rows, rule=rule))
        _say(reason)
    limits = lens.long() - 1
    windows = _windows(ids[:, 1:], lens.long(), logits, draft_block, sampling_info, most, rows)
    outcome = _judged(windows, limits, logits, rule)
    if seeds is not None:
        outcome = _seeded(outcome, windows, anchors, limits, seeds)
    accepted, column = outcome.accepted, outcome.bonus
    row = torch.arange(len(ids), device=ids.device)
    # A row that is NaN keeps nothing, and must not become an invalid token.
    token = windows.tokens[row, accepted, column].clamp(max=logits.shape[1] - 1)
    if windows.likeliest is None:
        return Acceptance(accepted, token)
    greedy = accept_greedy(ids[:, 1:], windows.likeliest, limits, checked=False)
    mask = draft_block.greedy_mask
    return Acceptance(
        torch.where(mask, greedy.accepted, accepted), torch.where(mask, greedy.bonus, token)
    )


def _judged(windows: Windows, limits: Tensor, logits: Tensor, rule: str) -> Acceptance:
    """The outcome of unseeded requests, its bonus a column of its row."""
    requests, gamma = windows.drafts.shape
    given: dict[str, Any] = {
        "draft": windows.drafts,
        "draft_probs": windows.draft_probs,
        "target_probs": windows.target,
        "accept_uniforms": uniforms(requests, gamma, like=logits),
        "bonus_uniforms": uniforms(requests, like=logits),
        "verify_lens": limits,
        "checked": False,
    }
    if rule == "token":
        return accept_sampled(**given)
    return accept_block(**given, walked=walk_at_once)


def packed(lengths: Tensor, width: int, total: int) -> Packed:
    """Pack the first lengths [R] of width places each; total >= their sum, known on the host."""
    ends = lengths.cumsum(0)
    first = ends - lengths
    at = torch.arange(total, device=lengths.device)
    request = torch.searchsorted(ends, at, right=True).clamp(max=len(lengths) - 1)
    last = (lengths - 1).clamp_min(0)
    place = torch.minimum(at - first[request], last[request])
    column = torch.arange(width, device=lengths.device)
    row = first[:, None] + torch.minimum(column[None, :], last[:, None])
    return Packed(request, place, row.clamp(max=max(total - 1, 0)))


def _windows(
    drafts: Tensor,
    lens: Tensor,
    logits: Tensor,
    draft_block: Any,
    info: Any,
    most: int,
    rows: int,
) -> Windows:
    """The windows' rows as lists of tokens, the drafts' columns appended."""
    requests, gamma = drafts.shape
    at = packed(lens, gamma + 1, min(rows, requests * (gamma + 1)))
    cuts = [each.reshape(-1) for each in (info.temperatures, info.top_ks, info.top_ps, info.min_ps)]
    flat = at.request * (gamma + 1) + at.place
    greedy = bool(info.is_any_greedy)

    def listed(part: slice) -> tuple[Tensor, ...]:
        read = logits[flat[part]]
        temperature, top_k, top_p, min_p = (each[at.request[part]] for each in cuts)
        found = top_candidates(read, temperature, top_k, top_p, min_p, most)
        return (*found, read.argmax(-1)) if greedy else tuple(found)

    tokens, probs, *likeliest = _in_chunks(listed, len(flat), logits.shape[1], most)
    listing = Candidates(tokens[at.row], probs[at.row])  # [R, gamma + 1, C]
    same = listing.tokens[:, :-1] == drafts[:, :, None]  # [R, gamma, C]
    outside = torch.full_like(drafts, same.shape[2])
    columns = torch.where(same.any(-1), same.to(torch.uint8).argmax(-1), outside)
    return Windows(
        columns,
        torch.nn.functional.pad(listing.tokens, (0, 1), value=logits.shape[1]),
        torch.nn.functional.pad(listing.probs, (0, 1)),
        None
        if draft_block.greedy_draft
        else _draft_probs(drafts, lens - 1, listing.tokens, draft_block, len(flat) - requests),
        likeliest[0][at.row] if greedy else None,
    )


def _draft_probs(
    drafts: Tensor, limits: Tensor, tokens: Tensor, draft_block: Any, rows: int
) -> Tensor:
    """p_d [R, gamma, C + 1] of the tokens [R, gamma + 1, C] listed, and of each draft."""
    gamma = drafts.shape[1]
    wanted = torch.cat([tokens[:, :-1], drafts[:, :, None]], dim=2)
    if rows == 0:
        return torch.zeros(wanted.shape, device=drafts.device)
    at = packed(limits, gamma, rows)
    logits = draft_block.corrected_logits
    temperatures = draft_block.temperatures.reshape(-1)

    def listed(part: slice) -> tuple[Tensor, ...]:
        request, place = at.request[part], at.place[part]
        scaled = logits[request, place].float() / temperatures[request, None]
        probs = torch.softmax(scaled, dim=-1)
        # Behind the kept tokens the list says V, where p_t is 0 and p_d does not matter.
        columns = wanted[request, place].clamp(max=probs.shape[1] - 1)
        return (probs.gather(1, columns),)

    (found,) = _in_chunks(listed, rows, logits.shape[2], wanted.shape[2])
    return found[at.row]


def _in_chunks(
    listed: Callable[[slice], tuple[Tensor, ...]], rows: int, vocab: int, listing: int
) -> list[Tensor]:
    """Concatenate what `listed` returns for rows of `vocab` logits and `listing` candidates."""
    together = max(_CHUNK // (_LOGIT * vocab + _CANDIDATE * listing), 1)
    parts = [listed(slice(at, at + together)) for at in range(0, rows, together)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _seeded(
    outcome: Acceptance, windows: Windows, anchors: Tensor, limits: Tensor, seeds: Seeds
) -> Acceptance:
    """The outcome, in columns, with what the requests that have a seed draw by it."""
    rows = seeds.rows
    tokens = windows.tokens[rows]  # [S, gamma + 1, C + 1]

    def choose(probs: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        return seeded_choice(probs, values, positions, tokens.flatten(0, 1))

    drawn = accept_seeded(
        windows.drafts[rows],
        windows.target[rows],
        seeds.values,
        anchors[rows].long(),
        limits[rows],
        choose,
        checked=False,
    )
    return Acceptance(
        outcome.accepted.index_copy(0, rows, drawn.accepted),
        outcome.bonus.index_copy(0, rows, drawn.bonus),
    )
