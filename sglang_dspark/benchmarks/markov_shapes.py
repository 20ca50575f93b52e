"""Make batches of odd shapes for `kernels.markov_sample`, for its tests, its benchmark and
`parity_rows`, and compare results with the float64 reference.

Every position is compared given the drafts before it. Batches of a vanilla head with integer
weights have no rounding: there logits and, without a temperature, drafts are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.kernels.markov_blocks import Blocks, Judge, Mixing, Noise
from sglang_dspark.kernels.markov_reference import Reference, markov_torch
from sglang_dspark.kernels.markov_sample import Drafts, Launch, markov_triton

VOCABULARIES = (2, 3, 5, 11, 17, 33, 64, 65, 101, 127, 129, 200, 257, 333, 511, 700)
RANKS = (1, 3, 8, 16, 17, 33, 40)
WIDTHS = (1, 7, 16, 33)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = ("vanilla", "gated", "vanilla", "rnn")  # in turn
KEYS = (0, 1, 0x2D2A9C317E44B1F3, 2**63 - 1)
_GRID = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # relative


@dataclass(frozen=True)
class Batch:
    """exact: no logit is rounded."""

    blocks: Blocks
    exact: bool


def batches(count: int, seed: int, device: str = "cpu") -> Iterator[Batch]:
    """Yield `count` batches of 1 to 9 requests and 1 to 7 positions; `turn` chooses their kind."""
    generator = torch.Generator().manual_seed(seed)
    for turn in range(count):
        yield batch(
            generator,
            requests=1 + turn % 9,
            gamma=1 + turn % 7,
            vocab=VOCABULARIES[turn % len(VOCABULARIES)],
            turn=turn * 37 % 251,
            device=device,
        )


def batch(
    generator: torch.Generator,
    requests: int,
    gamma: int,
    vocab: int,
    turn: int,
    device: str = "cpu",
) -> Batch:
    """Make one batch; turn chooses by bits and remainders: integer weights (ties), types, head,
    temperatures, a reduced vocabulary, whether logits are saved, the confidence head."""
    exact, rank = turn % 3 == 0, RANKS[turn % len(RANKS)]
    head = "vanilla" if exact else HEADS[turn % 4]
    weights, logits = TYPES[turn // 3 % 3], TYPES[turn // 9 % 3]
    base, w1, w2 = (
        made(generator, shape, exact)
        for shape in ((requests, gamma, vocab), (vocab, rank), (vocab, rank))
    )
    given = Blocks(
        base=logits_of(base, logits, turn),
        anchors=torch.randint(vocab, (requests,), generator=generator),
        w1=w1.to(weights),
        w2=w2.to(weights),
    )
    given = _mixed(generator, given, head)
    if turn & 2:
        given = _reduced(generator, given)
    if turn % 5:
        given = _sampled(generator, given, KEYS[turn % 4])
    if turn % 7:
        given = _keeping(given)
    if turn % 2:
        given = _judged(generator, given, WIDTHS[turn % 4], with_markov=turn % 3 > 0)
    return Batch(on(given, device), exact)


def made(generator: torch.Generator, shape: tuple[int, ...], exact: bool) -> Tensor:
    """Draw normal numbers; exact: integers from -2 to 2, whose sums no type rounds."""
    if exact:
        return torch.randint(-2, 3, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def logits_of(base: Tensor, dtype: torch.dtype, turn: int) -> Tensor:
    """Convert to `dtype`; in every second case as rows of a wider tensor [R, gamma, n + 3]."""
    kept = base.to(dtype)
    return torch.nn.functional.pad(kept, (0, 3))[..., :-3] if turn & 4 else kept


def _mixed(generator: torch.Generator, given: Blocks, head: str) -> Blocks:
    if head == "vanilla":
        return given
    rank, outputs = given.w1.shape[1], (1 if head == "gated" else 3)
    weight = made(generator, (outputs * rank, (1 if head == "gated" else 2) * rank + 2), False)
    hidden = made(generator, (*given.base.shape[:2], outputs * rank), False)
    mixing = Mixing(hidden.to(given.base.dtype), weight.to(given.w1.dtype)[:, 1:-1])
    return replace(given, mixing=mixing)


def _reduced(generator: torch.Generator, given: Blocks) -> Blocks:
    """Keep about half of the vocabulary; the logits' columns are its tokens."""
    vocab = len(given.w1)
    kept = torch.randperm(vocab, generator=generator)[: max(1, vocab // 2)].sort().values
    return replace(given, base=given.base[..., kept], w2=given.w2[kept], draft_ids=kept)


def _sampled(generator: torch.Generator, given: Blocks, key: int) -> Blocks:
    """Add temperatures from 0.3 to 2, some of them 0, and noise."""
    requests = len(given.base)
    warm = 0.3 + 1.7 * torch.rand(requests, generator=generator)
    greedy = torch.rand(requests, generator=generator) < 0.2
    offset = torch.randint(2**40, (1,), generator=generator)
    return replace(given, temperatures=warm.masked_fill(greedy, 0.0), noise=Noise(key, offset))


def _keeping(given: Blocks) -> Blocks:
    """Add a buffer for the logits: by token id where the vocabulary is reduced."""
    requests, gamma, width = given.base.shape
    columns = width if given.draft_ids is None else len(given.w1)
    room = torch.full((requests, gamma, columns), -torch.inf, dtype=given.step_dtype)
    return replace(given, logits=room)


def _judged(generator: torch.Generator, given: Blocks, depth: int, with_markov: bool) -> Blocks:
    width = depth + (given.w1.shape[1] if with_markov else 0)
    features = made(generator, (*given.base.shape[:2], depth), False)
    judge = Judge(
        features=features.to(given.base.dtype),
        weight=made(generator, (width,), False),
        bias=made(generator, (1,), False),
    )
    return replace(given, judge=judge)


def on(given: Any, device: str) -> Any:
    """Copy all tensors to a device."""
    parts = {each.name: getattr(given, each.name) for each in fields(given)}
    there = {
        name: part.to(device) if isinstance(part, Tensor) else on(part, device)
        for name, part in parts.items()
        if isinstance(part, Tensor) or is_dataclass(part)
    }
    return replace(given, **there)


@dataclass(frozen=True)
class Outcome:
    """wrong: faults, a line each. undecided: drafts [R, gamma] bool that rounding decided."""

    wrong: tuple[str, ...]
    undecided: Tensor


def compared(given: Batch, found: Drafts) -> Outcome:
    """Compare the drafts of a batch, which contains their logits, with torch's."""
    blocks = given.blocks
    expected = markov_torch(blocks, found.tokens)
    columns = found.tokens
    if blocks.draft_ids is not None:
        columns = torch.searchsorted(blocks.draft_ids, found.tokens)
        columns = columns.clamp(max=len(blocks.draft_ids) - 1)
    room = _room(given, expected)
    wrong = list(_kept_wrong(blocks, expected.logits, room))
    if blocks.temperatures is not None:
        hot = blocks.temperatures[:, None, None]
        warm = 1e-5 * (1 + expected.keys.abs())
        room = torch.where(hot > 0, room / torch.where(hot > 0, hot, 1.0) + warm, room)
    taken = expected.keys.gather(-1, columns[..., None]) + room.gather(-1, columns[..., None])
    best = (expected.keys - room).amax(-1)
    off = taken[..., 0] < best
    if blocks.draft_ids is not None:
        off |= blocks.draft_ids[columns] != found.tokens
    wrong += [f"draft {place} is not drawn" for place in off.nonzero().tolist()]
    if expected.confidence is not None and found.confidence is not None:
        far = (found.confidence - expected.confidence).abs() > 1e-4
        wrong += [f"confidence {place}" for place in far.nonzero().tolist()]
    # Of equal tokens the lowest is drawn.
    undecided = found.tokens != expected.tokens
    if given.exact:
        cold = torch.ones_like(undecided)
        if blocks.temperatures is not None:
            cold = (blocks.temperatures == 0)[:, None].expand_as(undecided)
        wrong += [f"draft {place} is higher" for place in (undecided & cold).nonzero().tolist()]
    return Outcome(tuple(wrong), undecided & ~off)


def _room(given: Batch, expected: Reference) -> Tensor:
    """Return the tolerance of logits [R, gamma, n]: two steps of the coarser type."""
    blocks, size = given.blocks, expected.logits.double().abs()
    if given.exact:
        return torch.zeros_like(size)
    grid = max(_GRID[each] for each in (blocks.step_dtype, blocks.w1.dtype))
    room = 1e-5 + 2 * grid * (1 + size + blocks.base.double().abs())
    if blocks.mixing is None or not blocks.mixing.recurrent:
        return room
    # The rounding of a recurrent state is carried on, and grows.
    return room * torch.arange(1, size.shape[1] + 1, device=size.device)[:, None]


def _kept_wrong(blocks: Blocks, expected: Tensor, room: Tensor) -> Iterator[str]:
    """Yield faults of saved logits: differences, and written columns outside the vocabulary."""
    if blocks.logits is None:
        return
    kept, outside = blocks.logits, torch.zeros(blocks.logits.shape[-1], dtype=torch.bool)
    if blocks.draft_ids is not None:
        outside = torch.ones_like(outside).index_fill(0, blocks.draft_ids.cpu(), False)
        written = blocks.logits[..., outside.to(kept.device)]
        if bool((written != -torch.inf).any()):
            yield "logits of tokens outside are written"
        kept = kept[..., blocks.draft_ids]
    far = (kept.double() - expected.double()).abs() > room
    if bool(far.any()):
        yield f"logits {far.nonzero()[0].tolist()}"


def parity_rows(
    count: int = 400, device: str = "cuda", share: tuple[int, int] = (0, 1)
) -> dict[str, object]:
    """Compare the operator with the reference on batches.

    share: which of n shares of the `count` batches, from 0, and n. Returns the numbers of blocks
    and drafts, of drafts that rounding decided, and the faults. Without a GPU it runs in
    Triton's interpreter.
    """
    blocks, drafts, undecided = 0, 0, 0
    wrong: list[str] = []
    how = None if device == "cuda" else Launch(block=256)
    scratch = torch.zeros(1 + 9 * 7, dtype=torch.int64, device=device)
    for number, given in islice(enumerate(batches(count, 0, device)), share[0], None, share[1]):
        found = markov_triton(given.blocks, scratch, how)
        outcome = compared(given, found)
        wrong += [f"batch {number}: {line}" for line in outcome.wrong]
        blocks, drafts = blocks + len(found.tokens), drafts + found.tokens.numel()
        undecided += int(outcome.undecided.sum())
    if bool(scratch.any()):
        wrong.append("the scratch is not zero behind the launch")
    return {"blocks": blocks, "drafts": drafts, "undecided": undecided, "wrong": wrong}
