"""Compute experts and residual streams for the few rows of a draft block (csrc/experts.cpp).

`drafter/moe.py` and `drafter/hyper_connections.py` compute the same in several hundred torch calls
a layer (20 Sinkhorn rounds alone are 240), which cost more than the arithmetic; they compute what
these kernels do not support: other dtypes, many rows, other widths. Each expert's weights are read
once for all its rows. These are in token order, and a token's experts are added in order of rank:
given the routing, it is batch-invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear
from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.linear import LANES
from sglang_dspark.drafter.hyper_connections import SINKHORN_ROUNDS, HyperConnection, StreamRead
from sglang_dspark.drafter.moe import SharedExperts, permute_tokens

M = TypeVar("M", bound=nn.Module)
C = TypeVar("C")
_FLOAT = torch.float32
_P, _N = c_void_p, c_int64
_SWIGLU = ("swiglu", _P, _P, _N, _N, _P, _P, _N, _P, _P)
_EXPERTS = ("experts", _P, _P, _N, _N, _P, _P, _P, _N, _P, _N, _P, _P, _N, _P, _P)
_READ = ("read_streams", _P, _P, _N, _N, _N, _P, _N, c_float, c_float, _P, _P, _P, _P)
_WRITE = ("write_streams", _P, _N, _N, _N, _P, _N, _P, _P, _P, _N, _P, _P, _P)


def supports_rows(x: Any) -> bool:
    """Return whether the kernels support rows [n, ..., d]; they compute no gradients."""
    return (
        type(x) is Tensor
        and x.dtype is _FLOAT
        and x.is_cpu
        and 0 < x.shape[0] <= linear.MAX_ROWS
        and not torch.is_grad_enabled()
    )


class CompiledExperts:
    """Routed experts of one layer, their gate and up weights stacked and copied.

    A backend of experts/backends.py, registered by backends/moe/expert_backends.py."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor):
        """Copy gate, up: [E, I, d]; down: [E, d, I]; float32, I and d multiples of 16.

        Raises RuntimeError where this processor has no matrix kernel.
        """
        self._run, self.inner = _bound(_EXPERTS), int(gate.shape[1])
        self.gate_up = torch.cat([gate.detach(), up.detach()], 1).contiguous()  # [E, 2 I, d]
        self.down = down.detach().contiguous()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute x [T, d], ids [T, k], weights [T, k] -> [T, d]; RuntimeError if unsupported."""
        if not supports_rows(x):
            raise RuntimeError(f"rows {tuple(x.shape)} {x.dtype} are not for the compiled experts")
        plan = permute_tokens(ids, len(self.gate_up))
        x, weights, (rows, width), top = x.contiguous(), weights.contiguous(), x.shape, ids.shape[1]
        room, out = torch.empty(rows * top, 2 * width + 3 * self.inner), torch.empty(x.shape)
        self._run(
            x.data_ptr(), rows, width, plan.order.data_ptr(), plan.back.data_ptr(),
            plan.counts.data_ptr(), len(plan.counts), weights.data_ptr(), top,
            self.gate_up.data_ptr(), self.down.data_ptr(), self.inner, room.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out


class CompiledShared:
    """The shared experts of one layer, with copies of the module's weights."""

    def __init__(self, shared: SharedExperts):
        self._run, down = _bound(_SWIGLU), shared.down_proj.weight.detach()
        with torch.no_grad():
            both = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
        self.gate_up, self.down = both.contiguous(), down.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, d] -> [T, d]."""
        inner = self.down.shape[1]
        x, room, out = x.contiguous(), torch.empty(len(x), 3 * inner), torch.empty(x.shape)
        self._run(
            x.data_ptr(), *x.shape, self.gate_up.data_ptr(), self.down.data_ptr(), inner,
            room.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


class CompiledRead:
    """`StreamRead`, as used after the last block."""

    def __init__(self, read: StreamRead, *others: Tensor):
        """Copy phi and the bias of `read`. others: further rows of phi."""
        weights, self._run = read.weights, _bound(_READ)
        phi = torch.cat([weights.phi, *others]).detach()
        rows = _padded(len(phi)) - len(phi)  # the matrix kernel multiplies whole vectors of rows
        self.phi, self.bias = nn.functional.pad(phi, (0, 0, 0, rows)), _copied(weights.bias)
        self.alpha, self.epsilon = weights.alpha.item(), read.eps

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Read streams x [T, n, d] into [T, d]; also return their projection [T, size]."""
        x, (rows, n, width) = x.contiguous(), x.shape
        room, projected = torch.empty(n), torch.empty(rows, len(self.phi))
        out = torch.empty(rows, width)
        self._run(
            x.data_ptr(), rows, n, width, self.phi.data_ptr(), len(self.phi), self.epsilon,
            self.alpha, self.bias.data_ptr(), room.data_ptr(), projected.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out, projected


class CompiledStreams:
    """The residual connection around one block of n > 1 streams, from the module's own weights."""

    def __init__(self, c: HyperConnection):
        self._run: Any = operator(*_WRITE)
        self.read = CompiledRead(c.read, c.write.phi, c.mix.phi)
        self.alphas = _copied(torch.stack([c.write.alpha, c.mix.alpha]))
        self.write_bias, self.mix_bias = _copied(c.write.bias), _copied(c.mix.bias)

    def write(self, x: Tensor, block: Tensor, projected: Tensor) -> Tensor:
        """Add a block's output [T, d] to streams x [T, n, d] -> [T, n, d]; see `read`."""
        x, block, n = x.contiguous(), block.contiguous(), x.shape[1]
        room, out = torch.empty(2 * _padded(n * n) + 3 * _padded(n)), torch.empty(x.shape)
        self._run(
            x.data_ptr(), *x.shape, projected.data_ptr(), projected.shape[1],
            self.alphas.data_ptr(), self.write_bias.data_ptr(), self.mix_bias.data_ptr(),
            SINKHORN_ROUNDS, block.data_ptr(), room.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


def fast_path(kind: Callable[[M], C], module: M | None) -> C | None:
    """Make the fast path of a module.

    None for no module, one stream, or weights that the matrix kernel does not support."""
    if module is None:
        return None
    weights = list(module.parameters())
    plain = all(w.dtype is _FLOAT and w.is_cpu for w in weights)
    whole = all(w.shape[1] % LANES == 0 for w in weights if w.dim() == 2)
    return kind(module) if weights and plain and whole and linear.prepare() is not None else None


def _bound(what: Any) -> Callable[..., None]:
    """Bind an operator whose first argument is the matrix kernel. Raises RuntimeError without."""
    multiply, run = linear.prepare(), operator(*what)
    if multiply is None or run is None:
        raise RuntimeError("this processor has no matrix kernel")
    return partial(run, multiply.entry)


def _padded(n: int) -> int:
    return -(-n // LANES) * LANES


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous()
