"""The engine of a server at start: calibration by `sts.json`, labels, fallbacks."""

from __future__ import annotations

import hashlib
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from sglang_dspark.serving.fallbacks import Fallback
from sglang_dspark.step import build
from sglang_dspark.step.build import _calibration, _collector, _lag
from sglang_dspark.step.engine_protocol import GREEDY, SAMPLED

LOGITS = (-2.0, -0.5, 0.0, 0.4, 3.0)
WEIGHTS = b"weights of the drafter"
TEMPERATURE = {"greedy": (0.5, 1.25, 2.0), "sampled": (0.8, 3.0, 0.7)}
SHIFT = {"greedy": 0.3, "sampled": -0.6}
BY_POSITION = {"greedy": (0.0, 0.2, -0.4), "sampled": (0.1, -0.3, 0.5)}


def table(regime: str) -> dict[str, Any]:
    """A regime's entry of the file; its plain temperatures are not those to be used."""
    return {
        "temperatures": [1.7, 1.8, 1.9],
        "sampling": {},
        "dataset": "prompts",
        "prompts": 40,
        "steps": 900,
        "counts": [900, 700, 500],
        "ece_before": [0.1, 0.1, 0.1],
        "ece_after": [0.01, 0.01, 0.01],
        "shift": SHIFT[regime],
        "shifted_temperatures": TEMPERATURE[regime],
        "held_out": {},
        "position_shifts": BY_POSITION[regime],
        "request_spread": 0.2,
    }


def worker_with(folder: Path, document: dict[str, Any] | None) -> Any:
    """The part of upstream's worker that `_calibration` reads: the drafter's path."""
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    if document is not None:
        (folder / "sts.json").write_text(json.dumps(document))
    model = SimpleNamespace(model_path=str(folder))
    return SimpleNamespace(draft_model_runner=SimpleNamespace(model_config=model))


def ours(**changed: Any) -> dict[str, Any]:
    return {
        "format": "sglang-dspark sts 1",
        "tables": {regime: table(regime) for regime in TEMPERATURE},
        "drafter_sha256": hashlib.sha256(b"model.safetensors" + WEIGHTS).hexdigest(),
        "target_sha256": "",
        "fit_prompts": [],
        "versions": {},
        "date": "2026-01-01",
    } | changed


def confidence(worker: Any, regime: int, logit: float) -> list[float]:
    """c_1 .. c_3 of a new request whose head says `logit` everywhere."""
    calibration, _, _ = _calibration(worker, 3, 4)
    logits = np.full((1, 3), logit, np.float32)
    slots = np.zeros(1, np.int64), np.ones(1, np.int64)
    out = np.zeros((1, 3), np.float32)
    return calibration.confidence(logits, np.array([regime]), out, slots)[0].tolist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("logit", LOGITS)
@pytest.mark.parametrize(("number", "regime"), [(GREEDY, "greedy"), (SAMPLED, "sampled")])
def test_confidence_is_the_files(tmp_path: Path, number: int, regime: str, logit: float) -> None:
    """sigmoid((logit + shift + shift_k) / T_k), of the regime asked for."""
    expected = [
        sigmoid((logit + SHIFT[regime] + own) / temperature)
        for temperature, own in zip(TEMPERATURE[regime], BY_POSITION[regime], strict=True)
    ]
    found = confidence(worker_with(tmp_path, ours()), number, logit)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("logit", LOGITS)
def test_stock_sglangs_table_serves_both_regimes(tmp_path: Path, logit: float) -> None:
    worker = worker_with(tmp_path, {"temperatures": [0.5, 1.25, 2.0]})
    expected = [sigmoid(logit / 0.5), sigmoid(logit / 1.25), sigmoid(logit / 2.0)]
    for regime in (GREEDY, SAMPLED):
        assert confidence(worker, regime, logit) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("document", [None, ours(drafter_sha256="0" * 64), {"temperatures": [1]}])
def test_without_a_table_that_fits_the_head_is_believed(
    tmp_path: Path, document: dict[str, Any] | None
) -> None:
    worker = worker_with(tmp_path, document)
    assert _calibration(worker, 3, 4)[2] == (() if document is None else (Fallback.STS_REFUSED,))
    for logit in LOGITS:
        expected = [sigmoid(logit)] * 3
        assert confidence(worker, GREEDY, logit) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("overlaps", "lag"), [(False, 1), (True, 2)])
def test_confidence_arrives_a_step_later_where_steps_overlap(
    overlaps: bool, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context

    flags = SimpleNamespace(disable_overlap_schedule=not overlaps)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: flags)
    assert _lag() == lag


@pytest.mark.parametrize(("replica", "more"), [(None, {}), (1, {"dp_rank": "1"})])
def test_replicas_are_distinguished(
    replica: int | None, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGLang's own label: their counters would be added up without it."""
    from sglang.srt import runtime_context

    for name, values in {
        "get_observability": {"enable_metrics": True},
        "get_serving": {"served_model_name": "target"},
        "get_parallel": {"tp_rank": 0, "dp_rank": replica},
    }.items():
        monkeypatch.setattr(runtime_context, name, partial(SimpleNamespace, **values))
    monkeypatch.setattr(build, "Collector", lambda labels: labels)
    assert _collector() == {"model_name": "target", "tp_rank": "0", **more}
