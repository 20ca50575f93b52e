"""Compare two outcomes of greedy acceptance."""

from __future__ import annotations

import torch

from sglang_dspark.kernels.accept_greedy import Emitted


def different(found: Emitted, expected: Emitted) -> list[str]:
    """Return the outputs that differ; of tokens only those emitted, the others are unused."""
    names = [name for name in Emitted._fields if name != "tokens"]
    off = [name for name in names if not torch.equal(getattr(found, name), getattr(expected, name))]
    behind = (
        torch.arange(found.tokens.shape[1], device=found.tokens.device) >= expected.emitted[:, None]
    )
    same = (found.tokens == expected.tokens) | behind
    return off + ([] if bool(same.all()) else ["tokens"])
