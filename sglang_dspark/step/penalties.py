"""Apply penalties to a step's requests, by counts of output tokens that stay on the device.

Upstream's DSPARK applies none: `apply_dflash_verify_logits_adjustments` (sglang/srt/speculative/
dflash_utils.py) reads a field for penalties that no longer exists. With overlap a step is launched
before the previous one's tokens are on the host. So the counts of a new request, or of a retracted
one, start with the host's list, plus its anchor; each step then adds its emitted tokens.

Memory beyond the model's: 4 V bytes a request for its counts, allocated at start where all requests
need no more than AT_START (29 MB for 48 requests of 151,936 tokens).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.verify.penalties import Penalties, penalise_windows

logger = logging.getLogger(__name__)

RowGeneration = tuple[int, int]  # pool row and its generation
Launch = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Penalties], None]
AT_START = 256 << 20  # bytes of counts
AT_ONCE = 16 << 20  # bytes of float32 logits that torch penalises at once
_SIZE = 4  # bytes of a count, and of a logit in float32


class OutputCounts:
    """Count output tokens of penalised requests."""

    def __init__(self) -> None:
        self.table: Tensor | None = None  # [slots, V] int32 on the device
        self._slots: dict[RowGeneration, int] = {}

    def slots(self, requests: Sequence[RowGeneration]) -> tuple[list[int], list[int]]:
        """Return the slots of a step's requests, and the places in `requests` of new ones.

        A request that is not in `requests` loses its slot: its tokens are on the host when it is
        scheduled again.
        """
        kept = {each: self._slots[each] for each in requests if each in self._slots}
        taken = set(kept.values())
        free = (slot for slot in range(len(requests)) if slot not in taken)
        new = [place for place, each in enumerate(requests) if each not in kept]
        kept |= {requests[place]: next(free) for place in new}
        self._slots = kept
        return [kept[each] for each in requests], new

    def reserve(self, slots: int, width: int, device: torch.device) -> None:
        """Allocate the table at start; it grows while serving if it is large or memory is short."""
        size = slots * width * _SIZE
        if size > AT_START:
            logger.info(
                "sglang-dspark: %d MB of output counts are allocated for the first request with "
                "penalties",
                size // 10**6,
            )
            return
        try:
            self.table = torch.zeros(slots, width, dtype=torch.int32, device=device)
        except torch.OutOfMemoryError:
            logger.warning("sglang-dspark: no memory for %d MB of output counts", size // 10**6)
            return
        logger.info("sglang-dspark: output counts of penalties take %d MB", size // 10**6)

    def grown(self, slots: int, like: Tensor) -> Tensor:
        """Return the table with at least that many slots, tokens and device as logits [N, V].

        Raises torch.OutOfMemoryError where the device has no memory for `slots`; nothing changed.
        """
        old = self.table
        if old is None or len(old) < slots or old.shape[1] != like.shape[1]:
            rows = max(slots, 2 * len(old) if old is not None else 0)
            try:
                self.table = _copied(old, rows, like)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                self.table = _copied(old, slots, like)
        assert self.table is not None
        return self.table


def _copied(old: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """Make a table of zeros with the old one's counts in its first slots."""
    table = torch.zeros(rows, like.shape[1], dtype=torch.int32, device=like.device)
    if old is not None and old.shape[1] == like.shape[1]:
        table[: len(old)] = old
    return table


@dataclass(frozen=True)
class StepPenalties:
    """The penalised requests of one step.

    reqs: P of SGLang's requests. places: their places in the batch. slots: their slots in the
    counts. new: those of the P that are counted for the first time.
    """

    counts: OutputCounts
    reqs: Sequence[Any]
    places: list[int]
    slots: list[int]
    new: list[int]

    def apply(
        self, logits: Tensor, window: Tensor, anchors: Tensor, launch: Launch | None = None
    ) -> None:
        """Penalise the first W rows of each window of logits [R * (gamma + 1), V], in place.

        window: [R, W] tokens. anchors: [R] positions. launch: `kernels.penalise.penalise_triton`;
        None: torch, some requests at once.
        """
        table = self.counts.grown(max(self.slots) + 1, logits)
        rows, slots = _upload(self.places, logits), _upload(self.slots, logits)
        prompts = _upload([len(req.origin_input_ids) for req in self.reqs], logits)
        outputs = anchors[rows].long() + 1 - prompts  # [P], the anchors included
        if self.new:
            self._begin(table, slots, outputs, window[rows, 0])
        windows = logits.view(len(window), -1, logits.shape[1])[:, : window.shape[1]]
        settings = settings_of(self.reqs, logits)
        if launch is not None:
            launch(windows, rows, window, table, slots, outputs, settings)
            return
        at_once = max(1, AT_ONCE // (logits.shape[1] * _SIZE))
        for begin in range(0, len(self.reqs), at_once):
            part = slice(begin, begin + at_once)
            penalise_windows(
                windows, rows[part], window, table[slots[part]], outputs[part], settings.of(part)
            )

    def _begin(self, table: Tensor, slots: Tensor, outputs: Tensor, anchors: Tensor) -> None:
        """Count earlier output of new requests: the host's list, and an anchor it lacks."""
        listed = [self.reqs[p].output_ids for p in self.new]
        new = _upload(self.new, table)  # indexing by host values would synchronise
        mine = slots[new]
        table.index_fill_(0, mine, 0)
        cells = [
            self.slots[p] * table.shape[1] + token
            for p, tokens in zip(self.new, listed, strict=True)
            for token in tokens
        ]
        known = _upload(cells, table)
        flat = table.view(-1)
        flat.scatter_add_(0, known, torch.ones_like(known, dtype=table.dtype))
        missing = outputs[new] - _upload([len(tokens) for tokens in listed], table)
        flat.scatter_add_(
            0, mine * table.shape[1] + anchors[new], missing.clamp(0, 1).to(table.dtype)
        )

    def count(self, tokens: Tensor, lens: Tensor) -> None:
        """Count the tokens that the step emits: of tokens [R, W] the first lens [R]."""
        table = self.counts.table
        assert table is not None, "penalties are applied before tokens are counted"
        rows, slots = _upload(self.places, table), _upload(self.slots, table)
        emitted = torch.arange(tokens.shape[1], device=table.device) < lens[rows, None]  # [P, W]
        cells = slots[:, None] * table.shape[1] + tokens[rows]
        # Tokens that are not emitted may have any value: they add 0 to cell 0.
        table.view(-1).scatter_add_(
            0, cells.where(emitted, 0).flatten(), emitted.flatten().to(table.dtype)
        )


def penalties_of(counts: OutputCounts, batch: Any, pool: Any) -> StepPenalties | None:
    """Return the penalised requests of a batch, or None. pool: SGLang's pool of requests."""
    places = [r for r, req in enumerate(batch.reqs) if is_penalised(req)]
    if not places:
        return None
    rows = row_generations(batch, pool)
    slots, new = counts.slots([rows[r] for r in places])
    return StepPenalties(counts, [batch.reqs[r] for r in places], places, slots, new)


def is_penalised(req: Any) -> bool:
    """Return whether a request's logits depend on its output so far."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or len(req.output_ids) < params.min_new_tokens
    )


def row_generations(batch: Any, pool: Any) -> list[RowGeneration]:
    """Return pool rows and generations of a batch's requests; both are on the host."""
    rows = batch.req_pool_indices_cpu
    return list(zip(rows.tolist(), pool.req_generation[rows].tolist(), strict=True))


def settings_of(reqs: Sequence[Any], like: Tensor) -> Penalties:
    """Upload the settings of P requests to the device of `like`."""
    params = [req.sampling_params for req in reqs]
    short = (len(req.output_ids) < req.sampling_params.min_new_tokens for req in reqs)
    stops = [stop_ids(req) if each else [] for req, each in zip(reqs, short, strict=True)]
    longest = max(1, *map(len, stops))
    padded = [ids + (ids[-1:] or [0]) * (longest - len(ids)) for ids in stops]
    minimum = [[p.min_new_tokens if ids else 0] for p, ids in zip(params, stops, strict=True)]
    factors = [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params]
    frequency, presence, repetition = _upload(factors, like, torch.float32).split(1, dim=1)
    return Penalties(
        frequency, presence, repetition, minimum=_upload(minimum, like), stops=_upload(padded, like)
    )


def stop_ids(req: Any) -> list[int]:
    """Return the tokens not allowed before min_new_tokens, as SGLang's penaliser lists them."""
    found = {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    found.update(req.sampling_params.stop_token_ids or (), req.eos_token_ids or ())
    return sorted(found - {None})


def _upload(values: Sequence[Any], like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy host numbers to the device of `like`, without waiting for it."""
    uploaded: Tensor = upstream.async_h2d(values, dtype=dtype, device=like.device)
    return uploaded
