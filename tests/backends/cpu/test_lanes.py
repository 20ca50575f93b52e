"""Sums in a fixed order: the order said, at odd lengths, and the same in every compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher
from numba.core.errors import TypingError

from sglang_dspark import float_ops
from sglang_dspark.backends import cpu
from sglang_dspark.backends.cpu.jit import kernel
from sglang_dspark.backends.cpu.lanes import add_weighted, dots, lane_max, lane_sum
from sglang_dspark.float_ops import exp32, fma
from tests.backends.cpu import compiled_bits

LENGTHS = [0, 1, 5, 15, 16, 17, 63, 64, 65, 128, 576, 601]
ROOT = Path(__file__).parents[3]


@kernel
def _sum(row):  # type: ignore[no-untyped-def]
    return lane_sum(row)


@kernel
def _max(row):  # type: ignore[no-untyped-def]
    return lane_max(row)


@kernel
def _two_by_four(keys, queries):  # type: ignore[no-untyped-def]
    return dots((keys[0], keys[1], keys[2], keys[3]), (queries[0], queries[1]))


@kernel
def _four_by_eight(rows):  # type: ignore[no-untyped-def]
    keys = rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7]
    return dots(keys, (rows[0], rows[1], rows[2], rows[3]))


@kernel
def _three_keys(rows):  # type: ignore[no-untyped-def]
    return dots((rows[0], rows[1], rows[2]), (rows[0],))


@kernel
def _add(rows, weights, values):  # type: ignore[no-untyped-def]
    first = weights[0, 0], weights[0, 1], weights[0, 2]
    second = weights[1, 0], weights[1, 1], weights[1, 2]
    add_weighted((rows[0], rows[1]), (first, second), (values[0], values[1], values[2]))


@kernel
def _fused(x, y, z):  # type: ignore[no-untyped-def]
    return fma(x, y, z)


@kernel
def _exp(x):  # type: ignore[no-untyped-def]
    return exp32(x)


def random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def folded(lanes: Any) -> Any:
    """Lanes [..., n] added up as said: upper halves onto lower ones."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def in_lanes(row: Any, lanes: int) -> Any:
    """[n] -> [chunks, lanes], zeros at the end."""
    return np.pad(row, (0, -len(row) % lanes)).reshape(-1, lanes)


@pytest.mark.parametrize("n", LENGTHS)
def test_a_sum_is_taken_in_the_order_that_is_said(n: int) -> None:
    row = random(n)
    lanes = np.zeros(64, np.float32)
    for chunk in in_lanes(row, 64):
        lanes = lanes + chunk
    assert _sum(row) == folded(lanes)
    assert abs(_sum(row) - row.astype(np.float64).sum()) < 1e-4


@pytest.mark.parametrize("n", LENGTHS)
def test_products_are_those_of_numpy_and_do_not_know_each_other(n: int) -> None:
    keys, queries = random(4, n), random(2, n)
    found = np.array(_two_by_four(keys, queries)).reshape(2, 4)
    expected = queries.astype(np.float64) @ keys.astype(np.float64).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    for k in range(4):  # beside copies of itself
        alone = np.array(_two_by_four(keys[[k, k, k, k]], queries)).reshape(2, 4)
        assert (alone == found[:, k, None]).all()


@pytest.mark.parametrize("n", [16, 40, 200])
def test_a_product_is_taken_in_the_order_that_is_said(n: int) -> None:
    keys, queries = random(4, n), random(2, n)
    found = _two_by_four(keys, queries)
    for place, (q, k) in enumerate((q, k) for q in range(2) for k in range(4)):
        lanes = np.zeros(16, np.float32)
        for x, y in zip(in_lanes(keys[k], 16), in_lanes(queries[q], 16), strict=True):
            lanes = np.array([_fused(*each) for each in zip(x, y, lanes, strict=True)], np.float32)
        assert found[place] == folded(lanes)


def test_more_products_than_a_vector_has_lanes() -> None:
    rows = random(8, 40)
    expected = rows[:4].astype(np.float64) @ rows.astype(np.float64).T
    np.testing.assert_allclose(
        np.array(_four_by_eight(rows)).reshape(4, 8), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("n", LENGTHS)
def test_the_largest_number(n: int) -> None:
    row = random(n) - 9
    assert _max(row) == row.max(initial=-np.inf)
    for place in range(n):
        row[place] = 7.0 + place
        assert _max(row) == 7.0 + place
    if n > 1:
        row[: n - 1] = np.nan
        assert _max(row) == row[-1]


@pytest.mark.parametrize("n", LENGTHS)
def test_weighted_rows_are_added_one_after_the_other(n: int) -> None:
    rows, weights, values = random(2, n), random(2, 3), random(3, n)
    expected = rows.copy()
    for r in range(2):
        for v in range(3):
            for d in range(n):
                expected[r, d] = _fused(weights[r, v], values[v, d], expected[r, d])
    _add(rows, weights, values)
    np.testing.assert_array_equal(rows, expected)


def test_a_product_and_a_sum_are_rounded_once() -> None:
    x = np.float32(1 + 2.0**-12)
    assert _fused(x, x, np.float32(-1 - 2.0**-11)) == np.float32(2.0**-24)


def test_exp_is_within_two_in_ten_million() -> None:
    x = np.linspace(-87, 88, 5001).astype(np.float32)
    found = np.array([_exp(each) for each in x], np.float64)
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=2e-7)


def test_rows_that_are_no_rows_are_refused() -> None:
    with pytest.raises(TypingError, match="no contiguous row"):
        _sum(random(8, 8)[:, 0])
    with pytest.raises(TypingError, match="not of float32"):
        _sum(np.zeros(8))
    with pytest.raises(TypingError, match="3 keys and 1 queries are no powers of two"):
        _three_keys(random(3, 8))


def test_compiled_or_read_from_disk_the_bits_are_the_same(tmp_path: Path) -> None:
    """A server's first start compiles its kernels, later ones read them: the plain server and the
    one that drafts may differ in that."""
    (fresh, compiled), (kept, read) = (bits(tmp_path) for _ in range(2))
    assert (compiled, read) == (0, len(compiled_bits.KERNELS))
    assert fresh == kept == compiled_bits.digest()


def test_a_function_that_may_reorder_sums_hands_nothing_on(tmp_path: Path) -> None:
    """Numba compiles a function for its first caller, with that caller's leave."""
    assert bits(tmp_path, "after a free kernel")[0] == compiled_bits.digest()


def test_no_kernel_may_reorder_sums() -> None:
    """Whether a compiler makes use of such leave cannot be told from one machine's results."""
    names = [each.name for each in walk_packages(cpu.__path__, f"{cpu.__name__}.")]
    modules = [float_ops, *(import_module(name) for name in names)]
    found = {each for module in modules for each in vars(module).values() if compiled(each)}
    assert {exp32, *compiled_bits.KERNELS} <= found
    assert [
        each.__name__ for each in found if each.targetoptions.get("fastmath") is not False
    ] == []


def compiled(value: Any) -> bool:
    return isinstance(value, Dispatcher)


def bits(cache: Path, *words: str) -> tuple[str, int]:
    """What another process with this cache computes; how many kernels it read there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.cpu.compiled_bits", *words],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    digest, read = done.stdout.split()
    return digest, int(read)
