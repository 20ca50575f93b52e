"""Measure whether a published drafter's anchor row drafts, if its config.json does not say so.

Speculators wrote no `sample_from_anchor` before 0.7.0, and the weights are the same either way.
With the wrong value, a row drafts the token next to the one that it was trained on, and first
drafts are seldom accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sglang_dspark.drafter.fields import raw_config
from sglang_dspark.drafter.speculators import MARK
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.registry import drafter_layers, open_drafter

FIELD = "sample_from_anchor"
TOKENS = 32  # of each answer
LEAST_POSITIONS = 100  # of first drafts, for each value
LEAST_GAP = 0.2  # of acceptance: three standard errors of a difference at that many positions


def is_missing(drafter: Path) -> bool:
    """Return whether config.json is of a DSpark drafter of Speculators, without the field."""
    raw = raw_config(drafter)
    return raw.get(MARK) == "dspark" and raw.get(FIELD) is None


def settled(drafter: Path, value: bool, out: Path) -> Path:
    """Write the drafter into `out` with this value of the field; link its weights."""
    out.mkdir()
    for file in drafter.iterdir():
        if file.name != "config.json":
            (out / file.name).symlink_to(file.resolve())
    (out / "config.json").write_text(json.dumps(raw_config(drafter) | {FIELD: value}))
    return out


def measured(
    readings: dict[bool, Path], target: Path, prompts: Sequence[Sequence[int]]
) -> tuple[bool, dict[bool, float]]:
    """Return the value whose first drafts are accepted, and the rate [0, 1] of each value.

    readings: the drafter by value of the field (`settled`). prompts: token ids.
    Raises DSparkError if the rates are too close or the positions too few to decide.
    """
    model = TargetModel.load(target, drafter_layers(readings[True]))
    rates, positions = {}, 0
    for value, path in readings.items():
        engine = ReferenceEngine(
            model, open_drafter(path, model), DecodeSettings(max_new_tokens=TOKENS)
        )
        steps = [step for answer in engine.run(prompts) for step in answer.steps]
        rates[value] = sum(step.accepted > 0 for step in steps) / len(steps)
        positions = len(steps) if not positions else min(positions, len(steps))
    if abs(rates[True] - rates[False]) < LEAST_GAP or positions < LEAST_POSITIONS:
        raise DSparkError(
            f"{FIELD} is missing in config.json and measuring does not tell: of {positions} first "
            f"drafts {rates[True]:.0%} are accepted as true, {rates[False]:.0%} as false; write "
            "the value that it was trained with into config.json"
        )
    return rates[True] > rates[False], rates
