"""Read and write traces: the reference engine's records for one drafter, with their origin.

Every analysis of drafters reads traces, so one run of the engine serves all of them. A trace is
JSON; a step is stored as [position, drafted, verify_len, accepted, kept, confidence].
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import (
    MOST_RECORDED,
    brief,
    integer,
    load_json,
    number,
    reading,
)
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.records import Generation, Step

FORMAT = "sglang-dspark trace 1"
_LAW = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
)  # equal in traces that are compared
MOST = 1 << 40  # limit of a position, a token, a count


@dataclass(frozen=True)
class DrafterFacts:
    """Facts of a drafter: directory name, kind and head, decoder layers, gamma, weight hash."""

    name: str
    kind: str
    head: str
    layers: int
    gamma: int
    sha256: str


@dataclass(frozen=True)
class TracedPrompt:
    """A prompt; `digest` identifies its token ids, independent of `id`."""

    id: str
    domain: str
    digest: str


@dataclass(frozen=True)
class Trace:
    """The generations of one drafter over a set of prompts; generations[i] answers prompts[i].

    settings: temperature, top_k (None: all), top_p, min_p, max_new_tokens, batch, seed.
    """

    drafter: DrafterFacts
    target: str
    target_sha256: str
    settings: Mapping[str, Any]
    prompts: tuple[TracedPrompt, ...]
    generations: tuple[Generation, ...]

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.generations)

    @property
    def gamma(self) -> int:
        """Return the drafts per step."""
        return self.drafter.gamma

    @property
    def domains(self) -> list[str]:
        """List the domain of each prompt."""
        return [prompt.domain for prompt in self.prompts]

    @property
    def temperature(self) -> float:
        """Return the sampling temperature of all requests."""
        return float(self.settings["temperature"])

    def has_confidence(self) -> bool:
        """Return whether the drafter has a confidence: any recorded one differs from 1."""
        steps = (step for generation in self.generations for step in generation.steps)
        return any(c != 1.0 for step in steps for c in step.confidence)

    def of_prompts(self, keep: Sequence[int]) -> Trace:
        """Return the trace with the prompts of these indices only."""
        return Trace(
            self.drafter,
            self.target,
            self.target_sha256,
            self.settings,
            tuple(self.prompts[i] for i in keep),
            tuple(self.generations[i] for i in keep),
        )


def prompt_digest(ids: Sequence[int]) -> str:
    """Return 16 hex digits that identify a prompt's token ids."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()[:16]


def require_comparable(traces: Sequence[Trace], labels: Sequence[str]) -> None:
    """Raise DSparkError unless all traces have the same target, prompts and sampling."""
    first = traces[0]
    for trace, label in zip(traces[1:], labels[1:], strict=True):
        digests = [prompt.digest for prompt in trace.prompts]
        if trace.target_sha256 != first.target_sha256:
            what = "another target"
        elif digests != [prompt.digest for prompt in first.prompts]:
            what = "other prompts"
        elif _law(trace) != _law(first):
            what = f"other sampling ({_law(trace)} instead of {_law(first)})"
        else:
            continue
        raise DSparkError(f"{label} was recorded with {what} than {labels[0]}: record it again")


def _law(trace: Trace) -> dict[str, Any]:
    return {name: trace.settings[name] for name in _LAW}


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace atomically. Raises DSparkError if the file cannot be written."""
    document = {
        "format": FORMAT,
        "drafter": asdict(trace.drafter),
        "target": trace.target,
        "target_sha256": trace.target_sha256,
        "settings": dict(trace.settings),
        "prompts": [asdict(prompt) for prompt in trace.prompts],
        "generations": [_generation_json(each) for each in trace.generations],
    }
    replace_text(path, json.dumps(document, separators=(",", ":")) + "\n", "the trace")


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises DSparkError if the file is not a trace."""
    with reading(path, "trace", "record one with `dspark eval record`"):
        raw = load_json(path, finite=False, most=MOST_RECORDED)  # confidences may be NaN
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']!r}")
        drafter = _drafter(raw["drafter"])
        generations = tuple(_generation(each, drafter.gamma) for each in raw["generations"])
        told = {len(step.confidence) for each in generations for step in each.steps}
        if len(told) > 1:
            raise ValueError("some steps tell a confidence and others do not")
        return Trace(
            drafter=drafter,
            target=_text(raw["target"]),
            target_sha256=_text(raw["target_sha256"]),
            settings=_settings(raw["settings"]),
            prompts=tuple(_prompt(prompt) for prompt in raw["prompts"]),
            generations=generations,
        )


def _generation_json(generation: Generation) -> dict[str, Any]:
    return {
        "prompt_tokens": generation.prompt_tokens,
        "tokens": generation.tokens,
        "finish": generation.finish,
        "steps": [
            [s.position, s.drafted, s.verify_len, s.accepted, s.kept, s.confidence]
            for s in generation.steps
        ],
    }


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{brief(repr(value), 40)} is no text")
    return value


def _drafter(raw: Mapping[str, Any]) -> DrafterFacts:
    facts = DrafterFacts(**raw)
    for each in (facts.name, facts.kind, facts.head, facts.sha256):
        _text(each)
    integer(facts.layers, 0, MOST)
    integer(facts.gamma, 1, MOST)
    return facts


def _settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings; check the numbers by which traces are compared, None for no cut."""
    for name in _LAW:
        if raw[name] is not None or name == "temperature":
            number(raw[name], -MOST, MOST)
    return dict(raw)


def _prompt(raw: Mapping[str, Any]) -> TracedPrompt:
    prompt = TracedPrompt(**raw)
    for each in (prompt.id, prompt.domain, prompt.digest):
        _text(each)
    return prompt


def _confidences(values: Sequence[Any]) -> tuple[float, ...]:
    """Check confidences: numbers, or NaN, which a drafter may compute."""
    if not all(type(value) in (int, float) for value in values):
        raise ValueError(f"confidences {brief(repr(values), 40)} are not numbers")
    return tuple(float(value) for value in values)


def _step(raw: Sequence[Any], gamma: int) -> Step:
    position, drafted, verify_len, accepted, kept, confidence = raw
    for each in (position, verify_len, accepted, kept, *drafted):
        integer(each, 0, MOST)
    if len(drafted) != gamma:
        raise ValueError(f"a step of {len(drafted)} drafts, where gamma is {gamma}")
    return Step(position, tuple(drafted), verify_len, accepted, kept, _confidences(confidence))


def _generation(raw: Mapping[str, Any], gamma: int) -> Generation:
    integer(raw["prompt_tokens"], 0, MOST)
    for token in raw["tokens"]:
        integer(token, 0, MOST)
    if raw["finish"] not in ("stop", "length"):
        raise ValueError(f"finish {brief(repr(raw['finish']), 40)} is neither stop nor length")
    steps = tuple(_step(each, gamma) for each in raw["steps"])
    return Generation(raw["prompt_tokens"], tuple(raw["tokens"]), raw["finish"], steps)
