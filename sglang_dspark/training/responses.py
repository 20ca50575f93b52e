"""Generate responses of the target with continuous batching.

The hidden states that training needs are saved while decoding, so that no second pass over the data
is made (paper, 5.1). In a conversation the target answers each user turn, and later turns see the
answers before them. A given answer is read instead, all at once.

A prompt's answers are sampled with its own random numbers, independent of other requests. So a run
that continues makes the answers of one that was never stopped, up to rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.prompts import Prompt
from sglang_dspark.training.store import Response
from sglang_dspark.verify.rejection import sample_inverse_cdf

_ROWS = 64  # hidden states that go through the LM head at a time


@dataclass
class _Slot:
    """A conversation in flight: its tokens, its current answer's start, and earlier answers."""

    prompt: Prompt
    tokens: list[int]
    began: int
    turns: list[tuple[int, int]] = field(default_factory=list)


class ResponseGenerator:
    """`rows` slots, filled from a stream of prompts; each sequence is yielded as it ends."""

    def __init__(
        self,
        target: TargetModel,
        rows: int,
        max_len: int,
        stop_ids: frozenset[int],
        *,
        keep_states: bool = True,
        seed: int = 0,
    ):
        self.target, self.rows, self.max_len = target, rows, max_len
        self.device = target.device
        self.stop_ids, self.keep_states = stop_ids, keep_states
        self.cache = target.new_cache(rows, max_len)
        self.slots: list[_Slot | None] = [None] * rows
        self.lens = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.temperature = torch.zeros(rows, device=self.device)
        self.seed = seed
        # for sampling the token at each place of each row
        self.uniforms = torch.zeros(rows, max_len + 1, dtype=torch.float64, device=self.device)
        width = len(target.layer_ids) * target.config.hidden_size
        size = (rows, max_len) if keep_states else (rows, 0)
        half, d = torch.bfloat16, target.config.hidden_size
        self.features = torch.zeros(*size, width, dtype=half, device=self.device)
        self.hidden = torch.zeros(*size, d, dtype=half, device=self.device)
        self.log_partition = torch.zeros(size, device=self.device)

    def run(self, prompts: Iterable[Prompt], tick: Callable[[int], None]) -> Iterator[Response]:
        """Yield finished sequences; `tick(n)` is called with each step's number of tokens."""
        queue = iter(prompts)
        while True:
            self._admit(queue)
            active = [i for i, slot in enumerate(self.slots) if slot]
            if not active:
                return
            yield from self._finished(active)
            active = [i for i, slot in enumerate(self.slots) if slot]
            if active:
                self._step()
                tick(len(active))

    def _admit(self, queue: Iterator[Prompt]) -> None:
        free = [i for i, slot in enumerate(self.slots) if slot is None]
        batch = [(i, p) for i, p in zip(free, queue, strict=False)]
        for start in range(0, len(batch), 16):
            self._prefill(batch[start : start + 16])

    def _prefill(self, batch: list[tuple[int, Prompt]]) -> None:
        rows = torch.tensor([i for i, _ in batch], device=self.device)
        temperatures = [p.temperature for _, p in batch]
        self.temperature[rows] = torch.tensor(temperatures, device=self.device)
        self.uniforms[rows] = torch.stack([self._draws(p.id) for _, p in batch]).to(self.device)
        self.lens[rows] = 0
        self.log_partition[rows] = 0  # of the last conversation, and of idle steps
        # a given answer is read without its last token: nothing is predicted from it
        texts = [[*p.ids, *p.answer[:-1]] for _, p in batch]
        chosen = self._read(rows, texts, [len(p.ids) - 1 for _, p in batch])
        for (i, prompt), token in zip(batch, chosen.tolist(), strict=True):
            answer = prompt.answer or (token,)
            self.slots[i] = _Slot(prompt, [*prompt.ids, *answer], len(prompt.ids))

    def _draws(self, prompt_id: str) -> Tensor:
        """Return the uniforms [max_len + 1] of a prompt's answers, on the CPU."""
        digest = hashlib.sha256(f"{self.seed} {prompt_id}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]))
        return torch.rand(self.uniforms.shape[1], generator=generator, dtype=torch.float64)

    def _read(
        self, rows: Tensor, texts: Sequence[Sequence[int]], firsts: Sequence[int] | None = None
    ) -> Tensor:
        """Read more tokens of each row after its present ones; return the tokens sampled next [R].

        firsts: of each text, the token from which the partition function is saved; None: the last.
        """
        sizes = torch.tensor([len(ids) for ids in texts], device=self.device)
        tokens = torch.zeros(len(texts), int(sizes.max()), dtype=torch.long)
        for r, ids in enumerate(texts):
            tokens[r, : len(ids)] = torch.tensor(ids)
        lens = self.lens[rows]
        out = self.target.forward(tokens.to(self.device), lens, self.cache, rows)
        last = torch.arange(len(texts), device=self.device), sizes - 1
        logits = self.target.logits(out.hidden[last])
        if self.keep_states:
            for r, (row, n, size) in enumerate(
                zip(rows.tolist(), lens.tolist(), sizes.tolist(), strict=True)
            ):
                self.features[row, n : n + size] = out.features[r, :size].bfloat16()
                self.hidden[row, n : n + size] = out.hidden[r, :size].bfloat16()
            self.log_partition[rows, lens + sizes - 1] = logits.logsumexp(-1)
            for r, first in enumerate(firsts or ()):
                self._keep_partition(rows[r], int(lens[r]) + first, out.hidden[r, first : sizes[r]])
        self.lens[rows] = lens + sizes
        return self._sample(logits, self.temperature[rows], self.uniforms[rows, self.lens[rows]])

    def _keep_partition(self, row: Tensor, start: int, hidden: Tensor) -> None:
        """Save logsumexp of the logits after hidden [n, d], at the row's positions from `start`."""
        for offset in range(0, len(hidden) - 1, _ROWS):  # the last one is saved already
            logits = self.target.logits(hidden[offset : offset + _ROWS])
            at = start + offset
            self.log_partition[row, at : at + len(logits)] = logits.logsumexp(-1)

    def _next_turn(self, i: int, slot: _Slot) -> bool:
        """Close the slot's answer and read the next user turn.

        Returns False after the last turn, or if the conversation would not fit.
        """
        slot.turns.append((slot.began, len(slot.tokens)))
        if len(slot.turns) > len(slot.prompt.later):
            return False
        later = slot.prompt.later[len(slot.turns) - 1]
        if slot.tokens[-1] in self.stop_ids and later[0] in self.stop_ids:
            later = later[1:]  # only a truncated answer lacks the stop token
        if len(slot.tokens) + len(later) + 1 >= self.max_len:
            return False
        row = torch.tensor([i], device=self.device)
        token = self._read(row, [[slot.tokens[-1], *later]])
        slot.tokens += later
        slot.began = len(slot.tokens)
        slot.tokens.append(int(token))
        return True

    def _step(self) -> None:
        last = [[slot.tokens[-1] if slot else 0] for slot in self.slots]
        tokens = torch.tensor(last, device=self.device)
        lens = self.lens
        out = self.target.forward(tokens, lens, self.cache)
        logits = self.target.logits(out.hidden[:, 0])
        index = torch.arange(self.rows, device=self.device)
        if self.keep_states:
            self.log_partition[index, lens] = logits.logsumexp(-1)
            self.features[index, lens] = out.features[:, 0].bfloat16()
            self.hidden[index, lens] = out.hidden[:, 0].bfloat16()
        chosen = self._sample(logits, self.temperature, self.uniforms[index, lens + 1])
        for slot, token in zip(self.slots, chosen.tolist(), strict=True):
            if slot:
                slot.tokens.append(token)
        self.lens += torch.tensor([slot is not None for slot in self.slots], device=self.device)

    def _sample(self, logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
        """Sample token ids [R]: logits [R, V], temperature [R] (0: greedy), uniforms [R]."""
        greedy = logits.argmax(-1)
        hot = temperature > 0
        if hot.any():
            probs = torch.softmax(logits[hot] / temperature[hot, None], -1)
            greedy[hot] = sample_inverse_cdf(probs, uniforms[hot])
        return greedy

    def _finished(self, active: list[int]) -> Iterator[Response]:
        for i in active:
            slot = self.slots[i]
            assert slot is not None
            made = len(slot.tokens) - slot.began
            over = made >= slot.prompt.max_new_tokens or len(slot.tokens) >= self.max_len
            over = over or len(slot.prompt.answer) > 0
            if (slot.tokens[-1] in self.stop_ids or over) and not self._next_turn(i, slot):
                yield self._sequence(i, slot)
                self.slots[i] = None
                self.lens[i] = 0

    def _sequence(self, i: int, slot: _Slot) -> Response:
        n = len(slot.tokens) if self.keep_states else 0
        features, hidden = self.features[i, :n].cpu().clone(), self.hidden[i, :n].cpu().clone()
        if n:
            features[-1], hidden[-1] = 0, 0
        prompt = slot.prompt
        tokens = torch.tensor(slot.tokens)
        log_partition = self.log_partition[i, :n].cpu().clone()
        return Response(
            prompt.id,
            prompt.domain,
            prompt.temperature,
            len(prompt.ids),
            tokens,
            features,
            hidden,
            log_partition,
            tuple(slot.turns) if len(slot.turns) > 1 else (),
        )
