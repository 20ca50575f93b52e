"""Decode with the reference engine: batched speculative decoding and plain decoding in plain torch.

A round drafts a block per request, verifies anchor and drafts in one target pass, applies an
accept rule of `verify` and gives the drafter the target's outputs of the accepted rows (paper,
3.1). `families.registry` provides drafters of any family. Without a drafter the same loop
decodes plainly: its window is the anchor alone. The engine is the reference for served results:
slow, exact, and it records every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from sglang_dspark.drafter import DraftBlock
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.records import Generation, Step
from sglang_dspark.evaluation.target import SlotCache, TargetModel
from sglang_dspark.families.registry import proposer_of
from sglang_dspark.verify import (
    Acceptance,
    BatchSampling,
    accept_block,
    accept_greedy,
    accept_sampled,
    sample_inverse_cdf,
    target_distribution,
)

OnFinish = Callable[[int, Generation], None]
# (draft, draft_probs, target_probs, accept_uniforms, bonus_uniforms), as in `verify.accept_sampled`
SampledRule = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], Acceptance]


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of decoding; the same for every request of a run.

    max_new_tokens: most output tokens, the prefill's token included. temperature 0 is greedy;
    top_k, top_p, min_p truncate the target's distribution as in `verify.sampling`. stop_ids: tokens
    that end a request (and are kept). batch: R, requests in flight. gamma: block size, at most
    the trained one, which None selects. seed: of all random numbers. rule: accept rule for sampled
    drafts, token by token, which traces and calibration data assume, or by block.
    """

    max_new_tokens: int = 96
    temperature: float = 0.0
    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    batch: int = 8
    gamma: int | None = None
    seed: int = 0
    rule: Literal["token", "block"] = "token"

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise DSparkError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.gamma is not None and self.gamma < 1:
            raise DSparkError(f"gamma must be at least 1, found {self.gamma}")
        try:
            self.sampling(1)
        except ValueError as error:
            raise DSparkError(f"sampling settings: {error}") from None

    def sampling(self, rows: int) -> BatchSampling:
        """Return the sampling settings as tensors of `rows` requests."""
        return BatchSampling.uniform(rows, self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass
class _Request:
    """A request in flight."""

    index: int
    prompt_tokens: int
    tokens: list[int]
    steps: list[Step] = field(default_factory=list)


class ReferenceEngine:
    """Decode prompts with a target and, unless it is None, a drafter."""

    def __init__(
        self,
        target: TargetModel,
        drafter: nn.Module | None,
        settings: DecodeSettings,
        rule: SampledRule | None = None,
    ):
        """Connect a drafter to a target that was loaded for its `target_layer_ids`, if it has any.

        rule: judges sampled drafts instead of the rule that the settings name.
        Raises DSparkError if target and drafter do not match or gamma exceeds the trained block.
        """
        self.target, self.settings = target, settings
        named = accept_block if settings.rule == "block" else accept_sampled
        self.rule: SampledRule = rule or named
        self.proposer = None if drafter is None else proposer_of(drafter, settings.gamma)
        wanted = () if self.proposer is None else self.proposer.target_layer_ids
        if wanted and target.layer_ids != wanted:
            raise DSparkError(
                f"the drafter wants features of target layers {list(wanted)}, the target was "
                f"loaded for {list(target.layer_ids)}"
            )

    @property
    def gamma(self) -> int:
        """Return the drafts per step; 0 for plain decoding."""
        return 0 if self.proposer is None else self.proposer.gamma

    @torch.no_grad()
    def run(
        self, prompts: Sequence[Sequence[int]], on_finish: OnFinish | None = None
    ) -> list[Generation]:
        """Decode token-id prompts; return the results in their order.

        on_finish: called with (index, result) as each request ends. Raises DSparkError for an
        empty prompt or one too long for the target.
        """
        limit = self._longest(prompts)
        slots = min(self.settings.batch, len(prompts))
        run = _Run(self, slots, limit)
        queue = deque(enumerate(prompts))
        results: dict[int, Generation] = {}
        while queue or run.active():
            while queue and (slot := run.free_slot()) is not None:
                run.prefill(slot, *queue.popleft())
                self._collect(run, results, on_finish)
            if run.active():
                run.step()
                self._collect(run, results, on_finish)
        return [results[index] for index in range(len(prompts))]

    def _collect(
        self, run: _Run, results: dict[int, Generation], on_finish: OnFinish | None
    ) -> None:
        for index, generation in run.take_finished():
            results[index] = generation
            if on_finish is not None:
                on_finish(index, generation)

    def _longest(self, prompts: Sequence[Sequence[int]]) -> int:
        """Return the slot length that fits every request, the last verify window included."""
        if not prompts:
            raise DSparkError("no prompts to decode")
        room = self.settings.max_new_tokens + self.gamma + 1
        allowed = getattr(self.target.config, "max_position_embeddings", None)
        for index, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise DSparkError(f"prompt {index} is empty")
            if allowed is not None and len(prompt) + room > allowed:
                raise DSparkError(
                    f"prompt {index} has {len(prompt)} tokens; with {room} more it exceeds the "
                    f"target's {allowed} positions: shorten it or lower --max-new-tokens"
                )
        return max(map(len, prompts)) + room


class _Run:
    """Slots, caches and random numbers of one `ReferenceEngine.run`."""

    def __init__(self, engine: ReferenceEngine, slots: int, max_len: int):
        self.engine, self.settings = engine, engine.settings
        self.target = engine.target
        self.cache: SlotCache = self.target.new_cache(slots, max_len)
        self.requests: list[_Request | None] = [None] * slots
        self.anchor = torch.zeros(slots, dtype=torch.long)  # [S]
        self.lens = torch.zeros(slots, dtype=torch.long)  # [S] tokens before the anchor
        proposer = engine.proposer
        self.draft_state = None if proposer is None else proposer.start(slots, max_len)
        self.generator = torch.Generator().manual_seed(self.settings.seed)

    def active(self) -> list[int]:
        """List the slots with a request."""
        return [slot for slot, request in enumerate(self.requests) if request is not None]

    def free_slot(self) -> int | None:
        """Return a slot without a request, or None."""
        return next((s for s, request in enumerate(self.requests) if request is None), None)

    def prefill(self, slot: int, index: int, prompt: Sequence[int]) -> None:
        """Run a prompt through the target and keep the first token."""
        rows = torch.tensor([slot])
        tokens = torch.tensor([list(prompt)])  # [1, P]
        out = self.target.forward(tokens, torch.zeros(1, dtype=torch.long), self.cache, rows)
        if self.draft_state is not None:
            self.draft_state.prefill(rows, tokens, out.features, out.hidden)
        logits = self.target.logits(out.hidden[:, -1:])  # [1, 1, V]
        empty = torch.zeros(1, 0, dtype=torch.long)
        first = int(self._accept(empty, None, logits).bonus)
        self.requests[slot] = _Request(index, len(prompt), [first])
        self.anchor[slot], self.lens[slot] = first, len(prompt)

    def step(self) -> None:
        """Draft, verify, accept and commit for every request in flight."""
        slots = self.active()
        rows = None if len(slots) == len(self.requests) else torch.tensor(slots)
        picked = slice(None) if rows is None else rows
        anchor, lens = self.anchor[picked], self.lens[picked]  # [R]
        block = self._draft(anchor, lens, rows)
        draft = anchor.new_zeros(len(slots), 0) if block is None else block.tokens
        window = torch.cat([anchor[:, None], draft], dim=1)  # [R, gamma + 1]
        out = self.target.forward(window, lens, self.cache, rows)
        logits = self.target.logits(out.hidden)  # [R, gamma + 1, V]
        outcome = self._accept(draft, None if block is None else block.probs, logits)
        if self.draft_state is not None:
            self.draft_state.commit(
                torch.tensor(slots), lens, window, out.features, out.hidden, outcome.accepted
            )
        self._record(slots, lens, block, outcome, draft)
        self.anchor[picked] = outcome.bonus
        self.lens[picked] = lens + outcome.emitted

    def _draft(self, anchor: Tensor, lens: Tensor, rows: Tensor | None) -> DraftBlock | None:
        if self.draft_state is None:
            return None
        temperature = None
        if self.settings.temperature > 0:
            temperature = torch.full((len(anchor),), self.settings.temperature)
        return self.draft_state.propose(rows, anchor, lens, temperature, self.generator)

    def _accept(self, draft: Tensor, draft_probs: Tensor | None, logits: Tensor) -> Acceptance:
        """Accept drafts: draft [R, g], draft_probs [R, g, V] or None, logits [R, g + 1, V]."""
        rows, gamma = draft.shape
        if self.settings.temperature == 0:
            return accept_greedy(draft, logits.argmax(dim=-1))
        target_probs = target_distribution(logits, self.settings.sampling(rows))
        bonus_uniforms = torch.rand(rows, generator=self.generator, dtype=torch.float64)
        if gamma == 0:
            accepted = torch.zeros(rows, dtype=torch.long)
            return Acceptance(accepted, sample_inverse_cdf(target_probs[:, 0], bonus_uniforms))
        uniforms = torch.rand(rows, gamma, generator=self.generator, dtype=torch.float64)
        return self.engine.rule(draft, draft_probs, target_probs, uniforms, bonus_uniforms)

    def _record(
        self,
        slots: list[int],
        lens: Tensor,
        block: DraftBlock | None,
        outcome: Acceptance,
        draft: Tensor,
    ) -> None:
        confidence = [[]] * len(slots) if block is None else block.confidence.tolist()
        accepted, drafted = outcome.accepted.tolist(), draft.tolist()
        emitted = outcome.tokens(draft).tolist()
        for r, slot in enumerate(slots):
            request = self.requests[slot]
            assert request is not None
            kept = self._cut(emitted[r][: accepted[r] + 1], len(request.tokens))
            request.tokens.extend(kept)
            request.steps.append(
                Step(
                    position=int(lens[r]),
                    drafted=tuple(drafted[r]),
                    verify_len=draft.shape[1],
                    accepted=accepted[r],
                    kept=len(kept),
                    confidence=tuple(confidence[r]),
                )
            )

    def _cut(self, tokens: list[int], have: int) -> list[int]:
        """Cut the step's tokens at the first stop token and at the token limit."""
        tokens = tokens[: self.settings.max_new_tokens - have]
        for place, token in enumerate(tokens):
            if token in self.settings.stop_ids:
                return tokens[: place + 1]
        return tokens

    def take_finished(self) -> list[tuple[int, Generation]]:
        """Remove finished requests from their slots and return them."""
        finished = []
        for slot in self.active():
            request = self.requests[slot]
            assert request is not None
            stopped = request.tokens[-1] in self.settings.stop_ids
            if not stopped and len(request.tokens) < self.settings.max_new_tokens:
                continue
            finish: Literal["stop", "length"] = "stop" if stopped else "length"
            generation = Generation(
                request.prompt_tokens, tuple(request.tokens), finish, tuple(request.steps)
            )
            finished.append((request.index, generation))
            self.requests[slot] = None
        return finished
