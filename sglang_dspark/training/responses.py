"""Responses by the target, with continuous batching; the hidden states that training needs are kept
as they pass by, so that no second pass over the data is made (paper, 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.prompts import Prompt
from sglang_dspark.training.store import Response


@dataclass
class _Slot:
    """A request in flight: its prompt and the tokens so far."""

    prompt: Prompt
    tokens: list[int]


class ResponseGenerator:
    """Fills `rows` slots from a stream of prompts and yields each sequence as it ends."""

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
        self.stop_ids, self.keep_states = stop_ids, keep_states
        self.cache = target.new_cache(rows, max_len)
        self.slots: list[_Slot | None] = [None] * rows
        self.lens = torch.zeros(rows, dtype=torch.long)
        self.temperature = torch.zeros(rows)
        self.generator = torch.Generator().manual_seed(seed)
        width = len(target.layer_ids) * target.config.hidden_size
        size = (rows, max_len) if keep_states else (rows, 0)
        self.features = torch.zeros(*size, width, dtype=torch.bfloat16)
        self.hidden = torch.zeros(*size, target.config.hidden_size, dtype=torch.bfloat16)
        self.log_partition = torch.zeros(size)

    def run(self, prompts: Iterable[Prompt], tick: Callable[[int], None]) -> Iterator[Response]:
        """Yield finished sequences; `tick(n)` is told how many tokens each step made."""
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
        rows = torch.tensor([i for i, _ in batch])
        sizes = torch.tensor([len(p.ids) for _, p in batch])
        tokens = torch.zeros(len(batch), int(sizes.max()), dtype=torch.long)
        for r, (_, prompt) in enumerate(batch):
            tokens[r, : len(prompt.ids)] = torch.tensor(prompt.ids)
        out = self.target.forward(tokens, torch.zeros_like(sizes), self.cache, rows)
        self.temperature[rows] = torch.tensor([p.temperature for _, p in batch])
        if self.keep_states:
            self.features[rows, : tokens.shape[1]] = out.features.bfloat16()
            self.hidden[rows, : tokens.shape[1]] = out.hidden.bfloat16()
        last = out.hidden[torch.arange(len(batch)), sizes - 1]
        logits = self.target.logits(last)
        chosen = self._sample(logits, self.temperature[rows])
        if self.keep_states:
            self.log_partition[rows, sizes - 1] = logits.logsumexp(-1)
        self.lens[rows] = sizes
        for (i, prompt), token in zip(batch, chosen.tolist(), strict=True):
            self.slots[i] = _Slot(prompt, [*prompt.ids, token])

    def _step(self) -> None:
        tokens = torch.tensor([[slot.tokens[-1] if slot else 0] for slot in self.slots])
        lens = self.lens
        out = self.target.forward(tokens, lens, self.cache)
        logits = self.target.logits(out.hidden[:, 0])
        if self.keep_states:
            index = torch.arange(self.rows)
            self.log_partition[index, lens] = logits.logsumexp(-1)
            self.features[index, lens] = out.features[:, 0].bfloat16()
            self.hidden[index, lens] = out.hidden[:, 0].bfloat16()
        chosen = self._sample(logits, self.temperature)
        for i, (slot, token) in enumerate(zip(self.slots, chosen.tolist(), strict=True)):
            if slot:
                slot.tokens.append(token)
                self.lens[i] += 1

    def _sample(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """logits [R, V], temperature [R] (0: greedy) -> token ids [R]."""
        greedy = logits.argmax(-1)
        hot = temperature > 0
        if hot.any():
            probs = torch.softmax(logits[hot] / temperature[hot, None], -1)
            greedy[hot] = torch.multinomial(probs, 1, generator=self.generator)[:, 0]
        return greedy

    def _finished(self, active: list[int]) -> Iterator[Response]:
        for i in active:
            slot = self.slots[i]
            assert slot is not None
            made = len(slot.tokens) - len(slot.prompt.ids)
            over = made >= slot.prompt.max_new_tokens or len(slot.tokens) >= self.max_len
            if slot.tokens[-1] in self.stop_ids or over:
                yield self._sequence(i, slot)
                self.slots[i] = None
                self.lens[i] = 0

    def _sequence(self, i: int, slot: _Slot) -> Response:
        n = len(slot.tokens) if self.keep_states else 0
        features, hidden = self.features[i, :n].clone(), self.hidden[i, :n].clone()
        if n:
            features[-1], hidden[-1] = 0, 0
        prompt = slot.prompt
        tokens = torch.tensor(slot.tokens)
        log_partition = self.log_partition[i, :n].clone()
        return Response(
            prompt.id,
            prompt.domain,
            prompt.temperature,
            len(prompt.ids),
            tokens,
            features,
            hidden,
            log_partition,
        )
