"""The matrix kernel: right values, rows that do not depend on each other, upstream's seams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import csrc, linear
from sglang_dspark.backends.cpu.linear import NarrowMatmul, Processor, find_matmul
from sglang_dspark.backends.cpu.threads import pool_threads
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving import config
from tests.backends.cpu.product_reference import PROCESSORS, float_product, processor_named

SHAPES = ((16, 16), (48, 32), (208, 576), (64, 1536))
HOST_FUSES = csrc.why_not() is None
pytestmark = pytest.mark.skipif(not HOST_FUSES, reason="no fused multiply-add: F.linear serves")


@pytest.fixture(scope="module", params=PROCESSORS)
def kernel(request: pytest.FixtureRequest) -> NarrowMatmul:
    pool_threads(3)
    return find_matmul(processor_named(request.param))


@pytest.fixture
def fresh_preparation() -> Iterator[None]:
    linear.prepare.cache_clear()
    yield
    linear.prepare.cache_clear()


def matrices(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m * 1000 + n + k)
    return torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [*range(1, 14), 96])
def test_the_product_is_as_exact_as_blas(kernel: NarrowMatmul, m: int, n: int, k: int) -> None:
    x, weight = matrices(m, n, k)
    exact = x.double() @ weight.double().T
    scale = x.abs().double() @ weight.abs().double().T  # what rounding errors are relative to
    assert ((linear.narrow(kernel, x, weight, 1) - exact).abs() / scale).max() < 5e-7


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_product_has_the_bits_of_its_definition(kernel: NarrowMatmul, n: int, k: int) -> None:
    x, weight = matrices(14, n, k)
    expected = float_product(x, weight)
    for m in range(1, 15):
        assert torch.equal(linear.narrow(kernel, x[:m], weight, 1), expected[:m])


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_does_not_depend_on_the_others(kernel: NarrowMatmul, n: int, k: int) -> None:
    x, weight = matrices(40, n, k)
    alone = torch.cat([linear.narrow(kernel, row[None], weight, 1) for row in x])
    for m in range(1, 41):
        assert torch.equal(linear.narrow(kernel, x[:m], weight, 1), alone[:m])


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_threads_do_not_change_the_result(
    kernel: NarrowMatmul, n: int, k: int, threads: int
) -> None:
    x, weight = matrices(7, n, k)
    one = linear.narrow(kernel, x, weight, 1)
    assert torch.equal(linear.narrow(kernel, x, weight, threads), one)


def test_rows_may_lie_apart_or_transposed(kernel: NarrowMatmul) -> None:
    wide, weight = matrices(5, 48, 64)
    expected = linear.narrow(kernel, wide[:, 16:48].clone(), weight[:, :32].clone(), 1)
    apart = linear.narrow(kernel, wide[:, 16:48], weight[:, :32].clone(), 1)
    across = linear.narrow(kernel, wide[:, 16:48].t().contiguous().t(), weight[:, :32].clone(), 1)
    assert torch.equal(apart, expected)
    assert torch.equal(across, expected)


def test_nothing_outside_the_result_is_written(kernel: NarrowMatmul) -> None:
    m, n, k = 8, 48, 32
    x, weight = matrices(m, n, k)
    room = torch.full((m * n + 64,), -7.0)
    out = room[32:-32]
    kernel.call(x.data_ptr(), k, m, weight.data_ptr(), n, k, out.data_ptr(), 1)
    assert torch.equal(out.view(m, n), linear.narrow(kernel, x, weight, 1))
    assert bool((room[:32] == -7).all())
    assert bool((room[-32:] == -7).all())


def test_not_a_number_stays_in_its_row_and_column(kernel: NarrowMatmul) -> None:
    x, weight = matrices(6, 32, 48)
    x[2, 7] = torch.nan
    weight[5, 9] = torch.inf
    out = linear.narrow(kernel, x, weight, 1)
    good = torch.isfinite(out)
    assert not good[2].any()
    assert not good[:, 5].any()
    good[2] = good[:, 5] = True
    assert good.all()


def test_product_takes_bias_and_leading_dimensions() -> None:
    x, weight = matrices(6, 48, 32)
    bias = torch.arange(48.0)
    with torch.inference_mode():
        out = linear.product(x.view(2, 3, 32), weight, bias)
        vector = linear.product(x[0], weight, bias)
        torch.testing.assert_close(out.view(6, 48), torch.nn.functional.linear(x, weight, bias))
        assert torch.equal(vector, out[0, 0])


def ineligible() -> dict[str, tuple[Tensor, Tensor]]:
    x, weight = matrices(4, 48, 32)
    many, _ = matrices(linear.MAX_ROWS + 1, 48, 32)
    return {
        "half precision": (x.bfloat16(), weight.bfloat16()),
        "few outputs": (x, weight[:1]),
        "odd inputs": (x[:, :20], weight[:, :20].clone()),
        "many rows": (many, weight),
        "no rows": (x[:0], weight),
        "transposed weight": (x, weight.t().contiguous().t()),
        "gradient": (x.clone().requires_grad_(), weight),
        "meta": (x.to("meta"), weight.to("meta")),
    }


@pytest.mark.parametrize("case", list(ineligible()))
def test_other_products_are_left_to_torch(case: str) -> None:
    x, weight = ineligible()[case]
    assert not linear.eligible(x, weight)
    out, expected = linear.product(x, weight), torch.nn.functional.linear(x, weight)
    assert out.shape == expected.shape
    assert out.requires_grad == expected.requires_grad
    assert out.is_meta or torch.equal(out, expected)


@pytest.mark.usefixtures("fresh_preparation")
def test_the_configuration_turns_the_kernel_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert linear.prepare() is not None
    linear.prepare.cache_clear()
    file = tmp_path / "dspark.yaml"
    file.write_text("cpu: {matrix_kernel: false}")
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(file))
    assert linear.prepare() is None
    x, weight = matrices(6, 48, 32)
    assert torch.equal(linear.product(x, weight), torch.nn.functional.linear(x, weight))


def test_a_processor_without_fused_multiply_add_has_no_product() -> None:
    with pytest.raises(DSparkError, match="no product with float32 weights"):
        find_matmul(Processor(0))


class TestUpstream:
    """The hooks on SGLang's own classes."""

    def test_a_linear_layer_goes_through_the_kernel(self) -> None:
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

        from sglang_dspark.backends.cpu.packed_weights import LinearMethod

        method, layer = UnquantizedLinearMethod(), torch.nn.Module()
        method.create_weights(layer, 32, [16, 32], 32, 48, torch.float32)
        x, weight = matrices(6, 48, 32)
        with torch.inference_mode():
            layer.weight.copy_(weight)
            kernel = linear.prepare()
            assert kernel is not None
            hooked = LinearMethod().apply(layer, x)
            assert torch.equal(hooked, linear.narrow(kernel, x, weight))
            layer.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
            upstream = UnquantizedLinearMethod.apply(method, layer, x.bfloat16())
            fallen_back = LinearMethod().apply(layer, x.bfloat16())
            assert torch.equal(fallen_back, upstream)

    def test_plain_layers_of_a_draft_are_adopted(self) -> None:
        from sglang_dspark.backends.cpu.packed_weights import adopt_plain_layers

        draft = torch.nn.Module()
        draft.fc = torch.nn.Linear(32, 48)
        draft.lm_head = torch.nn.Linear(32, 48)
        x, _ = matrices(6, 48, 32)
        with torch.inference_mode():
            expected = draft.fc(x)
            adopt_plain_layers(draft, shared=("lm_head",))
            assert "forward" in vars(draft.fc)
            assert "forward" not in vars(draft.lm_head)
            torch.testing.assert_close(draft.fc(x), expected)
