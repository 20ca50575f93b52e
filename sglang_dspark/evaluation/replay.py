"""Replay speculative decoding on answers that the target has already given.

Calibration needs the joint distribution of confidences and acceptance. If the target's
answer y and its hidden states are stored (training/store.py), drawing from it needs no target pass:
the drafter drafts at every anchor that decoding would have reached, and acceptance follows from y.

Greedy: draft k is accepted if it is y_k. Sampled (paper, 3.1): decoding draws x ~ q, keeps it with
chance min(1, p(x) / q(x)) and emits y ~ p in the end. Given the emitted y, draft k was
    y_k, and accepted, with chance       min(1, q(y_k) / p(y_k))
    else drawn from the residual         max(q - p, 0), normalised, and rejected
because q(y) min(1, p(y) / q(y)) / p(y) = min(1, q(y) / p(y)), and a rejected x and the y that
replaces it are independent. Drafts behind a rejected one are drawn from q, as in decoding. Drafts
beyond the end of the answer are censored, even if an earlier draft was rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from sglang_dspark.drafter import DSparkDrafter
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.evaluation.records import Generation, Step
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.verify import sample_inverse_cdf

_ROWS = 64  # answers replayed in one batch


@dataclass(frozen=True)
class Answer:
    """A target's answer with the states that it was decoded from.

    tokens: [n] int64, prompt and answer. prompt_len: tokens of the prompt. features [n, m*d] and
    hidden [n, d]: the target's, after each token (that of the last is not read). log_partition:
    [n] logsumexp of the target's logits; saves computing it if sampling was at temperature 1.
    """

    tokens: Tensor
    prompt_len: int
    features: Tensor
    hidden: Tensor
    log_partition: Tensor | None = None


@dataclass
class _Walk:
    """Position of the replay in an answer."""

    answer: Answer
    anchor: int  # position of the anchor
    steps: list[Step] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Return whether the answer ends at the anchor."""
        return self.anchor >= len(self.answer.tokens) - 1


class Replay:
    """Replay answers with a drafter at one temperature; deterministic for a seed."""

    def __init__(
        self,
        target: TargetModel,
        drafter: DSparkDrafter,
        temperature: float,
        *,
        stop_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ):
        """Prepare a replay that uses only the LM head of `target`.

        temperature: at which the answers were sampled, 0 is greedy. stop_ids: tokens that end an
        answer.
        """
        self.target, self.drafter, self.temperature = target, drafter, temperature
        self.stop_ids = stop_ids
        self.generator = torch.Generator().manual_seed(seed)
        ids, w2 = drafter.draft_ids, drafter.markov_head.markov_w2.weight.detach()
        self.ids = torch.arange(len(w2)) if ids is None else ids  # [V'] token of each column
        self.transition = w2 if ids is None else w2[ids]  # [V', r]
        self.column = torch.full((len(w2),), -1)  # [V] column of each token, -1 outside
        self.column[self.ids] = torch.arange(len(self.ids))

    @torch.no_grad()
    def run(
        self, answers: Sequence[Answer], on_finish: Callable[[], None] = lambda: None
    ) -> list[Generation]:
        """Replay each answer to one generation; an answer of a single token has no steps."""
        walks = [_Walk(answer, answer.prompt_len) for answer in answers]
        by_length = sorted(range(len(walks)), key=lambda i: len(answers[i].tokens))
        for start in range(0, len(walks), _ROWS):
            group = [walks[i] for i in by_length[start : start + _ROWS]]
            self._replay(group)
            for _ in group:
                on_finish()
        return [self._generation(walk) for walk in walks]

    def _generation(self, walk: _Walk) -> Generation:
        answer = walk.answer
        tokens = tuple(answer.tokens[answer.prompt_len :].tolist())
        finish: Literal["stop", "length"] = "stop" if tokens[-1] in self.stop_ids else "length"
        return Generation(answer.prompt_len, tokens, finish, tuple(walk.steps))

    def _replay(self, group: list[_Walk]) -> None:
        longest = max(len(walk.answer.tokens) for walk in group)
        width = group[0].answer.features.shape[1]
        features = torch.zeros(len(group), longest, width)
        for row, walk in enumerate(group):
            length = len(walk.answer.tokens)
            features[row, :length] = walk.answer.features[:length].float()
        positions = torch.arange(longest).expand(len(group), -1)
        context = self.drafter.context_kv(features, positions)
        while rows := [i for i, walk in enumerate(group) if not walk.over]:
            seen = max(group[i].anchor for i in rows)
            visible = [(k[rows, :seen], v[rows, :seen]) for k, v in context]
            self._step([group[i] for i in rows], visible)

    def _step(self, walks: list[_Walk], context: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Replay one block for each walk."""
        gamma = self.drafter.config.gamma
        at = torch.tensor([walk.anchor for walk in walks])  # [R]
        anchor = torch.tensor([int(walk.answer.tokens[walk.anchor]) for walk in walks])
        room = torch.tensor([len(walk.answer.tokens) - 1 - walk.anchor for walk in walks])
        truth = torch.stack([_behind(walk, gamma) for walk in walks])  # [R, gamma]
        h = self.drafter.forward_block(anchor, at, context, at)  # [R, gamma, d]
        distributions = None if self.temperature == 0 else self._target_distributions(walks, gamma)
        drafted, accepted, logits = self._block(anchor, h, truth, distributions)
        verified = room.clamp(max=gamma)
        accepted = torch.minimum(accepted, verified)
        confidence = torch.sigmoid(logits)
        for r, walk in enumerate(walks):
            left = int(room[r])
            step = Step(
                position=walk.anchor,
                drafted=tuple(drafted[r].tolist()),
                verify_len=int(verified[r]),
                accepted=int(accepted[r]),
                kept=min(int(accepted[r]) + 1, left),
                confidence=tuple(confidence[r].tolist()),
            )
            walk.steps.append(step)
            walk.anchor += step.kept

    def _block(
        self, anchor: Tensor, h: Tensor, truth: Tensor, distributions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return drafted tokens [R, gamma], accepted [R] and confidence logits [R, gamma]."""
        head, base = self.drafter.markov_head, self.drafter.base_logits(h)  # [R, gamma, V']
        state, previous = head.start(len(anchor)), anchor
        alive = torch.ones(len(anchor), dtype=torch.bool)
        accepted = torch.zeros(len(anchor), dtype=torch.long)
        temperature = torch.full((len(anchor),), float(self.temperature))  # [R]
        tokens, embedded, estimates = [], [], []
        for k in range(h.shape[1]):
            embedded.append(head.embed(previous))
            latent, state = head.latent(embedded[-1], h[:, k], state)
            logits = base[:, k] + nn.functional.linear(latent, self.transition)
            if self.drafter.confidence_head is None:
                estimates.append(draft_confidence(logits[:, None], temperature))
            if distributions is None:
                chosen = logits.argmax(-1)
                kept = self.ids[chosen] == truth[:, k]
            else:
                distribution = torch.softmax(logits / self.temperature, -1)
                chosen, kept = draw_given_answer(
                    distribution, distributions[:, k], self.column[truth[:, k]], self.generator
                )
                free = draw_column(distribution, self.generator)
                chosen = torch.where(alive, chosen, free)
            alive = alive & kept
            accepted += alive
            previous = self.ids[chosen]
            tokens.append(previous)
        if estimates:
            return torch.stack(tokens, 1), accepted, torch.cat(estimates, 1)
        confidence = self.drafter.confidence(h, torch.stack(embedded, 1))
        return torch.stack(tokens, 1), accepted, confidence

    def _target_distributions(self, walks: list[_Walk], gamma: int) -> Tensor:
        """Return the target's probabilities of the draft vocabulary [R, gamma, V'] (sums < 1)."""
        before = [_places(walk, gamma) - 1 for walk in walks]
        hidden = torch.stack(
            [walk.answer.hidden[at].float() for walk, at in zip(walks, before, strict=True)]
        )
        known = [walk.answer.log_partition for walk in walks]
        kept = [z[at] for z, at in zip(known, before, strict=True) if z is not None]
        if self.temperature == 1 and len(kept) == len(walks):
            logits = nn.functional.linear(hidden, self.drafter.head_weight)
            return (logits - torch.stack(kept)[..., None]).exp().clamp(max=1.0)
        return torch.softmax(self.target.logits(hidden) / self.temperature, -1)[..., self.ids]


def draw_given_answer(
    draft_distribution: Tensor, target_distribution: Tensor, column: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw a sampled step's draft, and whether it was accepted, given the emitted token y.

    draft_distribution, target_distribution: q and p over the draft vocabulary, [R, V']. column:
    [R] column of y, -1 outside, where q is 0. Returns columns [R] int64 and accepted [R] bool.
    """
    rows, inside = torch.arange(len(column)), column.clamp(min=0)
    proposed, chance = (
        draft_distribution[rows, inside],
        target_distribution[rows, inside],
    )  # [R] q(y), p(y)
    uniforms = torch.rand(len(column), dtype=torch.float64, generator=rng)
    kept = (column >= 0) & (uniforms * chance < proposed)
    residual = (draft_distribution - target_distribution).clamp(min=0)
    empty = residual.sum(-1, keepdim=True) <= 0  # q = p to rounding: then nothing is rejected
    rejected = draw_column(torch.where(empty, draft_distribution, residual), rng)
    return torch.where(kept, column, rejected), kept


def draw_column(weight: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a column of each row in proportion to weight [R, V'], rows of sum > 0; return [R] int64.

    Uses one random number per row, where torch.multinomial uses one per column.
    """
    uniforms = torch.rand(len(weight), dtype=torch.float64, generator=rng)
    return sample_inverse_cdf(weight, uniforms)


def _places(walk: _Walk, gamma: int) -> Tensor:
    """Return the positions [gamma] of the tokens behind the anchor; past the end, the last one."""
    places = walk.anchor + 1 + torch.arange(gamma)
    return places.clamp(max=len(walk.answer.tokens) - 1)


def _behind(walk: _Walk, gamma: int) -> Tensor:
    """Return the tokens behind the anchor, [gamma]."""
    return walk.answer.tokens[_places(walk, gamma)]
