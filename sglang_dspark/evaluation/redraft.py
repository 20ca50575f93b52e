"""Redraft: compute a drafter's steps on answers that an engine run has recorded.

A greedy answer depends on the target alone, not on the drafter. One pass of the target over prompt
and answer therefore gives all that its verify passes would have shown a drafter: features, last
hidden states, the token behind every draft. Only the drafting remains: the steps are the
reference engine's, at a fraction of its work. The last step of an answer counts in full (see
`statistics`), so each answer is continued by gamma tokens.

A sampled answer has the target's distribution with every drafter, since the accept rule is
lossless. Given the answer, this drafter's drafts have the distribution of
`replay.draw_given_answer`, position by position up to the first rejection; later drafts are drawn
from the drafter alone. So drafts, acceptance and answer together have the distribution of decoding
with this drafter. tau over redrafted steps has the same expectation, and drafters are compared on
the same answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.drafter import DSparkDrafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.recording import Workload, describe, settings_json
from sglang_dspark.evaluation.records import Generation, Step
from sglang_dspark.evaluation.replay import draw_column, draw_given_answer
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.evaluation.traces import Trace, prompt_digest
from sglang_dspark.families.proposer import DraftState, Proposer
from sglang_dspark.families.registry import drafter_layers, open_drafter, proposer_of
from sglang_dspark.families.vocabulary import columns_of

_UNCUT = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
_ROWS = 32  # answers redrafted in one batch


@dataclass
class _Walk:
    """Position of the drafter in an answer. tokens [n]: prompt and answer."""

    tokens: Tensor
    prompt_len: int
    anchor: int
    steps: list[Step] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Return the number of answer tokens behind the anchor."""
        return len(self.tokens) - 1 - self.anchor


@dataclass(frozen=True)
class _Text:
    """A batch of prompts and answers, each continued a little, and the target's outputs for them.

    tokens [R, T]; features [R, T, m*d] and hidden [R, T, d] after each token, zero past the end.
    prompt_lens [R]. log_partition [R, T]: logsumexp of the target's logits / temperature after each
    token of the answer, infinite elsewhere; None for greedy answers.
    """

    tokens: Tensor
    features: Tensor
    hidden: Tensor
    prompt_lens: Tensor
    log_partition: Tensor | None = None

    def window(self, rows: Tensor, first: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [r, size], features and hidden from position first [r] on of `rows` [r]."""
        at = first[:, None] + torch.arange(size)
        picked = rows[:, None], at
        return self.tokens[picked], self.features[picked], self.hidden[picked]


@dataclass(frozen=True)
class Subject:
    """A drafter to redraft with.

    gamma: drafts a step, None: as trained. transition: False removes a DSpark drafter's
    transition bias (its reduced vocabulary stays), to measure the backbone alone.
    """

    path: Path
    gamma: int | None = None
    transition: bool = True


def redraft(
    workload: Workload,
    subjects: Sequence[Subject],
    answers: Trace,
    on_finish: Callable[[], None] = lambda: None,
) -> list[Trace]:
    """Return for each drafter the trace that `recording.record` would give, from recorded answers.

    answers: a trace of the same target, length and temperature, with these prompts or more. The
    target is run once for all drafters, which must read the same layers of it. `on_finish` is
    called after each answer. Raises DSparkError if the answers do not match the workload, or a
    drafter does not match the target.
    """
    answers = _of_these_prompts(workload, answers)
    target = TargetModel.load(workload.target, _common_layers([each.path for each in subjects]))
    proposers = [_proposer(each, target) for each in subjects]
    walks = [_walks(workload, answers) for _ in subjects]
    by_length = sorted(range(len(workload.ids)), key=lambda i: len(walks[0][i].tokens))
    ahead = max(proposer.gamma for proposer in proposers)
    distribution = _TargetDistribution(
        target, answers.temperature, torch.Generator().manual_seed(workload.settings.seed)
    )
    for start in range(0, len(by_length), _ROWS):
        chosen = by_length[start : start + _ROWS]
        group = [walks[0][i] for i in chosen]
        text = _read(group, distribution, ahead)
        longest = max(len(walk.tokens) - walk.prompt_len for walk in group)
        distributions = _AnswerDistributions(text, distribution, longest + ahead)
        for proposer, own in zip(proposers, walks, strict=True):
            _redraft_group([own[i] for i in chosen], text, proposer, distributions)
        for _ in chosen:
            on_finish()
    return [
        _trace(workload, subject, proposer.gamma, own, answers)
        for subject, proposer, own in zip(subjects, proposers, walks, strict=True)
    ]


def _common_layers(drafters: Sequence[Path]) -> tuple[int, ...]:
    """Return the target layers that the drafters read. Raises DSparkError if they differ.

    Drafters that read no layers match any others.
    """
    layers = {each: drafter_layers(each) for each in drafters}
    wanted = set(layers.values()) - {()}
    if len(wanted) > 1:
        listed = ", ".join(f"{path}: {list(found)}" for path, found in layers.items())
        raise DSparkError(f"the drafters read different target layers ({listed}): one run for each")
    return wanted.pop() if wanted else ()


def _proposer(subject: Subject, target: TargetModel) -> Proposer:
    drafter = open_drafter(subject.path, target)
    if not subject.transition:
        if not isinstance(drafter, DSparkDrafter):
            raise DSparkError(f"{subject.path} is no DSpark drafter: it has no transition bias")
        reserved = 0 if drafter.draft_ids is None else 1  # the last rank is the vocabulary's
        weight = drafter.markov_head.markov_w2.weight
        with torch.no_grad():
            weight[:, : weight.shape[1] - reserved] = 0.0
    return proposer_of(drafter, subject.gamma)


def _walks(workload: Workload, answers: Trace) -> list[_Walk]:
    return [
        _Walk(torch.tensor([*ids, *generation.tokens]), len(ids), len(ids))
        for ids, generation in zip(workload.ids, answers.generations, strict=True)
    ]


def _trace(
    workload: Workload, subject: Subject, gamma: int, walks: Sequence[_Walk], answers: Trace
) -> Trace:
    facts = describe(subject.path, gamma)
    return Trace(
        drafter=facts if subject.transition else replace(facts, head="none"),
        target=workload.target.name,
        target_sha256=workload.target_sha256,
        settings=settings_json(workload.settings) | {"redrafted": True},
        prompts=answers.prompts,
        generations=tuple(
            Generation(walk.prompt_len, answer.tokens, answer.finish, tuple(walk.steps))
            for walk, answer in zip(walks, answers.generations, strict=True)
        ),
    )


def _of_these_prompts(workload: Workload, answers: Trace) -> Trace:
    """Return the workload's prompts of the trace, in the workload's order.

    Raises DSparkError unless the answers are such as decoding would give here.
    """
    wanted = settings_json(workload.settings)
    if wanted["temperature"] != answers.temperature:
        raise DSparkError(
            f"the answers were given at temperature {answers.temperature:g}, asked for was "
            f"{wanted['temperature']:g}: set --temperature likewise"
        )
    names = ("top_k", "top_p", "min_p")
    cut = [n for n in names for each in (wanted, answers.settings) if each[n] != _UNCUT[n]]
    if answers.temperature > 0 and cut:
        raise DSparkError(f"answers cut by {cut[0]} cannot be redrafted: leave --answers out")
    if answers.target_sha256 != workload.target_sha256:
        raise DSparkError(f"the answers are of another target than {workload.target}: record them")
    if answers.settings["max_new_tokens"] != wanted["max_new_tokens"]:
        raise DSparkError(
            f"the answers have up to {answers.settings['max_new_tokens']} tokens, asked for were "
            f"{wanted['max_new_tokens']}: set --max-new-tokens likewise"
        )
    places: dict[str, list[int]] = {}
    for i, prompt in enumerate(answers.prompts):
        places.setdefault(prompt.digest, []).append(i)
    asked = [prompt_digest(ids) for ids in workload.ids]
    if Counter(asked) - Counter({digest: len(found) for digest, found in places.items()}):
        raise DSparkError("the answers are to other prompts: record a trace of these first")
    return answers.of_prompts([places[digest].pop(0) for digest in asked])


@dataclass(frozen=True)
class _TargetDistribution:
    """The target's distribution at a temperature, 0 for its most likely token."""

    target: TargetModel
    temperature: float
    generator: torch.Generator

    def draw(self, hidden: Tensor) -> Tensor:
        """Draw the token behind each state: hidden [R, d] -> [R]."""
        logits = self.target.logits(hidden)
        if self.temperature == 0:
            return logits.argmax(-1)
        distribution = torch.softmax(logits / self.temperature, -1)
        return torch.multinomial(distribution, 1, generator=self.generator)[:, 0]

    def log_partition(self, hidden: Tensor) -> Tensor:
        """Compute logsumexp of the logits / temperature: hidden [n, d] -> [n]."""
        return torch.logsumexp(self.target.logits(hidden) / self.temperature, -1)

    def over(self, draft_ids: Tensor | None, hidden: Tensor, log_partition: Tensor) -> Tensor:
        """Compute the distribution over the draft vocabulary; a reduced one sums to less than 1.

        hidden [R, g, d], log_partition [R, g] -> [R, g, V'].
        """
        head = self.target.head_weight
        logits = torch.nn.functional.linear(hidden, head if draft_ids is None else head[draft_ids])
        return (logits / self.temperature - log_partition[..., None]).exp().clamp(max=1.0)


class _AnswerDistributions:
    """The target's distributions along a group's sampled answers, shared by its drafters."""

    def __init__(self, text: _Text, distribution: _TargetDistribution, answer_len: int):
        """Gather the answers' states. answer_len: of the longest answer and its continuation."""
        self.distribution, self.prompt_lens = distribution, text.prompt_lens
        self._made: list[tuple[Tensor | None, Tensor]] = []
        if text.log_partition is not None:
            at = self.prompt_lens[:, None] + torch.arange(answer_len)
            picked = torch.arange(len(at))[:, None], at.clamp(max=text.tokens.shape[1] - 1)
            self.hidden, self.log_partition = text.hidden[picked], text.log_partition[picked]

    def window(self, draft_ids: Tensor | None, rows: Tensor, at: Tensor) -> Tensor:
        """Return distributions over a draft vocabulary after positions at [r, gamma] of `rows` [r].

        Returns [r, gamma, V'], summing to less than 1 for a reduced vocabulary.
        """
        distributions = self._over(draft_ids)  # [R, answer, V']
        return distributions[rows[:, None], at - self.prompt_lens[rows, None]]

    def _over(self, draft_ids: Tensor | None) -> Tensor:
        for known, distributions in self._made:
            same = known is draft_ids
            if same or (known is not None and draft_ids is not None and known.equal(draft_ids)):
                return distributions
        distributions = self.distribution.over(draft_ids, self.hidden, self.log_partition)
        self._made.append((draft_ids, distributions))
        return distributions


@torch.no_grad()
def _redraft_group(
    walks: Sequence[_Walk], text: _Text, proposer: Proposer, distributions: _AnswerDistributions
) -> None:
    state = proposer.start(len(walks), text.tokens.shape[1])
    for r, walk in enumerate(walks):
        row, length = torch.tensor([r]), walk.prompt_len
        read = (part[row, :length] for part in (text.tokens, text.features, text.hidden))
        state.prefill(row, *read)
    while rows := [r for r, walk in enumerate(walks) if walk.left > 0]:
        _step(walks, torch.tensor(rows), text, state, proposer.gamma, distributions)


@torch.no_grad()
def _read(walks: Sequence[_Walk], distribution: _TargetDistribution, more: int) -> _Text:
    """Run one pass over all texts, then decode `more` tokens plainly behind each."""
    lens = torch.tensor([len(walk.tokens) for walk in walks])  # [R]
    rows, longest = len(walks), int(lens.max())
    tokens = torch.zeros(rows, longest + more, dtype=torch.long)
    for r, walk in enumerate(walks):
        tokens[r, : len(walk.tokens)] = walk.tokens
    cache = distribution.target.new_cache(rows, longest + more)
    out = distribution.target.forward(tokens[:, :longest], torch.zeros_like(lens), cache)
    features, hidden = (_padded(part, more) for part in (out.features, out.hidden))
    every = torch.arange(rows)
    for ahead in range(more):
        at = lens + ahead  # [R] position of the token that is decoded now
        tokens[every, at] = distribution.draw(hidden[every, at - 1])
        out = distribution.target.forward(tokens[every, at][:, None], at, cache)
        features[every, at], hidden[every, at] = out.features[:, 0], out.hidden[:, 0]
    prompt_lens = torch.tensor([walk.prompt_len for walk in walks])
    if distribution.temperature == 0:
        return _Text(tokens, features, hidden, prompt_lens)
    partition = torch.full(tokens.shape, float("inf"))
    for r, walk in enumerate(walks):
        answer = slice(walk.prompt_len, len(walk.tokens) + more)
        partition[r, answer] = distribution.log_partition(hidden[r, answer])
    return _Text(tokens, features, hidden, prompt_lens, partition)


def _padded(states: Tensor, more: int) -> Tensor:
    """Pad states [R, T, w] with zeros to [R, T + more, w]."""
    return torch.nn.functional.pad(states, (0, 0, 0, more))


def _step(
    walks: Sequence[_Walk],
    rows: Tensor,
    text: _Text,
    state: DraftState,
    gamma: int,
    distributions: _AnswerDistributions,
) -> None:
    """Redraft one block for each of the unfinished walks `rows` [r]."""
    lens = torch.tensor([walks[r].anchor for r in rows.tolist()])
    tokens, features, hidden = text.window(rows, lens, gamma + 1)
    if text.log_partition is None:
        block = state.propose(rows, tokens[:, 0], lens, None, distributions.distribution.generator)
        drafts, predicted = block.tokens, block.confidence
        accepted = (drafts == tokens[:, 1:]).long().cumprod(1).sum(1)  # [r]
    else:
        drafts, accepted, predicted = _sampled_block(state, rows, lens, tokens, distributions)
    state.commit(rows, lens, tokens, features, hidden, accepted)
    confidence = predicted.tolist()
    for i, r in enumerate(rows.tolist()):
        walk, taken = walks[r], int(accepted[i])
        kept = min(taken + 1, walk.left)
        drafted = tuple(drafts[i].tolist())
        walk.steps.append(Step(walk.anchor, drafted, gamma, taken, kept, tuple(confidence[i])))
        walk.anchor += kept


def _sampled_block(
    state: DraftState,
    rows: Tensor,
    lens: Tensor,
    tokens: Tensor,
    distributions: _AnswerDistributions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft given the answer; return drafts [r, gamma], accepted [r], confidence.

    tokens [r, gamma + 1]: anchor and answer. confidence [r, gamma] or [r, 0].
    """
    block, distribution = state.open(rows, tokens[:, 0], lens), distributions.distribution
    ids, at = block.draft_ids, lens[:, None] + torch.arange(tokens.shape[1] - 1)
    target_distributions = distributions.window(ids, rows, at)  # [r, gamma, V']
    columns = columns_of(ids, len(distribution.target.head_weight))
    previous, accepted = tokens[:, 0], torch.zeros_like(lens)
    alive, drafted = torch.ones_like(lens, dtype=torch.bool), []
    for k in range(target_distributions.shape[1]):
        draft_distribution = torch.softmax(block.logits(previous) / distribution.temperature, -1)
        drawn, kept = draw_given_answer(
            draft_distribution,
            target_distributions[:, k],
            columns[tokens[:, k + 1]],
            distribution.generator,
        )
        free = draw_column(draft_distribution, distribution.generator)
        chosen = torch.where(alive, drawn, free)
        alive = alive & kept
        accepted = accepted + alive
        previous = chosen if ids is None else ids[chosen]
        drafted.append(previous)
    return torch.stack(drafted, 1), accepted, block.confidence()
