"""Times the experts' kernels on a CUDA device: `python -m sglang_dspark.benchmarks.experts`.

Needs torch and triton only; peers are timed where they are installed. First it compares every
format with float64, then measures what the device reaches (bandwidth, BF16 and FP8 products), then
layers: one JSON row each, `{op, shape, format, ours_us, peer, peer_us, fraction_of_ceiling}` and
more. Times are medians of a captured graph after the cache has been overwritten.

Without such a device it compares in Triton's interpreter, prints the roofline plan of an H100, and
measures nothing, which it says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

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
from sglang_dspark.kernels.fp8_rows import fp8_rows
from sglang_dspark.kernels.grouped_gemm import m_grouped_gemm_nt_contiguous
from sglang_dspark.kernels.grouped_layout import GroupedOperands
from sglang_dspark.kernels.grouped_moe import fused_experts, fused_experts_reference
from sglang_dspark.kernels.grouped_reference import activation_values, calc_diff
from sglang_dspark.kernels.routing import route

REPEATS = 30
_FLUSH = 256 * 2**20  # bytes; more than any second-level cache
_SPARE = 0.8  # part of the memory that weights may take

Row = dict[str, Any]


def correctness(device: str) -> dict[str, float]:
    """calc_diff of a small layer in every format against float64, FP8 rows rounded in both."""
    report = {}
    for kind in KINDS:
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
    """The same in a process whose triton is interpreted: no device is needed."""
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


def plan(tokens: tuple[int, ...], ceilings: Ceilings = NOMINAL_H100) -> Iterator[Row]:
    """The least time of every layer, format and routing; nothing is run."""
    for layer in LAYERS:
        for count in tokens:
            for kind in ROUTINGS:
                ids = routing(layer, count, kind)
                for form in ("bf16", "fp8", "mxfp4"):
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
    """What the current device reaches: a copy of 2 GiB, and torch's own products of 8192."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us = microseconds(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    bf16_us = microseconds(lambda: a @ a)
    one = torch.ones((), device="cuda")
    b = a.to(torch.float8_e4m3fn)
    fp8_us = microseconds(
        lambda: torch._scaled_mm(b, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )
    operations = 2.0 * 8192**3
    return Ceilings("measured", 2 * 2**31 / copy_us * 1e6, operations / bf16_us * 1e6,
                    operations / fp8_us * 1e6)  # fmt: skip


def microseconds(call: Callable[[], object]) -> float:
    """Median time of a call as a captured graph, after other data has filled the cache."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measured(tokens: tuple[int, ...]) -> Iterator[Row]:
    """Rows of all layers that fit the device, ours beside each peer."""
    reached = ceilings()
    memory = torch.cuda.get_device_properties(0).total_memory
    for layer in LAYERS:
        for kind in KINDS:
            form = kind.split(" x ")[1]
            if layer.bytes_of(form, layer.experts) > _SPARE * memory:
                continue
            shapes = ((2 * layer.inner, layer.width), (layer.width, layer.inner))
            parts = [device_weights(form, (layer.experts, *shape), "cuda") for shape in shapes]
            for count in tokens:
                for way in ROUTINGS:
                    ids = routing(layer, count, way)
                    x = torch.randn(count, layer.width, device="cuda").bfloat16()
                    even = torch.full(ids.shape, 1 / layer.top_k, device="cuda")
                    case = Case(kind, x, ids.cuda(), even, parts[0], parts[1])
                    yield from _rows(layer, case, way, reached)
            del parts, case


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
    """Our gate-up product of rows that are already sorted and quantised."""
    routed = route(case.ids, len(case.gate_up.weight))
    x = case.x[routed.pairs.long() // case.ids.shape[1]]
    rows, scale = fp8_rows(x) if fp8 else (x, None)
    part = case.gate_up
    operands = GroupedOperands(rows, part.weight, routed.offsets, scale, part.weight_scale,
                               weight_global=part.weight_global)  # fmt: skip
    return lambda: m_grouped_gemm_nt_contiguous(operands)


def _timed(name: str, peer: Callable[[Case], Callable[[], object]], case: Case) -> Row:
    """A peer's time, or why there is none: it is not ours to mend, and is reported."""
    try:
        return {"peer": name, "peer_us": microseconds(peer(case))}
    except Exception as error:
        return {"peer": name, "peer_us": None, "why": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    """Print JSON rows, or what can be said without a device."""
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
        for row in plan(tuple(options.tokens)):
            print(json.dumps(row))
        return
    print(json.dumps({"device": torch.cuda.get_device_name(), "calc_diff": correctness(device)}))
    for row in measured(tuple(options.tokens)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
