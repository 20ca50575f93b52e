"""Learning curves of training runs, as their journals have them (`training/journal.py`).

What is shown is measured on answers that were never trained on: tau at temperature 1, teacher
forced, the mean over anchors of 1 + sum_k prod_{i<=k} sum_v min(p_i(v), q_i(v)) along the target's
own tokens (`training/metrics.py`). It is no decoding, but one measure for all kinds of drafters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import load_json, parse_json, reading
from sglang_dspark.errors import DSparkError

_MEASURED = ("held_out_tau", "held_out_loss", "held_out_ece")


def learning_curves(runs: Sequence[tuple[str, Path]]) -> dict[str, Any]:
    """Held-out tau by step of several run directories; all must be of one target.

    runs: label and directory (run.json, metrics.jsonl) of each. Raises DSparkError for a directory
    that is no run, one without a measurement, and labels that repeat.
    """
    labels = [label for label, _ in runs]
    if len(set(labels)) < len(labels):
        raise DSparkError(f"labels must differ here, found {', '.join(labels)}")
    read = {label: _run(folder) for label, folder in runs}
    targets = {each["target_sha256"] for each in read.values()}
    if len(targets) > 1:
        raise DSparkError(f"the runs {', '.join(labels)} are of {len(targets)} targets, not of one")
    return {
        "analysis": "curves",
        "target": next(iter(read.values()))["target"],
        "settings": {"temperature": 1.0, "teacher_forced": True},
        "runs": read,
    }


def _run(folder: Path) -> dict[str, Any]:
    """Facts and measured points of one run."""
    with reading(folder, "training run", "name a run_dir of `dspark train`"):
        facts = load_json(folder / "run.json", finite=False)
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [parse_json(line, finite=False) for line in lines]
        config = facts["config"]
        shape, schedule = config["drafter"], config["schedule"]
        found = {
            "kind": shape["kind"],
            "layers": shape.get("layers", 1),
            "head": shape.get("markov_head_type", "none"),
            "commit": facts["commit"],
            "target": Path(config["data"]["target"]).name,
            "target_sha256": facts["target_sha256"],
            "sequences": facts["sequences"],
            "planned_steps": schedule["steps"],
            "anchors_per_step": schedule["sequences_per_step"] * schedule["anchors_per_sequence"],
            "points": _points(rows),
        }
    if not found["points"]:
        raise DSparkError(f"{folder}: nothing was measured on held-out answers yet")
    return found


def _points(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Measured rows; of a step that was run again after a resume, the last one counts."""
    kept = {
        int(row["step"]): {name: row[name] for name in _MEASURED if name in row}
        for row in rows
        if "held_out_tau" in row
    }
    return [{"step": step, **kept[step]} for step in sorted(kept)]
