"""Draw with seeds in compiled loops; verify/seeded.py is the reference (Numba).

Only tokens of positive probability are hashed, so a draw after top-k or top-p is fast. A logarithm
is computed only where the token could win: -log u >= 1 - u.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.jit import kernel
from sglang_dspark.verify.seeded import LEAST_WAIT

_LEAST, _LARGEST = np.float64(LEAST_WAIT), np.float64(0xFFFFFFFF)
_MOST = np.finfo(np.float64).max
_MARGIN = 1 - 1e-12  # rounding of the bound must not exclude a winner


@kernel
def _mixed(state, word):  # type: ignore[no-untyped-def]
    word = np.uint32(word * np.uint32(0xCC9E2D51))
    word = np.uint32((word << np.uint32(15)) | (word >> np.uint32(17)))
    state = np.uint32(state ^ np.uint32(word * np.uint32(0x1B873593)))
    state = np.uint32((state << np.uint32(13)) | (state >> np.uint32(19)))
    return np.uint32(state * np.uint32(5) + np.uint32(0xE6546B64))


@kernel
def _begun(seed, position):  # type: ignore[no-untyped-def]
    state = _mixed(np.uint32(0), np.uint32(seed & 0xFFFFFFFF))
    state = _mixed(state, np.uint32((seed >> 32) & 0xFFFFFFFF))
    return _mixed(state, np.uint32(position & 0xFFFFFFFF))


@kernel
def _uniform(begun, token):  # type: ignore[no-untyped-def]
    h = np.uint32(_mixed(begun, np.uint32(token)) ^ np.uint32(16))
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.float64(np.uint32(h ^ (h >> np.uint32(16)))) / _LARGEST


@kernel
def _wait(u):  # type: ignore[no-untyped-def]
    return max(-np.log(u), _LEAST) if u > 0 else _MOST


@kernel
def _choose(probs, seeds, positions, out):  # type: ignore[no-untyped-def]
    for n in range(probs.shape[0]):
        begun = _begun(seeds[n], positions[n])
        best, choice = np.inf, -1
        for v in range(probs.shape[1]):
            p = np.float64(probs[n, v])
            if p > 0:
                u = _uniform(begun, v)
                if choice >= 0 and (1 - u) * _MARGIN > best * p:
                    continue
                race = _wait(u) / p
                if choice < 0 or race < best:
                    best, choice = race, v
        out[n] = max(choice, 0)


@kernel
def _fill_waits(seeds, positions, tokens, out):  # type: ignore[no-untyped-def]
    for n in range(out.shape[0]):
        begun = _begun(seeds[n], positions[n])
        for i in range(out.shape[1]):
            out[n, i] = _wait(_uniform(begun, tokens[i]))


def choose(probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute `verify.seeded.seeded_choice`: probs [N, V] float32 or float64 -> [N] int64.

    seeds, positions: [N] int64.
    """
    out = torch.empty(len(probs), dtype=torch.int64)
    _choose(*(each.contiguous().numpy() for each in (probs, seeds, positions, out)))
    return out


def waits(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Compute `verify.seeded.waits`: seeds, positions [N], tokens [n] int64 -> [N, n] float32."""
    out = torch.empty(len(seeds), len(tokens))
    _fill_waits(*(each.contiguous().numpy() for each in (seeds, positions, tokens, out)))
    return out
