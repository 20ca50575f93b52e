"""The published figures of a sweep: the content of `results/sweep_<device>.json`."""

from __future__ import annotations

from typing import Any

from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.loadtest.sweep.run_dir import Level, RunInfo, Summary


def as_metrics(config: SweepConfig, info: RunInfo, summary: Summary) -> dict[str, Any]:
    """Build the JSON metrics: verdict, ratio at matched throughput, each arm at each load."""
    metrics: dict[str, Any] = {
        "label": summary.label,
        "verdict": summary.verdict,
        "complete": info.ended is not None,
        "trials": config.trials,
        "mix": config.mix,
        "sweep_commit": info.commit,
    }
    if config.compare is not None and summary.matched:
        first = summary.matched[0]
        metrics[f"matched_speed_ratio_vs_{first.under}"] = {
            "low": first.low,
            "mid": first.mid,
            "high": first.high,
            "levels": [level.model_dump() for level in first.levels],
            "left_out": first.left_out,
        }
    metrics["by_concurrency"] = _by(summary, "closed", "concurrency")
    metrics["by_rate"] = _by(summary, "open", "rate")
    metrics["ratios"] = [each.model_dump() for each in summary.ratios]
    metrics["slas"] = [each.model_dump() for each in summary.slas]
    metrics["bursts"] = [each.model_dump() for each in summary.bursts]
    metrics["hold"] = None if summary.hold is None else summary.hold.model_dump()
    metrics["notes"] = summary.notes
    return metrics


def _by(summary: Summary, loop: str, key: str) -> list[dict[str, Any]]:
    levels = sorted({row.level for row in summary.levels if row.loop == loop})
    return [
        {
            key: level,
            **{
                row.arm: _figures(row)
                for row in summary.levels
                if (row.loop, row.level) == (loop, level)
            },
        }
        for level in levels
    ]


def _figures(row: Level) -> dict[str, Any]:
    return row.model_dump(exclude={"arm", "loop", "level"})
