"""Time the experts' kernels on a CUDA device: `python -m sglang_dspark.benchmarks.experts`.

Requires only torch and triton; peers are timed where they are installed. First every kind is
compared with float64, then the device's bandwidth and its BF16 and FP8 products are measured, then
layers: one JSON row each, `{op, shape, format, ours_us, peer, peer_us, fraction_of_ceiling}` and
more. Times are those of `timing.microseconds`, in captured graphs.

Without a CUDA device it compares in Triton's interpreter, prints the roofline plan of an H100, and
reports that it measured nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_dspark.benchmarks.bandwidth import bytes_per_second
from sglang_dspark.benchmarks.grouped_shapes import KINDS, random_weights
from sglang_dspark.benchmarks.layers import (
    LAYERS,
    NOMINAL_H100,
    ROUTINGS,
    TOKENS,
    Ceilings,
    Layer,
    device_weights,
    routing,
    work,
)
from sglang_dspark.benchmarks.peers import LAYER_PEERS, PRODUCT_PEERS, Case
from sglang_dspark.benchmarks.timing import microseconds
from sglang_dspark.kernels.fp8_rows import fp8_rows
from sglang_dspark.kernels.grouped_gemm import m_grouped_gemm_nt_contiguous
from sglang_dspark.kernels.grouped_layout import GroupedOperands
from sglang_dspark.kernels.grouped_moe import fused_experts, fused_experts_reference
from sglang_dspark.kernels.grouped_reference import activation_values, calc_diff
from sglang_dspark.kernels.routing import route

MOST_DIFF = 5e-3  # calc_diff of a layer: activations are rounded to FP8 on both sides
_SPARE = 0.8  # part of the memory for weights

Row = dict[str, Any]


@dataclass(frozen=True)
class Matrix:
    """The cells to time: every kind of every layer, at every count of tokens and routing."""

    layers: Sequence[Layer] = LAYERS
    kinds: Sequence[str] = KINDS
    tokens: Sequence[int] = TOKENS
    routings: Sequence[str] = ROUTINGS


def correctness(device: str, kinds: Sequence[str] = KINDS) -> dict[str, float]:
    """Return calc_diff of a small layer of each kind against float64.

    Rows of FP8 are rounded on both sides.
    """
    report = {}
    for kind in kinds:
        rows, form = kind.split(" x ")
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, 128, generator=generator).bfloat16().to(device)
        ids = torch.randint(-1, 6, (24, 2), generator=generator).to(device)
        weights = torch.rand(24, 2, generator=generator).to(device)
        gate_up = random_weights(generator, form, (6, 256, 128), device)
        down = random_weights(generator, form, (6, 128, 128), device)
        given = (x, ids, weights, gate_up, down)
        through = _through_fp8 if rows == "fp8" else torch.Tensor.double
        expected = fused_experts_reference(*given, through)
        report[kind] = calc_diff(fused_experts(*given, rows == "fp8"), expected)
    return report


def _through_fp8(rows: torch.Tensor) -> torch.Tensor:
    return activation_values(*fp8_rows(rows.bfloat16().contiguous()))


def interpreted_correctness() -> dict[str, float]:
    """Run `correctness` in a process that interprets Triton, which needs no device."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_dspark.benchmarks.experts", "--check"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the interpreted kernels failed: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def plan(matrix: Matrix, ceilings: Ceilings = NOMINAL_H100) -> Iterator[Row]:
    """Yield the least time of every layer, format of weights and routing, without running any."""
    forms = dict.fromkeys(kind.split(" x ")[1] for kind in matrix.kinds)
    for layer in matrix.layers:
        for count in matrix.tokens:
            for kind in matrix.routings:
                ids = routing(layer, count, kind)
                for form in forms:
                    found = work(layer, ids, form)
                    yield {
                        "layer": layer.name,
                        "tokens": count,
                        "routing": kind,
                        "format": form,
                        "experts": found.active,
                        "least_us": found.least_us(ceilings, form == "fp8"),
                        "bound": found.bound(ceilings, form == "fp8"),
                    }


def ceilings() -> Ceilings:
    """Measure the current device: bandwidth of a kernel, and torch's products of size 8192."""
    bandwidth = bytes_per_second()
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    bf16_us = microseconds(lambda: a @ a)
    one = torch.ones((), device="cuda")
    b = a.to(torch.float8_e4m3fn)
    fp8_us = microseconds(
        lambda: torch._scaled_mm(b, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )
    operations = 2.0 * 8192**3
    return Ceilings("measured", bandwidth, operations / bf16_us * 1e6, operations / fp8_us * 1e6)


def measured(matrix: Matrix, reached: Ceilings | None = None) -> Iterator[Row]:
    """Yield rows of all layers that fit the device, ours next to each peer.

    reached: the device's ceilings; None: measured first.
    """
    reached = reached or ceilings()
    memory = torch.cuda.get_device_properties(0).total_memory
    for layer in matrix.layers:
        for kind in matrix.kinds:
            form = kind.split(" x ")[1]
            if layer.bytes_of(form, layer.experts) > _SPARE * memory:
                continue
            for way, case in _cases(layer, kind, matrix):
                yield from _rows(layer, case, way, reached)
            torch.cuda.empty_cache()


def _cases(layer: Layer, kind: str, matrix: Matrix) -> Iterator[tuple[str, Case]]:
    """Yield routing and operands; all cases share the weights."""
    form = kind.split(" x ")[1]
    shapes = ((2 * layer.inner, layer.width), (layer.width, layer.inner))
    parts = [device_weights(form, (layer.experts, *shape), "cuda") for shape in shapes]
    for count in matrix.tokens:
        for way in matrix.routings:
            ids = routing(layer, count, way)
            x = torch.randn(count, layer.width, device="cuda").bfloat16()
            even = torch.full(ids.shape, 1 / layer.top_k, device="cuda")
            yield way, Case(kind, x, ids.cuda(), even, parts[0], parts[1])


def narrow(layer: Layer) -> Layer:
    """Return the layer with small matrices, for which Triton compiles the same kernels.

    Their variants depend on experts and rows; widths, and scales of a row, need only be multiples
    of 16.
    """
    return replace(layer, width=512, inner=512)


def compile_kernels(matrix: Matrix) -> int:
    """Run every case of `measured` once, on narrow layers; return the number of cases.

    Triton keeps compiled kernels on disk, so processes can share this. A peer that raises is
    skipped.
    """
    done = 0
    for layer in map(narrow, matrix.layers):
        for kind in matrix.kinds:
            fp8 = kind.startswith("fp8")
            for _, case in _cases(layer, kind, matrix):
                fused_experts(case.x, case.ids, case.weights, case.gate_up, case.down, fp8)
                _product(case, fp8)()
                for peer in (*LAYER_PEERS.values(), *PRODUCT_PEERS.values()):
                    try:
                        peer(case)()
                    except Exception:
                        continue
                done += 1
    torch.cuda.synchronize()
    return done


def _rows(layer: Layer, case: Case, way: str, reached: Ceilings) -> Iterator[Row]:
    rows, form = case.kind.split(" x ")
    fp8 = rows == "fp8"
    given = (case.x, case.ids, case.weights, case.gate_up, case.down)
    layer_us = microseconds(lambda: fused_experts(*given, fp8))
    found = work(layer, case.ids, form)
    row = {
        "op": "experts layer",
        "shape": [layer.name, len(case.x), way],
        "format": case.kind,
        "ours_us": layer_us,
        "tflops": found.operations / layer_us / 1e6,
        "gb_per_s": found.traffic / layer_us / 1e3,
        "fraction_of_ceiling": found.least_us(reached, fp8 and form == "fp8") / layer_us,
        "bound": found.bound(reached, fp8 and form == "fp8"),
    }
    for name, peer in LAYER_PEERS.items():
        yield {**row, **_timed(name, peer, case)}
    product_us = microseconds(_product(case, fp8))
    both = {"op": "gate-up product", "ours_us": product_us}
    kept = {key: row[key] for key in ("shape", "format")}
    for name, peer in PRODUCT_PEERS.items():
        yield {**kept, **both, **_timed(name, peer, case)}


def _product(case: Case, fp8: bool) -> Callable[[], object]:
    """Prepare our gate-up product of rows that are already sorted and quantised."""
    routed = route(case.ids, len(case.gate_up.weight))
    x = case.x[routed.pairs.long() // case.ids.shape[1]]
    rows, scale = fp8_rows(x) if fp8 else (x, None)
    part = case.gate_up
    operands = GroupedOperands(rows, part.weight, routed.offsets, scale, part.weight_scale,
                               weight_global=part.weight_global)  # fmt: skip
    return lambda: m_grouped_gemm_nt_contiguous(operands)


def _timed(name: str, peer: Callable[[Case], Callable[[], object]], case: Case) -> Row:
    """Time a peer; if it raises, the row has the reason instead of a time."""
    try:
        return {"peer": name, "peer_us": microseconds(peer(case))}
    except Exception as error:
        return {"peer": name, "peer_us": None, "why": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    """Print JSON rows; without a device, the comparison and the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with float64 only")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.check:
        print(json.dumps(correctness(device)))
        return
    if device == "cpu":
        print("no CUDA device here: nothing is measured; correctness in the interpreter and plan")
        print(json.dumps({"calc_diff": interpreted_correctness()}))
        for row in plan(Matrix(tokens=options.tokens)):
            print(json.dumps(row))
        return
    print(json.dumps({"device": torch.cuda.get_device_name(), "calc_diff": correctness(device)}))
    for row in measured(Matrix(tokens=options.tokens)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
