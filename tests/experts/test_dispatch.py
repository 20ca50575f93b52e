"""Who computes experts where, why, and what happens when a backend fails."""

from __future__ import annotations

import json
import logging

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.dispatch import (
    Situation,
    announce,
    choose,
    read_times,
    with_fallback,
)

HOPPER = {"device": "cuda", "capability": (9, 0), "triton": True}


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"device": "cpu", "format": "mxfp4", "compiled": True}, "compiled"),
        ({"device": "cpu", "format": "fp8"}, "torch"),
        ({"device": "cpu", "format": "fp8", "triton": True}, "torch"),
        ({**HOPPER, "format": "fp8"}, "triton"),
        ({**HOPPER, "format": "bf16", "graph": True}, "triton"),
        ({**HOPPER, "format": "mxfp4"}, "torch"),
        ({**HOPPER, "format": "fp8", "capability": (8, 0)}, "torch"),
        ({**HOPPER, "format": "fp8", "triton": False}, "torch"),
    ],
)
def test_the_choice(fields: dict, backend: str) -> None:
    assert choose(Situation(**fields)).backend == backend


def test_what_a_graph_cannot_capture_is_not_chosen() -> None:
    with pytest.raises(DSparkError, match=r"mxfp4 experts on cuda: .*triton: takes.*torch: reads"):
        choose(Situation(**HOPPER, format="mxfp4", graph=True))


def test_measured_times_decide_among_those_that_can() -> None:
    situation = Situation(**HOPPER, format="fp8")
    found = choose(situation, {"triton": 30.0, "torch": 12.5, "compiled": 1.0})
    assert str(found) == "torch (measured 12.5 us)"
    assert found.passed_over["triton"] == "measured 30.0 us"


def test_bad_input_is_named() -> None:
    with pytest.raises(DSparkError, match="'int3' is none of"):
        Situation("cpu", "int3")
    with pytest.raises(DSparkError, match="-1 rows"):
        Situation("cpu", "fp8", rows=-1)


def test_a_failing_backend_is_one_line_and_the_next_one(caplog) -> None:
    situation = Situation(**HOPPER, format="fp8")

    def broken() -> str:
        raise RuntimeError("no such kernel image\nand more")

    with caplog.at_level(logging.WARNING):
        assert with_fallback(situation, {"triton": broken, "torch": lambda: "done"}) == "done"
    assert [r.getMessage() for r in caplog.records] == [
        "sglang-dspark: experts by triton failed: no such kernel image"
    ]
    with pytest.raises(DSparkError, match="every backend failed"):
        with_fallback(situation, {"triton": broken})


def test_a_slow_path_is_announced(caplog) -> None:
    with caplog.at_level(logging.INFO):
        announce(choose(Situation("cpu", "fp8", compiled=True)))
        announce(choose(Situation("cpu", "fp8")))
    first, second = caplog.records
    assert (first.levelno, second.levelno) == (logging.INFO, logging.WARNING)
    assert "experts by torch" in second.getMessage()
    assert "not by compiled: needs float32" in second.getMessage()


def test_times_are_read_for_this_device_and_the_nearest_rows(tmp_path) -> None:
    file, situation = tmp_path / "times.json", Situation(**HOPPER, format="fp8", rows=5)
    assert read_times(file, "H100", situation) == {}
    rows = [
        {"format": "fp8", "rows": 4, "backend": "triton", "us": 20},
        {"format": "fp8", "rows": 4, "backend": "torch", "us": 40},
        {"format": "fp8", "rows": 64, "backend": "torch", "us": 60},
        {"format": "bf16", "rows": 5, "backend": "torch", "us": 1},
    ]
    file.write_text(json.dumps({"device": "H100", "versions": {}, "rows": rows}))
    assert read_times(file, "H100", situation) == {"triton": 20.0, "torch": 40.0}
    assert read_times(file, "H200", situation) == {}
    file.write_text("[]")
    with pytest.raises(DSparkError, match="no table of expert times"):
        read_times(file, "H100", situation)
