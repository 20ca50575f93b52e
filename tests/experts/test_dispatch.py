"""Test which backend computes experts, the logged reason, and the fallback when one fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from sglang_dspark.backends.moe import expert_backends
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.moe import MoE
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts import backends as registry
from sglang_dspark.experts.backends import (
    BACKENDS,
    Backend,
    Call,
    ExpertWeights,
    ExpertWorkload,
    register,
)
from sglang_dspark.experts.dispatch import Chooser, RoutedExperts, announce, choose
from sglang_dspark.experts.gpu_backends import ALIGNED, aligned_places
from sglang_dspark.experts.times import TimesKey, TimesTable, Timing
from sglang_dspark.quantisation.formats import quantise
from tests.drafter.helpers import tiny_config
from tests.kernels.processes import output_of

HOPPER = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16}
DEEP = {**HOPPER, "format": "fp8", "inner": 256, "width": 512}


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that all packages are installed."""
    monkeypatch.setattr(registry, "find_spec", lambda package: package)


@pytest.fixture
def own_backends() -> Iterator[None]:
    """A test's own backends are gone behind it."""
    before = dict(BACKENDS)
    yield
    BACKENDS.clear()
    BACKENDS.update(before)


def weights(format_: str = "bf16", inner: int = 32) -> ExpertWeights:
    torch.manual_seed(0)
    shapes = ((4, inner, 64), (4, inner, 64), (4, 64, inner))
    gate, up, down = (torch.randn(shape) / 8 for shape in shapes)
    return ExpertWeights(format_, (gate, up, down))


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    ids = torch.rand(count, 4).argsort(-1)[:, :2].contiguous()
    return torch.randn(count, 64), ids, torch.rand(count, 2)


SMALL = ExpertWorkload("cpu", "bf16", 4, 32, 64, 2)


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"device": "cpu", "format": "mxfp4"}, "compiled"),
        ({"device": "cpu", "format": "fp8", "inner": 520}, "torch"),
        ({"device": "cpu", "format": "fp8", "tokens": 257}, "torch"),
        ({"device": "cpu", "format": "fp8", "dtype": torch.bfloat16}, "torch"),
        ({**HOPPER, "format": "fp8"}, "triton"),
        ({**HOPPER, "format": "bf16", "graph": True}, "triton"),
        ({**HOPPER, "format": "mxfp4"}, "triton"),
        ({**HOPPER, "format": "fp8", "capability": (8, 0)}, "torch"),
        ({**HOPPER, "format": "fp8", "inner": 520}, "torch"),
    ],
)
def test_the_choice(fields: dict, backend: str) -> None:
    assert choose(ExpertWorkload(**fields)).backend == backend


def test_the_choice_where_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda package: package != "triton" or None)
    found = choose(ExpertWorkload(**DEEP))
    assert found.backend == "deep_gemm"
    assert found.passed_over["triton"] == "triton is not installed"


@pytest.mark.parametrize(
    ("change", "name", "why"),
    [
        ({"format": "mxfp4"}, "deep_gemm", "wired for fp8"),
        ({"width": 576}, "deep_gemm", "576 x 256 are no multiples of 128"),
        ({"capability": (10, 0)}, "deep_gemm", "wired for Hopper"),
        ({"capability": (8, 9)}, "deep_gemm", "wired for Hopper"),
        ({"format": "bf16"}, "triton-fp8", "no FP8 rows with BF16 weights"),
        ({}, "flashinfer", "wired for bf16"),
        ({"format": "bf16", "capability": (8, 0)}, "flashinfer", "compute capability 9.0"),
        ({"format": "nvfp4"}, "sglang", "takes bf16 and fp8"),
        ({}, "humming", "wired for mxfp4"),
        ({"format": "mxfp4", "inner": 192}, "humming", "512 x 192 are no multiples of 128"),
        ({"format": "mxfp4", "capability": (7, 5)}, "humming", "compute capability 8.0"),
        ({"device": "cpu", "capability": None}, "sglang", "for CUDA devices"),
        ({"graph": True}, "torch", "reads counts on the host"),
    ],
)
def test_what_others_do_not_serve(change: dict, name: str, why: str) -> None:
    assert why in (BACKENDS[name].why_not(ExpertWorkload(**{**DEEP, **change})) or "")


def test_where_none_can_all_say_why() -> None:
    workload = ExpertWorkload("cuda", "mxfp4", graph=True, capability=(7, 5))
    with pytest.raises(
        DSparkError, match=r"mxfp4 experts on cuda in a graph: .*triton: needs.*torch: reads"
    ):
        choose(workload)


def test_measured_times_decide_among_those_that_can() -> None:
    workload = ExpertWorkload(**DEEP)
    found = choose(workload, {"triton": 30.0, "torch": 12.5, "compiled": 1.0})
    assert str(found) == "torch (measured 12.5 us)"
    assert found.passed_over["triton"] == "measured 30.0 us"
    assert choose(workload, {"triton": 30.0, "torch": 29.0}).backend == "triton"  # no real gain
    assert choose(workload, {"triton": 1.0, "torch": 9.0}, {"triton": "failed"}).backend == "torch"


def test_bad_input_is_named() -> None:
    with pytest.raises(DSparkError, match="'int3' is none of"):
        ExpertWorkload("cpu", "int3")
    with pytest.raises(DSparkError, match="-1 tokens"):
        ExpertWorkload("cpu", "fp8", tokens=-1)
    with pytest.raises(DSparkError, match="top 9 of 8"):
        ExpertWorkload("cpu", "fp8", top_k=9)
    good = weights()
    assert good.values is not None
    gate, up, down = good.values
    with pytest.raises(DSparkError, match=r"are not \[E, I, d\] twice"):
        ExpertWeights("bf16", (gate, up, up))
    with pytest.raises(DSparkError, match="neither codes nor values"):
        ExpertWeights("bf16")
    bad = up.clone()
    bad[1, 2, 3] = float("inf")
    with pytest.raises(DSparkError, match="1 of 8192 up weights are NaN or infinite"):
        ExpertWeights("bf16", (gate, bad, down))
    codes = [quantise(part, "fp8") for part in (gate, up, down)]
    codes[2].scales[0, 0, 0] = float("nan")
    with pytest.raises(DSparkError, match="1 of 4 down scales are NaN or infinite"):
        ExpertWeights("fp8", codes=tuple(codes))
    with pytest.raises(DSparkError, match="gate is fp8, not mxfp4"):
        ExpertWeights("mxfp4", codes=tuple(codes))


@pytest.mark.parametrize("name", ["torch", "compiled"])
def test_backends_here_agree_with_the_module(name: str) -> None:
    module = MoE(tiny_config(hidden_size=64, num_experts=4, experts_per_token=2,
                             moe_intermediate_size=32, num_shared_experts=0))  # fmt: skip
    shape = module.gate.c
    call = BACKENDS[name].prepare(expert_backends.weights_of(module.experts, shape))
    x = torch.randn(9, 64)
    with torch.no_grad():
        routing = module.gate(x)
        found = call(x, routing.experts, routing.weights)
        torch.testing.assert_close(found, module(x), atol=1e-5, rtol=1e-4)


def test_no_tokens_give_no_rows_and_unknown_experts_are_named() -> None:
    layer = RoutedExperts(weights(), Chooser(SMALL))
    x, ids, own = rows(3)
    with torch.no_grad():
        assert layer(x[:0], ids[:0], own[:0]).shape == (0, 64)
        with pytest.raises(DSparkError, match=r"names experts 1\.\.4, there are 4"):
            layer(x, ids + 1 - ids.min(), own)


def test_a_failing_backend_is_one_line_and_the_next_one_takes_the_call(
    own_backends: None, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def broken(_weights: ExpertWeights):
        def call(x, ids, own):
            calls.append(len(x))
            raise RuntimeError("no such kernel image\nand more")

        return call

    register(Backend("broken", lambda: None, lambda s: None, broken), before="compiled")
    chooser = Chooser(SMALL)
    layers = [RoutedExperts(weights(), chooser) for _ in range(3)]
    x, ids, own = rows(5)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        outs = [layer(x, ids, own) for layer in layers]
        expected = BACKENDS["torch"].prepare(weights())(x, ids, own)
    torch.testing.assert_close(outs[2], expected, atol=1e-5, rtol=1e-4)
    assert calls == [5], "asked again"
    (line,) = [r.getMessage() for r in caplog.records]
    assert "experts by compiled" in line
    assert line.endswith("; broken failed: no such kernel image")
    for name in [n for n in BACKENDS if n != "broken"]:
        chooser.drop(name, ValueError("gone"))
    with pytest.raises(DSparkError, match=r"broken: failed: no such.*torch: failed: gone"):
        layers[0](x, ids, own)


def test_times_of_the_nearest_number_of_tokens_are_taken() -> None:
    key = TimesKey.of(SMALL, "here", "")
    timings = (
        Timing(4, "compiled", 10), Timing(4, "torch", 50),
        Timing(128, "compiled", 90), Timing(128, "torch", 60),
    )  # fmt: skip
    chooser = Chooser(SMALL, TimesTable(key, "2026-01-01T00:00:00+00:00", timings, {}))
    assert [chooser.name(n) for n in (1, 5, 16, 100, 300)] == ["compiled"] * 3 + ["torch"] * 2


def test_a_slow_path_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        announce(choose(ExpertWorkload("cpu", "fp8")))
        announce(choose(ExpertWorkload("cpu", "fp8", inner=520)))
    first, second = caplog.records
    assert (first.levelno, second.levelno) == (logging.INFO, logging.WARNING)
    assert "experts by torch" in second.getMessage()
    assert "compiled: needs float32" in second.getMessage()


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_groups_of_whole_blocks(tokens: int) -> None:
    """Every pair in a row of its own that is owned by its expert; groups begin at blocks."""
    ids = torch.randint(0, 6, (tokens, 2), generator=torch.Generator().manual_seed(tokens))
    place, owners = aligned_places(ids, 6)
    assert len(owners) % ALIGNED == 0
    assert len(place.unique()) == ids.numel()
    assert torch.equal(owners[place].long(), ids.flatten())
    blocks = owners.view(-1, ALIGNED)
    assert (blocks == blocks[:, :1]).all()
    assert (owners.diff() >= 0).all()


def test_our_kernels_as_backends_in_the_interpreter() -> None:
    assert output_of("tests.experts.interpreted_backends").split() == ["10", "agree"]


@pytest.fixture
def served() -> tuple[list[ExpertWeights], DrafterConfig]:
    """Two layers of a drafter on this machine."""
    fields = {"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 32}
    return [weights(), weights()], tiny_config(hidden_size=64, **fields)


def test_weights_are_made_ready_before_the_first_pass(
    served: tuple[list[ExpertWeights], DrafterConfig], own_backends: None
) -> None:
    prepared = []

    def counting(given: ExpertWeights) -> Call:
        prepared.append(given)
        return BACKENDS["torch"].prepare(given)

    register(Backend("counting", lambda: None, lambda s: None, counting), before="compiled")
    found, shape = served
    layers = expert_backends.routed_layers(found, shape, ranks=2).layers
    assert prepared == found
    with torch.no_grad():
        layers[0](*rows(5))
    assert len(prepared) == 2


def test_what_no_graph_may_hold_is_said_once_and_computed_outside(
    served: tuple[list[ExpertWeights], DrafterConfig], caplog: pytest.LogCaptureFixture
) -> None:
    found, shape = served
    with caplog.at_level(logging.WARNING):
        routed = expert_backends.routed_layers(found, shape, ranks=2, in_graphs=True)
    assert not routed.in_graphs
    (line,) = [r.getMessage() for r in caplog.records if "outside graphs" in r.getMessage()]
    assert "compiled: computes on the host, which a graph cannot" in line
    assert "torch: reads counts on the host, which a graph cannot" in line
    x, ids, own = rows(5)
    with torch.no_grad():
        expected = BACKENDS["torch"].prepare(found[0])(x, ids, own)
        torch.testing.assert_close(routed.layers[0](x, ids, own), expected, atol=1e-5, rtol=1e-4)


def test_a_backend_that_fails_when_it_is_tried_leaves_the_graphs_too(
    served: tuple[list[ExpertWeights], DrafterConfig],
    own_backends: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(given: ExpertWeights) -> Call:
        raise RuntimeError("no kernel image")

    register(Backend("kernels", lambda: None, lambda s: None, failing), before="compiled")
    found, shape = served
    routed = expert_backends.routed_layers(found, shape, ranks=2, in_graphs=True)
    assert not routed.in_graphs
    assert "draft passes run outside graphs: " in caplog.text
    assert "kernels: failed: no kernel image" in caplog.text


def test_layers_for_graphs_take_what_a_graph_may_hold(
    served: tuple[list[ExpertWeights], DrafterConfig], own_backends: None
) -> None:
    register(Backend("static", lambda: None, lambda s: None, BACKENDS["torch"].prepare))
    found, shape = served
    routed = expert_backends.routed_layers(found, shape, ranks=2, in_graphs=True)
    assert routed.in_graphs
    assert [layer.chooser.name(64) for layer in routed.layers] == ["static"] * 2
