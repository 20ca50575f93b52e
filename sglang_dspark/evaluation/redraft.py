"""Greedy decoding redrafted: a drafter's steps on answers that a run of the engine has recorded.

A greedy answer is the target's alone, whatever drafts for it. One pass of the target over prompt
and answer therefore gives all that its verify passes would have shown a drafter (features, last
hidden states, the token behind every draft), and what is left is the drafting: the steps are
the reference engine's, at a fraction of its work. The last step of an answer counts in full (see
`statistics`), so each answer is continued by gamma tokens. For sampled answers, whose drafts and
outcome depend on each other, see `replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.proposer import (
    DraftState,
    Proposer,
    drafter_layers,
    open_drafter,
    proposer_of,
)
from sglang_dspark.evaluation.recording import Workload, describe, settings_json
from sglang_dspark.evaluation.records import Generation, Step
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.evaluation.traces import Trace, prompt_digest

_ROWS = 16  # answers that are redrafted side by side


@dataclass
class _Walk:
    """Where in an answer the drafter stands. tokens [n]: prompt and answer."""

    tokens: Tensor
    prompt_len: int
    anchor: int
    steps: list[Step] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Answer tokens behind the anchor."""
        return len(self.tokens) - 1 - self.anchor


@dataclass(frozen=True)
class _Text:
    """Prompts and answers side by side, each continued by gamma tokens, and the target's view.

    tokens [R, T]; features [R, T, m*d] and hidden [R, T, d] after each token, zero behind the end.
    """

    tokens: Tensor
    features: Tensor
    hidden: Tensor

    def window(self, rows: Tensor, first: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [r, size], features and hidden from position first [r] on of `rows` [r]."""
        at = first[:, None] + torch.arange(size)
        picked = rows[:, None], at
        return self.tokens[picked], self.features[picked], self.hidden[picked]


def redraft(
    workload: Workload, drafter: Path, answers: Trace, on_finish: Callable[[], None] = lambda: None
) -> Trace:
    """The trace that `recording.record` would give, from the answers of another one.

    answers: a greedy trace of the same target, prompts and length. `on_finish` is called after
    each answer. Raises DSparkError when it is another one, or the drafter does not fit.
    """
    _require_same_run(workload, answers)
    target = TargetModel.load(workload.target, drafter_layers(drafter))
    proposer = proposer_of(open_drafter(drafter, target), workload.settings.gamma)
    walks = [
        _Walk(torch.tensor([*ids, *generation.tokens]), len(ids), len(ids))
        for ids, generation in zip(workload.ids, answers.generations, strict=True)
    ]
    by_length = sorted(walks, key=lambda walk: len(walk.tokens))
    for start in range(0, len(walks), _ROWS):
        group = by_length[start : start + _ROWS]
        _redraft_group(group, target, proposer)
        for _ in group:
            on_finish()
    return Trace(
        drafter=describe(drafter, proposer.gamma),
        target=workload.target.name,
        target_sha256=workload.target_sha256,
        settings=settings_json(workload.settings) | {"redrafted": True},
        prompts=answers.prompts,
        generations=tuple(
            Generation(walk.prompt_len, told.tokens, told.finish, tuple(walk.steps))
            for walk, told in zip(walks, answers.generations, strict=True)
        ),
    )


def _require_same_run(workload: Workload, answers: Trace) -> None:
    """Raise DSparkError unless the answers are those that greedy decoding would give here."""
    wanted = settings_json(workload.settings)
    if wanted["temperature"] != 0 or answers.temperature != 0:
        raise DSparkError("only greedy answers can be redrafted: leave --answers out to decode")
    if answers.target_sha256 != workload.target_sha256:
        raise DSparkError(f"the answers are of another target than {workload.target}: record them")
    if [p.digest for p in answers.prompts] != [prompt_digest(ids) for ids in workload.ids]:
        raise DSparkError("the answers are to other prompts: record a trace of these first")
    if answers.settings["max_new_tokens"] != wanted["max_new_tokens"]:
        raise DSparkError(
            f"the answers have up to {answers.settings['max_new_tokens']} tokens, asked for were "
            f"{wanted['max_new_tokens']}: set --max-new-tokens likewise"
        )


@torch.no_grad()
def _redraft_group(walks: Sequence[_Walk], target: TargetModel, proposer: Proposer) -> None:
    text = _read(walks, target, proposer.gamma)
    state = proposer.start(len(walks), text.tokens.shape[1])
    for r, walk in enumerate(walks):
        row, length = torch.tensor([r]), walk.prompt_len
        read = (part[row, :length] for part in (text.tokens, text.features, text.hidden))
        state.prefill(row, *read)
    generator = torch.Generator()  # greedy drafts ask nothing of it
    while rows := [r for r, walk in enumerate(walks) if walk.left > 0]:
        _step(walks, torch.tensor(rows), text, state, proposer.gamma, generator)


def _read(walks: Sequence[_Walk], target: TargetModel, gamma: int) -> _Text:
    """One pass over all texts, then gamma tokens of plain greedy decoding behind each."""
    lens = torch.tensor([len(walk.tokens) for walk in walks])  # [R]
    rows, longest = len(walks), int(lens.max())
    tokens = torch.zeros(rows, longest + gamma, dtype=torch.long)
    for r, walk in enumerate(walks):
        tokens[r, : len(walk.tokens)] = walk.tokens
    cache = target.new_cache(rows, longest + gamma)
    out = target.forward(tokens[:, :longest], torch.zeros_like(lens), cache)
    features, hidden = (_padded(part, gamma) for part in (out.features, out.hidden))
    every = torch.arange(rows)
    for ahead in range(gamma):
        at = lens + ahead  # [R] position of the token that is decoded now
        tokens[every, at] = target.logits(hidden[every, at - 1]).argmax(-1)
        out = target.forward(tokens[every, at][:, None], at, cache)
        features[every, at], hidden[every, at] = out.features[:, 0], out.hidden[:, 0]
    return _Text(tokens, features, hidden)


def _padded(states: Tensor, more: int) -> Tensor:
    """states [R, T, w] -> [R, T + more, w], zeros behind."""
    return torch.nn.functional.pad(states, (0, 0, 0, more))


def _step(
    walks: Sequence[_Walk],
    rows: Tensor,
    text: _Text,
    state: DraftState,
    gamma: int,
    generator: torch.Generator,
) -> None:
    """One block for each walk of `rows` [r] that is not over."""
    lens = torch.tensor([walks[r].anchor for r in rows.tolist()])
    tokens, features, hidden = text.window(rows, lens, gamma + 1)
    block = state.propose(rows, tokens[:, 0], lens, None, generator)
    equal = block.tokens == tokens[:, 1:]  # [r, gamma]
    accepted = equal.long().cumprod(1).sum(1)
    state.commit(rows, lens, tokens, features, hidden, accepted)
    confidence = block.confidence.tolist()
    for i, r in enumerate(rows.tolist()):
        walk, taken = walks[r], int(accepted[i])
        kept = min(taken + 1, walk.left)
        drafted = tuple(block.tokens[i].tolist())
        walk.steps.append(Step(walk.anchor, drafted, gamma, taken, kept, tuple(confidence[i])))
        walk.anchor += kept
