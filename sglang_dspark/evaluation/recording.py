"""Run the reference engine over prompts and save a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.drafter.config import read_config
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.evaluation.traces import DrafterFacts, Trace, TracedPrompt, prompt_digest
from sglang_dspark.families.registry import drafter_kind, drafter_layers, open_drafter
from sglang_dspark.models.identity import target_sha256 as weights_sha256

_ALL_TOKENS = 1 << 30


@dataclass(frozen=True)
class Workload:
    """A target, prompts with their token ids, and settings of decoding.

    target_sha256: over its weight files.
    """

    target: Path
    target_sha256: str
    prompts: tuple[EvalPrompt, ...]
    ids: tuple[tuple[int, ...], ...]
    settings: DecodeSettings


def open_engine(workload: Workload, drafter: Path) -> tuple[ReferenceEngine, Any]:
    """Load an engine and its drafter for a workload; return both.

    The returned drafter is the object that drafts in the engine.
    """
    target = TargetModel.load(workload.target, drafter_layers(drafter))
    module = open_drafter(drafter, target)
    return ReferenceEngine(target, module, workload.settings), module


def record(
    workload: Workload, drafter: Path, on_finish: Callable[[], None] = lambda: None
) -> Trace:
    """Decode all prompts with the drafter in `drafter`; call `on_finish` after each.

    Raises DSparkError if target and drafter do not match or a prompt is too long.
    """
    engine, _ = open_engine(workload, drafter)
    generations = engine.run(workload.ids, lambda _index, _generation: on_finish())
    return Trace(
        drafter=describe(drafter, engine.gamma),
        target=workload.target.name,
        target_sha256=workload.target_sha256,
        settings=settings_json(workload.settings),
        prompts=tuple(
            TracedPrompt(prompt.id, prompt.domain, prompt_digest(ids))
            for prompt, ids in zip(workload.prompts, workload.ids, strict=True)
        ),
        generations=tuple(generations),
    )


def describe(path: Path, gamma: int) -> DrafterFacts:
    """Describe the drafter in a directory, by its config.json and weights."""
    raw = read_config(path)
    head = str(raw.get("markov_head_type", "vanilla")) if raw.get("markov_rank") else "none"
    return DrafterFacts(
        name=path.resolve().name,
        kind=drafter_kind(path),
        head=head,
        layers=int(raw.get("num_hidden_layers", 1)),
        gamma=gamma,
        sha256=weights_sha256(path),
    )


def settings_json(settings: DecodeSettings) -> dict[str, Any]:
    """Return settings for a file, without gamma (the drafter's) and stop tokens (the target's)."""
    names = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "batch", "seed")
    values = {name: getattr(settings, name) for name in names}
    if values["top_k"] == _ALL_TOKENS:
        values["top_k"] = None
    return values
