"""Packed weights: what they stand for, how far from what was loaded, products bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import csrc, linear
from sglang_dspark.backends.cpu.linear import NarrowMatmul, Processor, find_matmul
from sglang_dspark.backends.cpu.weight_formats import (
    BFLOAT16,
    BYTES,
    FLOAT32,
    FORMATS,
    GROUP,
    INT8,
    PANEL,
    PANELS,
    WeightFormat,
    dense,
    format_of,
    half_rows,
    int8_rows,
    is_bfloat16,
    is_packed,
    look_up,
    pack,
    rounded_groups,
    rounded_rows,
    take_rows,
)
from tests.backends.cpu.product_reference import (
    PROCESSORS,
    byte_product,
    integer_product,
    processor_named,
    rounded_product,
)

SHAPES = ((16, 64), (48, 192), (208, 576), (64, 1536))
PACKED = (BFLOAT16, INT8, BYTES)
needs_kernel = pytest.mark.skipif(csrc.why_not() is not None, reason="no fused multiply-add")


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    """Rows and groups of very unlike size, an empty group and one of a single number."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * torch.logspace(-3, 2, n)[:, None]
    weight[1, :GROUP] = 0.0
    weight[2, :GROUP] = 0.0
    weight[2, 5] = -3.7
    return weight


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bfloat16_rounds_to_nearest(n: int, k: int) -> None:
    weight = weights(n, k)
    assert torch.equal(dense(pack(weight, BFLOAT16)), weight.bfloat16().float())


@pytest.mark.parametrize("form", PANELS, ids=lambda form: str(form.dtype))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_is_within_half_a_step_of_its_groups_scale(n: int, k: int, form: WeightFormat) -> None:
    weight = weights(n, k)
    packed = pack(weight, form)
    groups = weight.view(n, -1, GROUP)
    steps = groups.abs().amax(-1, keepdim=True) / 127
    off = (dense(packed).view_as(groups) - groups).abs()
    assert bool((off <= 0.5 * steps * (1 + 1e-5)).all())
    whole, scales = int8_rows(packed, torch.arange(n))
    assert whole.abs().max() == 127
    torch.testing.assert_close(scales[..., None], steps, rtol=1e-6, atol=0)
    assert torch.equal(dense(packed)[2, :GROUP], weight[2, :GROUP])


@pytest.mark.parametrize("form", PACKED)
def test_what_is_packed_already_does_not_change(form: WeightFormat) -> None:
    """Weights that came from the format, such as a checkpoint in bfloat16, lose nothing."""
    once = dense(pack(weights(48, 192), form))
    again = dense(pack(once, form))
    torch.testing.assert_close(again, once, rtol=2e-7, atol=0)
    assert form in PANELS or torch.equal(again, once)


@pytest.mark.parametrize("form", [FLOAT32, *PACKED])
def test_rows_are_taken_with_their_scales(form: WeightFormat) -> None:
    packed, rows = pack(weights(48, 192), form), torch.tensor([47, 2, 2, 0] * 4)
    taken = take_rows(packed, rows)
    assert format_of(taken) is form
    assert torch.equal(dense(taken), dense(packed)[rows])
    tokens = rows.view(2, 8)
    assert torch.equal(look_up(packed, tokens), dense(packed)[tokens])
    few = take_rows(packed, rows[:5])  # in no format, so in float32
    assert few.dtype is torch.float32
    assert torch.equal(few, dense(packed)[rows[:5]])


@pytest.mark.parametrize("form", PANELS, ids=lambda form: str(form.dtype))
@pytest.mark.parametrize("count", [0, 1, 257])
def test_rows_are_bytes_times_scales(form: WeightFormat, count: int) -> None:
    packed = pack(weights(96, 320), form)
    rows = torch.arange(count) * 7 % 96
    whole, scales = int8_rows(packed, rows)
    assert torch.equal(look_up(packed, rows), (whole.float() * scales[..., None]).flatten(1))
    part = packed[32:80]  # whole panels from the middle
    assert torch.equal(look_up(part, rows % 48), dense(packed)[32:80][rows % 48])


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("row", [48, 1 << 40, -49])
def test_a_row_that_is_not_there_is_refused(form: WeightFormat, row: int) -> None:
    with pytest.raises(IndexError):
        look_up(pack(weights(48, 192), form), torch.tensor([3, row]))


def test_bytes() -> None:
    assert [form.row_bytes(576) for form in FORMATS.values()] == [2304, 1152, 612]
    for form in PANELS:
        packed = pack(weights(48, 192), form)
        assert packed.untyped_storage().nbytes() == 48 * form.row_bytes(192)


def unreadable() -> dict[str, Tensor]:
    weight = weights(48, 192)
    return {
        "one row": weight[:1],
        "columns of a wider one": weight[:, :64],
        "transposed": weight.t().contiguous().t(),
        "bfloat16 in sixteens": weight[:, :48].bfloat16().contiguous(),
        "int8 from the middle of a panel": pack(weight, INT8)[8:24],
        "bytes from the middle of a panel": pack(weight, BYTES)[8:24],
        "int8 without scales": torch.zeros(16, 64, dtype=torch.int8),
        "float16": weight.half(),
        "three dimensions": weight.view(48, 3, 64),
        "no storage": weight.to("meta"),
    }


@pytest.mark.parametrize("case", list(unreadable()))
def test_what_the_kernel_cannot_read_has_no_format(case: str) -> None:
    assert format_of(unreadable()[case]) is None
    assert not is_packed(unreadable()[case])


@pytest.mark.parametrize("form", PACKED)
def test_odd_sizes_stay_float32(form: WeightFormat) -> None:
    for odd in (torch.zeros(16, form.columns + 16), torch.zeros(8, form.columns)):
        assert pack(odd, form) is odd


@pytest.fixture(scope="module", params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Processor:
    return processor_named(request.param)


@pytest.fixture(scope="module")
def wide(processor: Processor) -> NarrowMatmul:
    return find_matmul(processor)


@pytest.fixture(scope="module", params=PACKED, ids=lambda form: str(form.dtype))
def form(request: pytest.FixtureRequest) -> WeightFormat:
    chosen: WeightFormat = request.param
    return chosen


@pytest.fixture(scope="module")
def kernel(processor: Processor, form: WeightFormat) -> NarrowMatmul:
    if form is BYTES and not processor.multiplies(BYTES):
        pytest.skip("this processor multiplies no bytes")
    return find_matmul(processor, form)


@pytest.fixture(scope="module")
def rounding() -> NarrowMatmul:
    """The kernel that rounds rows to bfloat16."""
    if not Processor.host().multiplies(BFLOAT16):
        pytest.skip("this processor multiplies no bfloat16 numbers")
    return find_matmul(Processor.host(), BFLOAT16, rounding=True)


@pytest.fixture(scope="module")
def bytes_kernel() -> NarrowMatmul:
    if not Processor.host().multiplies(BYTES):
        pytest.skip("this processor multiplies no bytes")
    return find_matmul(Processor.host(), BYTES)


# Blocks of x end at six and at twelve rows, strips of W at 64.
@needs_kernel
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (80, 1024), (176, 2048)])
def test_a_product_of_rounded_rows_is_exact_but_for_its_sums(
    rounding: NarrowMatmul, n: int, k: int
) -> None:
    packed, x = pack(weights(n, k), BFLOAT16), torch.randn(40, k)
    exact = half_rows(x).double() @ dense(packed).double().T
    size = half_rows(x).double().abs() @ dense(packed).double().abs().T
    whole = linear.narrow(rounding, x, packed, 1)
    assert bool(((whole - exact).abs() <= size * 1e-6).all())
    for rows, threads in ((rows, threads) for rows in range(1, 41) for threads in (1, 3)):
        assert torch.equal(linear.narrow(rounding, x[:rows], packed, threads), whole[:rows])
    assert torch.equal(linear.narrow(rounding, x[13:29], packed, 1), whole[13:29])


@needs_kernel
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_of_rounded_rows_has_the_bits_of_its_definition(
    rounding: NarrowMatmul, n: int, k: int
) -> None:
    packed, x = pack(weights(n, k), BFLOAT16), torch.randn(14, k)
    expected = rounded_product(x, packed)
    for rows in range(1, 15):
        assert torch.equal(linear.narrow(rounding, x[:rows], packed, 1), expected[:rows])


@needs_kernel
def test_rows_are_rounded_to_nearest_bfloat16(rounding: NarrowMatmul) -> None:
    """Times a one alone a row's number comes back as what it was rounded to."""
    one = torch.zeros(48, 192)
    one[:, 7] = 1.0
    x = torch.randn(40, 192)
    x[0, 7], x[1, 7], x[2, 7], x[3, 7] = 1 + 2**-8, 1 + 3 * 2**-8, torch.nan, torch.inf
    found = linear.narrow(rounding, x, pack(one, BFLOAT16), 1)[:, 0]
    assert found[2].isnan()
    assert found[3] == torch.inf
    kept = [0, 1, *range(4, 40)]
    assert torch.equal(found[kept], half_rows(x[:, 7])[kept])


@needs_kernel
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (80, 1024), (176, 2048)])
def test_a_product_of_bytes_has_the_bits_of_its_definition(
    bytes_kernel: NarrowMatmul, n: int, k: int
) -> None:
    packed, x = pack(weights(n, k), BYTES), activations(14, k)
    expected = byte_product(x, packed)
    for rows, threads in ((rows, threads) for rows in range(1, 15) for threads in (1, 3)):
        found = linear.narrow(bytes_kernel, x[:rows], packed, threads)
        assert torch.equal(found, expected[:rows])
    rounded, numbers = rounded_groups(x).double(), dense(packed).double()
    size = rounded.abs() @ numbers.abs().T
    assert bool(((expected - rounded @ numbers.T).abs() <= size * 2e-6).all())


@needs_kernel
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_with_bfloat16_has_the_bits_of_the_widened_one(
    processor: Processor, wide: NarrowMatmul, n: int, k: int
) -> None:
    kernel = find_matmul(processor, BFLOAT16)
    packed = pack(weights(n, k), BFLOAT16)
    x = torch.randn(14, k, generator=torch.Generator().manual_seed(n + k))
    for rows, threads in ((rows, threads) for rows in range(1, 15) for threads in (1, 3)):
        found = linear.narrow(kernel, x[:rows], packed, threads)
        assert torch.equal(found, linear.narrow(wide, x[:rows], dense(packed), 1))


@needs_kernel
@pytest.mark.parametrize("kept", [FLOAT32, BFLOAT16])
def test_a_product_does_not_depend_on_what_cache_is_read_through(
    processor: Processor, kept: WeightFormat
) -> None:
    packed = weights(48, 192) if kept is FLOAT32 else pack(weights(48, 192), kept)
    x = torch.randn(9, 192)
    first, second = (find_matmul(processor, kept, level) for level in (1, 2))
    assert torch.equal(linear.narrow(first, x, packed, 1), linear.narrow(second, x, packed, 1))


@needs_kernel
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_with_int8_has_the_bits_of_its_definition(
    processor: Processor, n: int, k: int
) -> None:
    kernel, packed = find_matmul(processor, INT8), pack(weights(n, k), INT8)
    x = activations(14, k)
    expected = integer_product(x, packed)
    for rows, threads in ((rows, threads) for rows in range(1, 15) for threads in (1, 3)):
        assert torch.equal(linear.narrow(kernel, x[:rows], packed, threads), expected[:rows])


def activations(m: int, k: int) -> Tensor:
    """Rows of very unlike size, outliers a thousand times the rest, an empty row."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m + k))
    x *= torch.logspace(-20, 20, m)[:, None]
    x[::3, 5] *= 1000
    x[3] = 0.0
    return x


@needs_kernel
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_multiplies_rows_of_sixteen_bits(processor: Processor, n: int, k: int) -> None:
    kernel, packed = find_matmul(processor, INT8), pack(weights(n, k), INT8)
    x = activations(14, k)
    found = linear.narrow(kernel, x, packed, 1).double()
    rounded = rounded_rows(x)
    expected = rounded.double() @ dense(packed).double().T
    size = rounded.double().abs() @ dense(packed).double().abs().T
    assert bool(((found - expected).abs() <= size * 2e-6).all())
    top = x.abs().amax(-1, keepdim=True)
    assert bool(((rounded - x).abs() <= top / 65534 * 1.01).all())
    assert not torch.equal(rounded, x)


@needs_kernel
def test_not_a_number_stays_in_its_row(kernel: NarrowMatmul, form: WeightFormat) -> None:
    if form is BFLOAT16:
        pytest.skip("a float32 sum shows it by itself")
    packed, x = pack(weights(48, 192), form), torch.randn(6, 192)
    expected = linear.narrow(kernel, x, packed, 1)
    x = x.clone()
    x[1, 190], x[4, 0], x[5, 3] = torch.nan, torch.inf, -torch.inf
    found = linear.narrow(kernel, x, packed, 1)
    for row in (1, 4, 5):
        assert found[row].isnan().all()
        rounded = rounded_rows(x) if form is INT8 else rounded_groups(x)
        assert rounded[row].isnan().any()
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])


@needs_kernel
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-36, 3e38])
def test_the_ends_of_float32_stay_numbers(
    kernel: NarrowMatmul, form: WeightFormat, size: float
) -> None:
    packed = pack(weights(48, 192) / 1e6, form)
    x = torch.full((2, 192), size)
    found = linear.narrow(kernel, x, packed, 1)
    expected = (x.double() @ dense(packed).double().T).float()
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-37)
    beside = rounded_rows(x) if form is INT8 else rounded_groups(x)
    assert beside.isfinite().all()


def test_bfloat16_numbers_are_known() -> None:
    weight = weights(48, 192).bfloat16().float()
    assert is_bfloat16(weight)
    for place in ((0, 0), (47, 191)):
        other = weight.clone()
        other[place] = 1 + 2**-8
        assert not is_bfloat16(other)


@needs_kernel
def test_nothing_outside_a_weight_is_read(kernel: NarrowMatmul, form: WeightFormat) -> None:
    """All bits around the weight are set, NaN in float formats; only prefetches touch them."""
    n, k = 48, 192
    packed = pack(weights(n, k), form)
    size, around = packed.untyped_storage().nbytes(), PANEL * form.row_bytes(k)
    room = torch.full((size + 2 * around,), 0xFF, dtype=torch.uint8)
    room[around:-around] = torch.empty(0, dtype=torch.uint8).set_(packed.untyped_storage())
    inside = room[around:-around].view(packed.dtype).view(n, -1)[:, :k]
    assert format_of(inside) is form
    x = torch.randn(5, k)
    assert torch.equal(linear.narrow(kernel, x, inside, 1), linear.narrow(kernel, x, packed, 1))


@needs_kernel
@pytest.mark.parametrize("rows", [1, 6, linear.MAX_ROWS + 1])
def test_products_of_any_number_of_rows(form: WeightFormat, rows: int) -> None:
    if form is BYTES and not Processor.host().multiplies(BYTES):
        pytest.skip("this processor multiplies no bytes")
    packed, x = pack(weights(48, 192), form), torch.randn(rows, 192)
    with torch.inference_mode():
        found = linear.product(x, packed, torch.arange(48.0))
        beside = linear.activations_for(form)
        seen = {"16-bit": rounded_rows, "8-bit": rounded_groups, "bfloat16": half_rows}.get(
            beside, lambda x: x
        )(x)
        expected = torch.nn.functional.linear(seen, dense(packed), torch.arange(48.0))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert format_of(packed) is not FLOAT32
