"""Hand-made traces: steps drawn from a drafter whose confidence is known, no engine needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dspark.evaluation.records import Generation, Step
from sglang_dspark.evaluation.traces import DrafterFacts, Trace, TracedPrompt, prompt_digest
from sglang_dspark.schedule.sts_file import StsFile, StsTable

SETTINGS = {
    "temperature": 0.0,
    "top_k": None,
    "top_p": 1.0,
    "min_p": 0.0,
    "max_new_tokens": 64,
    "batch": 8,
    "seed": 0,
}


def sts_file(gamma: int, fit_prompts: tuple[str, ...] = ()) -> StsFile:
    """A calibration table for greedy requests, fitted on prompts of these digests."""
    zeros = (0.0,) * gamma
    table = StsTable(
        (1.5,) * gamma, {}, "d", 1, 1, (1,) * gamma, zeros, zeros, 0.1, (1.2,) * gamma, {}
    )
    return StsFile({"greedy": table}, "ab", "cd", fit_prompts, {}, "2026-11-21")


def step(accepted: int, confidence: tuple[float, ...], verify_len: int | None = None) -> Step:
    window = len(confidence) if verify_len is None else verify_len
    return Step(5, (1,) * len(confidence), window, accepted, accepted + 1, confidence)


def generation(*steps: Step) -> Generation:
    made = 1 + sum(each.kept for each in steps)
    return Generation(4, tuple(range(made)), "length", steps)


def trace(generations: list[Generation], domains: list[str], gamma: int, **facts: object) -> Trace:
    """A trace of hand-made generations."""
    drafter = {"name": "d", "kind": "dspark", "head": "vanilla", "layers": 2, "sha256": "ab" * 32}
    settings = {**SETTINGS, "temperature": facts.pop("temperature", 0.0)}
    prompts = [
        TracedPrompt(f"p{i}", domain, prompt_digest([i])) for i, domain in enumerate(domains)
    ]
    return Trace(
        drafter=DrafterFacts(**{**drafter, "gamma": gamma, **facts}),  # type: ignore[arg-type]
        target="t",
        target_sha256="cd" * 32,
        settings=settings,
        prompts=tuple(prompts),
        generations=tuple(generations),
    )


def drawn(
    prompts: int = 12, steps: int = 20, gamma: int = 4, *, scale: float = 1.0, **facts: object
) -> Trace:
    """Steps whose true conditional chance is c, told by the drafter with logits `scale` times as
    large: scale 1 is calibrated, 2 overconfident. Domains math and chat in turn."""
    generator = np.random.default_rng(0)
    made = []
    for i in range(prompts):
        ease = generator.normal(0.6 if i % 2 else 1.2, 0.4)
        logit = generator.normal(ease, 1.2, size=(steps, gamma))
        chance = 1 / (1 + np.exp(-logit))
        told = np.float32(1) / (1 + np.exp(-scale * logit)).astype(np.float32)
        taken = np.cumprod(generator.uniform(size=chance.shape) < chance, axis=1).sum(axis=1)
        pairs = zip(taken.tolist(), told.tolist(), strict=True)
        made.append(generation(*(step(a, tuple(c)) for a, c in pairs)))
    domains = ["chat" if i % 2 else "math" for i in range(prompts)]
    return trace(made, domains, gamma, **facts)


def thrice(**recipes: Trace) -> list[tuple[str, Trace]]:
    """Three trainings of every recipe, by label."""
    numbered = [(label, base) for label, base in recipes.items() for _ in range(3)]
    return [(label, _retrained(base, seed)) for seed, (label, base) in enumerate(numbered)]


def _retrained(base: Trace, seed: int) -> Trace:
    """The same steps, some of which accept one draft fewer, of a drafter of its own."""
    generator = np.random.default_rng(seed)
    made = []
    for each in base.generations:
        fewer = generator.uniform(size=len(each.steps)) < 0.2
        pairs = zip(each.steps, fewer.tolist(), strict=True)
        made.append(generation(*(step(max(s.accepted - f, 0), s.confidence) for s, f in pairs)))
    drafter = replace(base.drafter, sha256=prompt_digest([seed]))
    return replace(base, generations=tuple(made), drafter=drafter)


def training_run(folder: Path, rows: list[dict[str, Any]], target: str = "ab") -> Path:
    """A run directory of `dspark train` with these rows of its journal."""
    folder.mkdir()
    config = {
        "data": {"target": "/models/tiny"},
        "drafter": {"kind": "eagle3"},
        "schedule": {"steps": 4, "sequences_per_step": 2, "anchors_per_sequence": 3},
    }
    facts = {"config": config, "commit": "c0ffee", "target_sha256": target, "sequences": 9}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
