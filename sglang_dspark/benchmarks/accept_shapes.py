"""Make steps of odd shapes for the accept rules of `kernels/`, the same for their tests and their
benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from sglang_dspark.kernels.accept_windows import Windows

VOCABULARIES = (2, 3, 5, 11, 17, 33, 64, 65, 101, 127, 129, 200, 257, 333, 511, 700)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def steps(count: int, seed: int, device: str = "cpu") -> Iterator[Windows]:
    """Yield `count` steps of 1 to 9 requests and 1 to 7 drafts; `turn` chooses their settings."""
    generator = torch.Generator().manual_seed(seed)
    for turn in range(count):
        yield step(
            generator,
            requests=1 + turn % 9,
            gamma=1 + turn % 7,
            vocab=VOCABULARIES[turn % len(VOCABULARIES)],
            turn=turn * 37 % 251,
            device=device,
        )


def step(
    generator: torch.Generator,
    requests: int,
    gamma: int,
    vocab: int,
    turn: int,
    device: str = "cpu",
) -> Windows:
    """Make one step; turn chooses by bits and remainders: coarse logits (ties), cuts, draft, types.

    Drafts are drawn near the target, so that about half are accepted; rows after a request's
    verified ones are NaN, as they must not be read.
    """
    logits = 2 * torch.randn(requests, gamma + 1, vocab, generator=generator)
    near = logits[:, :gamma] + torch.randn(requests, gamma, vocab, generator=generator)
    if turn & 1:
        logits, near = torch.round(logits), torch.round(near)  # ties
    kind = TYPES[turn % 3]
    temperatures = 0.5 + torch.rand(requests, generator=generator)
    draft_temperatures = 0.5 + torch.rand(requests, generator=generator)
    dense = turn % 5 != 4
    weights = (near.to(kind).float() / draft_temperatures[:, None, None]).softmax(-1)
    drawn = torch.multinomial(weights.view(-1, vocab), 1, generator=generator).view(requests, gamma)
    lengths = torch.randint(0, gamma + 1, (requests,), generator=generator).int()
    behind = torch.arange(gamma + 1) > lengths[:, None]
    logits[behind] = torch.nan
    extra = _settings(generator, requests, vocab, turn)
    if dense:
        extra |= {"draft_logits": near.to(kind), "draft_temperatures": draft_temperatures}
    given = Windows(
        drafts=drawn if dense else near.argmax(-1),
        lengths=lengths,
        logits=logits.to(kind).view(-1, vocab),
        temperatures=temperatures,
        accept_uniforms=torch.rand(requests, gamma, generator=generator, dtype=torch.float64),
        bonus_uniforms=torch.rand(requests, generator=generator, dtype=torch.float64),
        **extra,
    )
    return on(given, device)


def _settings(
    generator: torch.Generator, requests: int, vocab: int, turn: int
) -> dict[str, Tensor]:
    """Draw cuts, greedy requests and seeds in turn; for each cut some requests have none."""
    found: dict[str, Tensor] = {}
    free = torch.rand(requests, generator=generator) < 0.2
    if turn & 2:
        k = torch.randint(1, vocab + 2, (requests,), generator=generator)
        found["top_k"] = k.masked_fill(free, 1 << 30).int()
    if turn & 4:
        p = 0.3 + 0.69 * torch.rand(requests, generator=generator)
        found["top_p"] = p.masked_fill(free, 1.0)
    if turn & 8:
        found["min_p"] = (0.3 * torch.rand(requests, generator=generator)).masked_fill(free, 0.0)
    if turn % 4 == 1:
        found["greedy"] = torch.rand(requests, generator=generator) < 0.3
    if turn % 3 == 2:
        found["seeded"] = torch.rand(requests, generator=generator) < 0.6
        found["seeds"] = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator)
        found["anchors"] = torch.randint(0, 1 << 20, (requests,), generator=generator)
    return found


def with_lists(given: Windows, turn: int) -> Windows:
    """Return the step with a top-k for each request and without seeds, for `accept_listed`.

    Greedy requests have a top-k of 1 and a temperature of 0. Every third turn keeps few tokens.
    """
    vocab = given.logits.shape[1]
    most = 4 if turn % 3 == 0 else min(vocab + 2, 1024)
    generator = torch.Generator().manual_seed(turn)
    top_k = torch.randint(1, most + 1, (len(given.drafts),), generator=generator).int()
    if given.greedy is not None:
        top_k = top_k.masked_fill(given.greedy, 1)
        given = replace(given, temperatures=given.temperatures.masked_fill(given.greedy, 0.0))
    return replace(given, top_k=top_k, seeded=None, seeds=None, anchors=None)


def with_any_cuts(given: Windows) -> Windows:
    """Return the step with its own cuts and seeds; greedy requests as in `with_lists`."""
    if given.greedy is None:
        return given
    every = torch.full_like(given.lengths, 1 << 30) if given.top_k is None else given.top_k
    return replace(
        given,
        top_k=every.masked_fill(given.greedy, 1),
        temperatures=given.temperatures.masked_fill(given.greedy, 0.0),
    )


def bounds(given: Windows) -> tuple[int, int]:
    """Return `most` and `rows` of `accept_listed_triton` for a step of `with_lists`."""
    assert given.top_k is not None
    return int(given.top_k.max()), rows_of(given)


def rows_of(given: Windows) -> int:
    """Return the number of verified rows, the sum of lengths + 1."""
    return int(given.lengths.sum()) + len(given.drafts)


def on(given: Windows, device: str) -> Windows:
    """Copy the step to a device."""
    parts = {f.name: getattr(given, f.name) for f in fields(given)}
    there = {name: part.to(device) for name, part in parts.items() if part is not None}
    return Windows(**there)
