"""No accept kernel is compiled while serving, and one that is gets counted."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from prometheus_client import CollectorRegistry

pytest.importorskip("sglang")

from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_dspark.backends.cuda import accept_warm_up
from sglang_dspark.backends.cuda.compilations import watch
from sglang_dspark.serving.metrics import Collector, StepMetrics
from tests.kernels.processes import output_of


def test_served_steps_launch_variants_that_the_start_compiled() -> None:
    """Random batches of all settings; what Triton compiles anew for."""
    report = json.loads(output_of("tests.backends.cuda.interpreted_warm_up").splitlines()[-1])
    for rule, kernels in (("block", 29), ("token", 26)):
        found = report[rule]
        assert found["missing"] == []
        # On whole rows uncut, cut, or cut beside lists, drafted or not; by block a drafted step has
        # two kernels. On lists of three lengths three kernels each, drafted or not; rows are scaled
        # by one for all lengths. Penalties have a kernel each for one row and for a window.
        assert found["warmed"] == found["served"] == kernels
        assert found["ours"] > 20


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        ({}, (False, False, False, False)),
        ({"top_k": 20}, (True, False, False, False)),
        ({"top_p": 0.95}, (False, True, False, False)),
        ({"min_p": 0.05}, (False, False, True, False)),
        ({"top_k": 1}, (True, False, False, True)),
        ({"top_k": 2}, (True, False, False, False)),
    ],
)
def test_made_up_steps_have_the_flags_of_their_settings(
    changed: dict[str, Any], flags: tuple[bool, ...]
) -> None:
    usual = {"temperature": 1.0, "top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0}
    params = [SimpleNamespace(**usual), SimpleNamespace(**usual | changed)]
    info = accept_warm_up.sampling_info(params, torch.device("cpu"))
    found = (
        info.need_top_k_sampling, info.need_top_p_sampling, info.need_min_p_sampling,
        info.is_any_greedy,
    )  # fmt: skip
    assert found == flags
    assert not info.is_all_greedy
    assert info.max_top_k is None, "a request has no top-k"
    assert accept_warm_up.sampling_info(params[1:], torch.device("cpu")).max_top_k == (
        changed.get("top_k")
    )
    assert info.temperatures.shape == (2, 1)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, {1}), (2, {1, 2}), (6, {1, 2, 3, 4, 6}), (48, {1, 2, 3, 4, 16})]
)
def test_sizes_of_made_up_steps_are_those_that_kernels_tell_apart(
    most: int, sizes: set[int]
) -> None:
    """And no step has more requests than the server runs."""
    asked: list[Any] = []
    penalised: list[int] = []
    device: Any = SimpleNamespace(
        accept=lambda made_up, verified: asked.append(made_up),
        penalise=lambda penalties, logits, ids, lens: penalised.append(ids.shape[1]),
    )
    block = SimpleNamespace(greedy_draft=True, corrected_logits=None)
    accept_warm_up.warm_up(device, accept_warm_up.Shape(2, torch.zeros(1, 8), block), most)
    assert {each.requests for each in asked} == sizes
    assert {each.ids.shape[1] for each in asked} == {3}
    assert penalised == [1, 3]


@pytest.mark.parametrize("requests", range(1, 130))
def test_every_number_of_requests_is_like_one_that_was_made_up(requests: int) -> None:
    """To Triton: whether it is 1 or divisible by 16, and where rows of [3, R] int32 begin."""

    def kind(size: int) -> tuple[bool, ...]:
        rows = torch.empty(3, size, dtype=torch.int32)
        aligned = (row.data_ptr() % 16 == 0 for row in rows)
        return (size == 1, size % 16 == 0, *aligned)

    assert kind(requests) in {kind(each) for each in accept_warm_up.REQUESTS}


def test_made_up_steps_are_on_the_device_of_the_logits() -> None:
    """Not on torch's default device, which is one without values here."""
    block = SimpleNamespace(greedy_draft=False, corrected_logits=torch.zeros(1, 2, 8))
    shape = accept_warm_up.Shape(2, torch.zeros(1, 8), block)
    assert list(accept_warm_up.steps(shape, 2)), "SGLang's modules are imported"
    with torch.device("meta"):
        asked, verified = next(accept_warm_up.steps(shape, 2))
    info, block = asked.batch.sampling_info, asked.proposal.draft_block
    tensors = (
        *(asked.ids, asked.layout.verify_lens, asked.layout.qo_indptr_device, asked.batch.seq_lens),
        *(info.temperatures, info.top_ks, info.top_ps, info.min_ps, block.greedy_mask),
        *(block.draft_tokens, block.corrected_logits, verified.outputs.next_token_logits),
    )
    assert {each.device.type for each in tensors} == {"cpu"}
    assert asked.layout.qo_indptr_device.tolist() == [0, 1, 2]


class Device:
    """Accepts nothing."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def accept(self, asked: Any, verified: Any) -> None:
        raise self._error


def test_a_warm_up_that_fails_does_not_end_the_start(caplog: pytest.LogCaptureFixture) -> None:
    block = SimpleNamespace(greedy_draft=True, corrected_logits=None)
    shape = accept_warm_up.Shape(2, torch.zeros(1, 8), block)
    device: Any = Device(ImportError("no nvcc"))
    accept_warm_up.warm_up(device, shape, 4)
    assert "compiled while serving" in caplog.text
    assert "no nvcc" in caplog.text
    device = Device(torch.AcceleratorError("CUDA error"))
    with pytest.raises(torch.AcceleratorError):
        accept_warm_up.warm_up(device, shape, 4)


def compiled(name: str, *, cache_hit: bool) -> dict[str, Any]:
    """Return the arguments of a compilation listener."""
    times = SimpleNamespace(total=2_500_000)
    source = SimpleNamespace(name=name)
    return {
        "src": source, "metadata": {}, "metadata_group": {}, "times": times, "cache_hit": cache_hit,
    }  # fmt: skip


def test_compilations_are_counted_and_loads_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    before: list[str] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **said: before.append(said["src"].name)
    )
    registry = CollectorRegistry()
    collector = Collector({"model_name": "m"}, registry)
    planner: Any = None
    watch(StepMetrics(planner, planner, collector).kernel_compiled)
    listener = triton.knobs.compilation.listener
    assert listener is not None
    listener(**compiled("a", cache_hit=False))
    listener(**compiled("b", cache_hit=True))
    name = "sglang:dspark_kernel_compilations_total"
    assert registry.get_sample_value(name, {"model_name": "m"}) == 1
    assert before == ["a", "b"]
    assert "Triton compiled a in 2.5 s" in caplog.text
    assert "compiled b" not in caplog.text
