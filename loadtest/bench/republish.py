"""Recompute bench results from their saved trials: `dspark report --intervals FILE`.

Measurements, their command, device and date are unchanged; ratios, intervals and sentences are
recomputed by the present rule (`intervals`), so a change of the rule needs no new measurement. An
interval whose trials a file does not hold is removed, as it followed an older rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import load_json, reading
from sglang_dspark.loadtest.bench import adaptive_results, paired
from sglang_dspark.loadtest.results import command, commit, now, require_clean, write_document

Metrics = dict[str, Any]


def republish(path: Path) -> Metrics:
    """Rewrite a result file of `dspark bench adaptive` or `serve`; return its metrics.

    Raises DSparkError if the file is no such result, or must not be written.
    """
    require_clean(path)
    with reading(path, "result of `dspark bench adaptive` or `serve`", "name such a result file"):
        document = load_json(path)
        metrics = taken_again(document["metrics"])
    intervals = {"command": command(), "commit": commit(), "date": now()}
    write_document(path, {**document, "metrics": metrics, "intervals": intervals})
    return metrics


def taken_again(metrics: Mapping[str, Any]) -> Metrics:
    """Recompute every ratio from its row's trials. Raises LookupError without trials."""
    rows = metrics["by_concurrency"]
    if all("trials" in row for row in rows):
        again = [
            adaptive_results.compared(row["concurrency"], row["trials"], row["tau"]) for row in rows
        ]
        return {**metrics, "by_concurrency": again, **adaptive_results.sentences(again)}
    again = [_serve_row(row) for row in rows]
    found = {**metrics, "by_concurrency": again}
    alone = [row for row in again if row["concurrency"] == 1]
    if alone:
        found["speedup_vs_plain_c1"] = alone[0]["speedup"]
        found["step"] = _serve_step(metrics["step"])
    return found


def _serve_row(row: Mapping[str, Any]) -> Metrics:
    return {**row, "whole_round_speedup_ci95": None, **paired.speedups(row["repeats"])}


def _serve_step(step: Mapping[str, Any]) -> Metrics:
    if "repeats" not in step:
        return {**step, "ratio_ci95": None}
    return paired.step_cost(**step["repeats"])
