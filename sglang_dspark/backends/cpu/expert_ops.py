"""Compute experts and residual streams for the few rows of a draft block (Numba).

`drafter/moe.py` and `drafter/hyper_connections.py` compute the same in some hundred torch calls a
layer (20 Sinkhorn rounds alone are 240), which cost more than the arithmetic. Products are those of
linear.py, each expert's weights read once for all its rows. Rows of an expert are in token order
and a token's experts are added in order of rank: given the routing, a token is batch-invariant.

The modules compute what these kernels do not support: other dtypes, many rows, other widths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear
from sglang_dspark.backends.cpu.fused_ops import silu_and_mul_rows
from sglang_dspark.backends.cpu.jit import kernel, multiply_at
from sglang_dspark.backends.cpu.lanes import dots
from sglang_dspark.backends.cpu.linear import LANES, MAX_BLOCK_ROWS
from sglang_dspark.drafter.hyper_connections import SINKHORN_ROUNDS, HyperConnection, StreamRead
from sglang_dspark.drafter.moe import SharedExperts, permute_tokens
from sglang_dspark.float_ops import fma

_FLOAT = torch.float32
_ONE = np.float32(1.0)
_EPS = np.finfo(np.float32).eps


@kernel
def _swiglu(entry, x, gate_up, down, inner, room, activated, out):  # type: ignore[no-untyped-def]
    """out [n, d] = down(silu(gate x) * (up x)); addresses of gate_up [2 I, d] and down [d, I].

    room [n, 2 I] and activated [n, I] are overwritten.
    """
    rows, width = x.shape
    if rows == 0:
        return
    blocks = (rows + MAX_BLOCK_ROWS - 1) // MAX_BLOCK_ROWS
    block = (rows + blocks - 1) // blocks
    multiply_at(
        entry, x.ctypes.data, width, rows, block, gate_up, 2 * inner, width, room.ctypes.data, 1
    )
    silu_and_mul_rows(room, activated)
    multiply_at(
        entry, activated.ctypes.data, inner, rows, block, down, width, inner, out.ctypes.data, 1
    )


@kernel
def _experts(entry, x, order, back, counts, weights, gate_up, down, inner, out):  # type: ignore[no-untyped-def]
    """Add each token's weighted experts to out [T, d].

    order, back [T * k], counts [E]: of `permute_tokens`; weights [T, k]; gate_up, down: addresses
    of the stacked weights [E, 2 I, d] and [E, d, I].
    """
    top, width = weights.shape[1], x.shape[1]
    copies = order.shape[0]
    rows = np.empty((copies, width), np.float32)
    for i in range(copies):
        rows[i] = x[order[i] // top]
    made = np.empty((copies, width), np.float32)
    room = np.empty((copies, 2 * inner), np.float32)
    activated = np.empty((copies, inner), np.float32)
    first, size = 0, np.int64(4) * width * inner
    for e in range(counts.shape[0]):
        last = first + counts[e]
        _swiglu(
            entry, rows[first:last], gate_up + e * 2 * size, down + e * size, inner,
            room[first:last], activated[first:last], made[first:last],
        )  # fmt: skip
        first = last
    for t in range(x.shape[0]):
        for rank in range(top):
            row, weight = made[back[t * top + rank]], weights[t, rank]
            for d in range(width):
                out[t, d] = fma(weight, row[d], out[t, d])


@kernel
def _log_sums(logs, axis, out):  # type: ignore[no-untyped-def]
    """log sum exp of logs [n, n] along rows (axis 1) or columns (axis 0)."""
    n = logs.shape[0]
    for i in range(n):
        top = np.float32(-np.inf)
        for j in range(n):
            top = max(top, logs[i, j] if axis else logs[j, i])
        total = np.float32(0.0)
        for j in range(n):
            total += np.exp((logs[i, j] if axis else logs[j, i]) - top)
        out[i] = top + np.log(total)


@kernel
def _doubly_stochastic(logs, rounds):  # type: ignore[no-untyped-def]
    """`hyper_connections.doubly_stochastic` of one matrix [n, n] in place."""
    n = logs.shape[0]
    sums = np.empty(n, np.float32)
    missing_rows, missing_columns = np.ones(n, np.float32), np.ones(n, np.float32)
    for _ in range(rounds):
        _log_sums(logs, 1, sums)
        for i in range(n):
            logs[i] -= sums[i]
        _log_sums(logs, 0, sums)
        for i in range(n):
            logs[i] -= sums
    for i in range(n):
        total = np.float32(0.0)
        for j in range(n):
            logs[i, j] = np.exp(logs[i, j])
            total += logs[i, j]
        logs[i] /= max(total, _ONE)
    for j in range(n):
        total = np.float32(0.0)
        for i in range(n):
            total += logs[i, j]
        for i in range(n):
            logs[i, j] /= max(total, _ONE)
    for i in range(n):
        for j in range(n):
            missing_rows[i] -= logs[i, j]
            missing_columns[j] -= logs[i, j]
    left = np.float32(0.0)
    for i in range(n):
        missing_rows[i] = max(missing_rows[i], np.float32(0.0))
        missing_columns[i] = max(missing_columns[i], np.float32(0.0))
        left += missing_rows[i]
    left = max(left, _EPS)
    for i in range(n):
        for j in range(n):
            logs[i, j] += missing_rows[i] * (missing_columns[j] / left)


@kernel
def _project(streams, phi, epsilon, out):  # type: ignore[no-untyped-def]
    """out [T, size] = rmsnorm(streams [T, w]) phi^T, phi [size, w]."""
    rows, width = streams.shape
    for t in range(rows):
        row = streams[t]
        squares = dots((row,), (row,))[0]
        scale = _ONE / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
        fours = phi.shape[0] - phi.shape[0] % 4
        for s in range(0, fours, 4):
            found = dots((phi[s], phi[s + 1], phi[s + 2], phi[s + 3]), (row,))
            for i in range(4):
                out[t, s + i] = found[i] * scale
        for s in range(fours, phi.shape[0]):
            out[t, s] = dots((phi[s],), (row,))[0] * scale


@kernel
def _read(streams, projected, alpha, bias, out):  # type: ignore[no-untyped-def]
    """out [T, d] = sum_s sigmoid(alpha projected[t, s] + bias[s]) streams[t, s]."""
    rows, n, width = streams.shape
    for t in range(rows):
        out[t, :] = np.float32(0.0)
        for s in range(n):
            weight = _ONE / (_ONE + np.exp(-(alpha * projected[t, s] + bias[s])))
            for d in range(width):
                out[t, d] = fma(weight, streams[t, s, d], out[t, d])


@kernel
def _write(streams, projected, alphas, write_bias, mix_bias, rounds, block, out):  # type: ignore[no-untyped-def]
    """out [T, n, d] = mixing streams + share block [T, d]; projected [T, n + n + n * n]."""
    rows, n, width = streams.shape
    mixing = np.empty((n, n), np.float32)
    for t in range(rows):
        for i in range(n):
            for j in range(n):
                at = i * n + j
                mixing[i, j] = alphas[1] * projected[t, 2 * n + at] + mix_bias[at]
        _doubly_stochastic(mixing, rounds)
        for i in range(n):
            share = np.float32(2.0) / (
                _ONE + np.exp(-(alphas[0] * projected[t, n + i] + write_bias[i]))
            )
            for d in range(width):
                out[t, i, d] = share * block[t, d]
            for j in range(n):
                weight = mixing[i, j]
                for d in range(width):
                    out[t, i, d] = fma(weight, streams[t, j, d], out[t, i, d])


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
        """gate, up: [E, I, d]; down: [E, d, I]; float32, I and d multiples of 16.

        Raises RuntimeError where this processor has no matrix kernel.
        """
        self.entry, self.inner = _entry(), int(gate.shape[1])
        self.gate_up = torch.cat([gate.detach(), up.detach()], 1).contiguous()  # [E, 2 I, d]
        self.down = down.detach().contiguous()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute x [T, d], ids [T, k], weights [T, k] -> [T, d]; RuntimeError for other rows."""
        if not supports_rows(x):
            raise RuntimeError(f"rows {tuple(x.shape)} {x.dtype} are not for the compiled experts")
        plan = permute_tokens(ids, len(self.gate_up))
        x, out = x.contiguous(), torch.zeros(x.shape)
        _experts(
            self.entry, x.numpy(), plan.order.numpy(), plan.back.numpy(), plan.counts.numpy(),
            weights.contiguous().numpy(), self.gate_up.data_ptr(), self.down.data_ptr(),
            self.inner, out.numpy(),
        )  # fmt: skip
        return out


class CompiledShared:
    """The shared experts of one layer, with copies of the module's weights."""

    @classmethod
    def of(cls, shared: SharedExperts | None) -> CompiledShared | None:
        """Return None where there are none, or the matrix kernel does not support their weights."""
        if shared is None or not _plain(shared) or linear.prepare() is None:
            return None
        supported = all(size % LANES == 0 for size in shared.down_proj.weight.shape)
        return cls(shared) if supported else None

    def __init__(self, shared: SharedExperts):
        self.entry, down = _entry(), shared.down_proj.weight.detach()
        with torch.no_grad():
            both = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
        self.gate_up, self.down = both.contiguous(), down.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, d] -> [T, d]."""
        inner = self.down.shape[1]
        x, out = x.contiguous(), torch.zeros(x.shape)
        _swiglu(
            self.entry, x.numpy(), self.gate_up.data_ptr(), self.down.data_ptr(), inner,
            np.empty((len(x), 2 * inner), np.float32), np.empty((len(x), inner), np.float32),
            out.numpy(),
        )  # fmt: skip
        return out


def _entry() -> int:
    multiply = linear.prepare()
    if multiply is None:
        raise RuntimeError("this processor has no matrix kernel")
    return multiply.entry


class CompiledStreams:
    """The residual connection around one block of n > 1 streams, from the module's own weights."""

    @classmethod
    def of(cls, connection: HyperConnection) -> CompiledStreams | None:
        """Return None for one stream, which has no mixing, and for weights that are not float32."""
        return cls(connection) if connection.n > 1 and _plain(connection) else None

    def __init__(self, connection: HyperConnection):
        c, read = connection, connection.read.weights
        self.n, self.epsilon = c.n, c.eps
        self.phi = _array(torch.cat([read.phi, c.write.phi, c.mix.phi]))
        self.read_alpha, self.read_bias = np.float32(read.alpha.item()), _array(read.bias)
        self.alphas = _array(torch.stack([c.write.alpha, c.mix.alpha]))
        self.write_bias, self.mix_bias = _array(c.write.bias), _array(c.mix.bias)

    def read(self, x: Tensor) -> tuple[Tensor, Any]:
        """Read streams x [T, n, d] into a block's input [T, d]; and the projection for `write`."""
        streams, projected = x.numpy(), np.empty((len(x), len(self.phi)), np.float32)
        _project(streams.reshape(len(x), -1), self.phi, self.epsilon, projected)
        out = torch.empty(len(x), x.shape[-1])
        _read(streams, projected, self.read_alpha, self.read_bias, out.numpy())
        return out, projected

    def write(self, x: Tensor, block: Tensor, projected: Any) -> Tensor:
        """Add a block's output [T, d] to streams x [T, n, d] -> [T, n, d]."""
        out = torch.empty_like(x)
        _write(
            x.numpy(), projected, self.alphas, self.write_bias, self.mix_bias, SINKHORN_ROUNDS,
            block.contiguous().numpy(), out.numpy(),
        )  # fmt: skip
        return out


class CompiledRead:
    """`StreamRead` after the last block."""

    @classmethod
    def of(cls, read: StreamRead) -> CompiledRead | None:
        """Return None for weights that are not float32."""
        return cls(read) if _plain(read) else None

    def __init__(self, read: StreamRead):
        weights = read.weights
        self.phi, self.epsilon = _array(weights.phi), read.eps
        self.alpha, self.bias = np.float32(weights.alpha.item()), _array(weights.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, n, d] -> [T, d]."""
        projected = np.empty((len(x), len(self.phi)), np.float32)
        _project(x.numpy().reshape(len(x), -1), self.phi, self.epsilon, projected)
        out = torch.empty(len(x), x.shape[-1])
        _read(x.numpy(), projected, self.alpha, self.bias, out.numpy())
        return out


def _plain(module: nn.Module) -> bool:
    return all(w.dtype is _FLOAT and w.is_cpu for w in module.parameters())


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().contiguous().numpy().copy()
