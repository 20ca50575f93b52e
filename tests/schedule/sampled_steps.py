"""Many real steps with windows chosen by confidence, counted transition by transition.

A target and a drafter over V tokens, each a chain on the last token. Batches of R requests draft,
the real admission chooses windows, the real accept rule emits, plain decoding fills up to gamma + 1
tokens. In a lossless step the token after each (position, previous token) has the target's
distribution. The target is a chain, so these multinomials are independent: chi-squares add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Workspace
from sglang_dspark.schedule.gains import gains
from sglang_dspark.verify import (
    BatchSampling,
    accept_sampled,
    sample_inverse_cdf,
    target_distribution,
)
from tests.verify.chains import AcceptRule

VOCAB = 5
REQUESTS = 8
CHUNK = 40_000


@dataclass(frozen=True)
class Case:
    """gamma; the request's sampling; argmax: greedy drafts, claimed to be `claim_sampled`.

    share: part of all drafts that is admitted, or None for windows of random length. peek: the
    mistake of taking the draft probability of x_k itself for its confidence. estimate: admit by
    what a drafter without a confidence head says, else by the chance of acceptance itself.
    """

    gamma: int
    sampling: BatchSampling = field(default_factory=lambda: BatchSampling.uniform(1, 1.0))
    argmax: bool = False
    claim_sampled: bool = False
    share: float | None = 0.5
    peek: bool = False
    estimate: bool = False
    rule: AcceptRule = accept_sampled


def logits(seed: int) -> Tensor:
    """[V + 1, V] logits behind each last token; row V is the start."""
    return torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.2


def p_value(case: Case, steps: int, seed: int = 1) -> float:
    """Of the distribution of gamma + 1 tokens over `steps` steps; 0 if an impossible token came."""
    generator = torch.Generator().manual_seed(seed)
    target = target_distribution(logits(3)[None], case.sampling)[0].double()  # [V + 1, V]
    counts = torch.zeros(case.gamma + 1, VOCAB + 1, VOCAB, dtype=torch.int64)
    for start in range(0, steps, CHUNK):
        text = _steps(case, target, min(CHUNK, steps - start), generator)  # [N, gamma + 1]
        last = torch.full((len(text),), VOCAB)
        for position in range(case.gamma + 1):
            cell = last * VOCAB + text[:, position]
            counts[position] += torch.bincount(cell, minlength=counts[0].numel()).view(-1, VOCAB)
            last = text[:, position]
    return _chi_square(counts, target)


def _steps(case: Case, target: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """Texts of gamma + 1 tokens: one speculative step, then plain decoding. [N, gamma + 1]"""
    draft, draft_probs, before = _drafts(case, steps, generator)
    lengths = _lengths(case, target, draft, draft_probs, before, generator)
    outcome = case.rule(
        draft,
        None if case.argmax and not case.claim_sampled else draft_probs,
        target[before],
        torch.rand(steps, case.gamma, generator=generator),
        torch.rand(steps, generator=generator),
        lengths,
    )
    text = outcome.tokens(draft)
    last = torch.full((steps,), VOCAB)
    for position in range(case.gamma + 1):
        plain = sample_inverse_cdf(target[last], torch.rand(steps, generator=generator))
        last = torch.where(outcome.emitted > position, text[:, position], plain)
        text[:, position] = last
    return text


def _drafts(case: Case, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts [N, gamma], their distributions [N, gamma, V], the token before each row."""
    drafter = torch.softmax(logits(5), dim=1).double()
    last = torch.full((steps,), VOCAB)
    before, distributions = [last], []
    for _ in range(case.gamma):
        distributions.append(drafter[last])
        uniforms = torch.rand(steps, generator=generator)
        last = (
            distributions[-1].argmax(1)
            if case.argmax
            else sample_inverse_cdf(distributions[-1], uniforms)
        )
        before.append(last)
    rows = torch.stack(before, dim=1)  # [N, gamma + 1]
    return rows[:, 1:], torch.stack(distributions, dim=1), rows


def _lengths(
    case: Case,
    target: Tensor,
    draft: Tensor,
    draft_probs: Tensor,
    before: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Verify lengths [N]: top-K admission in batches of R."""
    steps = len(draft)
    if case.share is None:
        return torch.randint(0, case.gamma + 1, (steps,), generator=generator)
    here = target[before[:, :-1]]  # [N, gamma, V]
    if case.peek:
        confidence = draft_probs.gather(2, draft[:, :, None])[:, :, 0]
    elif case.estimate:
        confidence = draft_confidence(draft_probs.log()).sigmoid()
    elif case.argmax:
        confidence = here.gather(2, draft_probs.argmax(2, keepdim=True))[:, :, 0]
    else:
        confidence = torch.minimum(here, draft_probs).sum(2)
    survivals = gains(confidence.clamp(0, 1).float().numpy())
    lengths = np.empty(steps, np.int64)
    workspace = Workspace(REQUESTS, case.gamma)
    drafts = round(case.share * REQUESTS * case.gamma)
    for start in range(0, steps, REQUESTS):
        batch = slice(start, start + REQUESTS)
        admit(survivals[batch], drafts, workspace, out=lengths[batch])
    return torch.from_numpy(lengths)


def _chi_square(counts: Tensor, target: Tensor) -> float:
    """Sum of Pearson's chi-squares of all [position, previous] rows that are thick enough."""
    expected = counts.sum(2, keepdim=True) * target  # [gamma + 1, V + 1, V]
    if int(counts[target.expand_as(expected) == 0].sum()):
        return 0.0
    possible = target > 0
    thick = ((expected >= 20) | ~possible).all(2)  # [gamma + 1, V + 1]
    cells = possible & thick[:, :, None]
    statistic = ((counts - expected) ** 2 / expected)[cells].sum()
    freedom = int(cells.sum()) - int(thick.sum())
    assert freedom > 0, "no row is thick enough"
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2))
