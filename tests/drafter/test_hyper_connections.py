"""Test mHC: mixing is doubly stochastic for any input, gradients are right, one stream is plain."""

import pytest
import torch
from torch import nn

from sglang_dspark.drafter.hyper_connections import (
    HyperConnection,
    StreamRead,
    doubly_stochastic,
    open_streams,
)


def naive_sinkhorn(logits: torch.Tensor, rounds: int) -> torch.Tensor:
    matrix = logits.exp()
    for _ in range(rounds):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 10.0, 1e3, 1e30])
@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_rows_and_columns_sum_to_one(n: int, scale: float) -> None:
    logits = torch.randn(300, n, n, generator=torch.Generator().manual_seed(n)) * scale
    for given in (logits, logits.bfloat16(), logits.double()):
        given.requires_grad_()
        mixing = doubly_stochastic(given)
        (mixing * torch.arange(n)).sum().backward()
        assert given.grad is not None
        assert given.grad.isfinite().all()
        assert given.grad.abs().max() < 10 * n
        assert mixing.dtype == (torch.float64 if given.dtype == torch.float64 else torch.float32)
        assert (mixing >= 0).all()
        assert (mixing.sum(-1) - 1).abs().max() < 1e-5
        assert (mixing.sum(-2) - 1).abs().max() < 1e-5


def test_slow_matrices_need_the_last_step() -> None:
    """Positive control: twenty rounds alone miss 1e-5 by far on a nearly triangular matrix."""
    logits = torch.tensor([[0.0, 0.0], [-14.0, 0.0]], dtype=torch.float64)
    assert (naive_sinkhorn(logits, 20).sum(-1) - 1).abs().max() > 1e-3
    assert (doubly_stochastic(logits).sum(-1) - 1).abs().max() < 1e-12


def test_it_is_sinkhorn_where_that_converges() -> None:
    logits = torch.randn(50, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        doubly_stochastic(logits), naive_sinkhorn(logits, 300), atol=1e-7, rtol=1e-6
    )


def streams_and_connection(n: int = 4, width: int = 6) -> tuple[torch.Tensor, HyperConnection]:
    torch.manual_seed(0)
    connection = HyperConnection(n, width)
    with torch.no_grad():
        for parameter in connection.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return torch.randn(3, n, width), connection


def test_gradients_are_right() -> None:
    logits = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(doubly_stochastic, (logits,))
    far = (torch.randn(2, 3, 3, dtype=torch.float64) * 6).requires_grad_()
    assert torch.autograd.gradcheck(doubly_stochastic, (far,))

    streams, connection = streams_and_connection(n=3, width=4)
    connection = connection.double()
    names = [name for name, _ in connection.named_parameters()]
    values = [p.detach().requires_grad_() for p in connection.parameters()]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(connection, given, (x, torch.tanh))

    assert torch.autograd.gradcheck(run, (streams.double().requires_grad_(), *values))


def test_one_stream_is_the_plain_residual_bit_for_bit() -> None:
    torch.manual_seed(1)
    block = nn.Linear(8, 8)
    connection = HyperConnection(1, 8)
    assert not list(connection.parameters())
    for dtype in (torch.float32, torch.bfloat16):
        x, own = torch.randn(5, 8, dtype=dtype), block.to(dtype)
        assert torch.equal(connection(x, own), x + own(x))


def test_it_computes_what_it_says() -> None:
    x, c = streams_and_connection()
    out = c(x, torch.tanh)
    for i in range(3):
        flat = x[i].flatten()
        flat = flat / (flat.pow(2).mean() + 1e-6).sqrt()

        def coefficients(part: nn.Module, flat: torch.Tensor = flat) -> torch.Tensor:
            return part.alpha * (part.phi @ flat) + part.bias

        pre = coefficients(c.read.weights).sigmoid()
        post = 2 * coefficients(c.write).sigmoid()
        mixing = doubly_stochastic(coefficients(c.mix).view(4, 4))
        expected = mixing @ x[i] + torch.outer(post, torch.tanh(pre @ x[i]))
        torch.testing.assert_close(out[i], expected, atol=1e-5, rtol=1e-5)


def test_it_starts_as_the_plain_residual_of_the_mean() -> None:
    torch.manual_seed(2)
    connection, read = HyperConnection(4, 16), StreamRead(4, 16)
    with torch.no_grad():
        for part in (connection.read.weights, connection.write, connection.mix, read.weights):
            part.alpha.zero_()
    x = torch.randn(5, 16)
    streams = connection(open_streams(x, 4), torch.tanh)
    torch.testing.assert_close(read(streams), x + torch.tanh(x), atol=1e-5, rtol=1e-5)


def test_the_mean_survives_a_hundred_layers_in_bfloat16() -> None:
    """H_res keeps the mean of the streams; a mixing that is no such matrix lets it drift."""
    x, connection = streams_and_connection(width=32)
    with torch.no_grad():
        connection.mix.bias.mul_(20)
    streams = x.bfloat16()
    for _ in range(100):
        streams = connection(streams, torch.zeros_like)
        assert streams.dtype == torch.bfloat16
    drift = (streams.float().mean(-2) - x.bfloat16().float().mean(-2)).abs().max()
    assert drift < 0.03
    assert streams.float().abs().max() <= x.abs().max() * 1.02


@torch.no_grad()
def test_half_precision_products_leave_the_streams_alone() -> None:
    x, connection = streams_and_connection(width=64)
    full = connection(x, torch.tanh)
    with torch.autocast("cpu", torch.bfloat16):
        half = connection(x, torch.tanh)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, atol=1e-6, rtol=1e-6)


def test_no_streams_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one stream"):
        HyperConnection(0, 8)
