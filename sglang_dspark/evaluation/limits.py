"""What keeps drafters from more, read off greedy traces of one target and set of prompts.

Vocabulary: answer tokens outside a reduced draft vocabulary end every draft; `ceiling` is the tau
of a drafter that guesses all others.
Same anchors: a better drafter stands at other anchors than a worse one, and at harder ones where
both reached far, so shares by position of two traces do not compare. Greedy answers are equal, so
many anchors are common to both; on those each is asked the same question.
First draft: what comes behind the first draft counts only where that was right. The arithmetic
here (no measurement) takes the measured chances along the block and changes the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import origin
from sglang_dspark.evaluation.records import Generation, Step
from sglang_dspark.evaluation.resampling import Floats, Resampler, estimate
from sglang_dspark.evaluation.traces import Trace, require_comparable

_PAIRED = ("ours", "theirs", "both")
_FIRST = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)  # chances of the first draft that are tried
_GAINS = (1.16, 1.27)  # of tau: the paper's over DFlash and over Eagle3


def limits(traces: Mapping[str, Trace], vocabulary: frozenset[int]) -> dict[str, Any]:
    """The metrics of `drafters_limits.json`; the first trace is compared with each other one.

    vocabulary: tokens that the drafters can draft. Raises DSparkError when the traces are sampled,
    or of other prompts, targets or answers.
    """
    labels = list(traces)
    require_comparable(list(traces.values()), labels)
    first = traces[labels[0]]
    if first.temperature != 0:
        raise DSparkError("limits are read off greedy traces: record them at temperature 0")
    resampler = Resampler(first.domains)
    return {
        "analysis": "limits",
        **origin(traces),
        "vocabulary": len(vocabulary),
        **_vocabulary(first, vocabulary, resampler),
        "rejected_outside": {
            label: _rejected_outside(trace, vocabulary, resampler)
            for label, trace in traces.items()
        },
        "same_anchors": {
            f"{labels[0]}/{other}": _same_anchors(first, traces[other], resampler)
            for other in labels[1:]
        },
        "first_draft": {
            f"{labels[0]}/{other}": first_draft(chances(first), chances(traces[other]))
            for other in labels[1:]
        },
    }


def chances(trace: Trace) -> Floats:
    """Chance of each draft given those before it, over all steps: [gamma], 0 if never reached."""
    taken = [step.accepted for each in trace.generations for step in each.steps]
    at_least = np.array([sum(n >= k for n in taken) for k in range(trace.gamma + 1)], np.float64)
    return at_least[1:] / np.maximum(at_least[:-1], 1)


def tau_of(conditional: Floats) -> float:
    """tau of a block with these chances of a draft given those before it, [gamma]."""
    return float(1 + np.cumprod(np.minimum(conditional, 1.0)).sum())


def first_draft(ours: Floats, theirs: Floats) -> dict[str, Any]:
    """What the first draft's chance does to the ratio of two taus, by arithmetic.

    ours, theirs: `chances`, [gamma] each. "scaled" multiplies both drafters' chances (at most 1) by
    the one factor that brings our first to `first`; "alone" changes our first one only. `needed`:
    first chances at which the ratio of tau reaches a gain, null if none up to 1 does.
    """

    def scaled(first: float) -> float:
        factor = first / ours[0]
        return tau_of(ours * factor) / tau_of(theirs * factor)

    def alone(first: float) -> float:
        return tau_of(np.concatenate([[first], ours[1:]])) / tau_of(theirs)

    swapped = np.concatenate([ours[:1], theirs[1:]])
    rules = {"scaled": scaled, "alone": alone}
    return {
        "tau": {"ours": tau_of(ours), "theirs": tau_of(theirs), "their_later": tau_of(swapped)},
        "ratio": [{"first": f, **{name: at(f) for name, at in rules.items()}} for f in _FIRST],
        "needed": {
            f"{gain:g}": {name: _reaches(at, gain, float(ours[0])) for name, at in rules.items()}
            for gain in _GAINS
        },
    }


def _reaches(ratio: Callable[[float], float], gain: float, start: float) -> float | None:
    """The least chance from `start` on, in steps of 0.001, whose ratio is at least `gain`."""
    tried = np.arange(start, 1.0005, 0.001)
    return next((float(first) for first in tried if ratio(float(first)) >= gain), None)


def _vocabulary(trace: Trace, vocabulary: frozenset[int], resampler: Resampler) -> dict[str, Any]:
    """Share of answer tokens outside, and tau of a perfect drafter of the others, by domain."""
    outside, tokens, yielded, steps = (np.zeros(len(trace.prompts)) for _ in range(4))
    for i, generation in enumerate(trace.generations):
        answer = generation.tokens[1:]  # the first one is the prefill's
        outside[i] = sum(token not in vocabulary for token in answer)
        tokens[i] = len(answer)
        yielded[i], steps[i] = perfect_walk(answer, vocabulary, trace.gamma)
    return {
        "outside": _estimates(resampler, outside, tokens),
        "ceiling": _estimates(resampler, yielded, steps),
    }


def perfect_walk(
    answer: tuple[int, ...], vocabulary: frozenset[int], gamma: int
) -> tuple[int, int]:
    """Tokens yielded and steps taken by a drafter that guesses every token of the vocabulary."""
    at = steps = 0
    while at < len(answer):
        window = answer[at : at + gamma]
        wrong = (k for k, token in enumerate(window) if token not in vocabulary)
        at += next(wrong, gamma) + 1
        steps += 1
    return min(at, len(answer)), steps


def _rejected_outside(
    trace: Trace, vocabulary: frozenset[int], resampler: Resampler
) -> dict[str, Any]:
    """Share of the rejections where the target's token was outside the vocabulary."""
    outside, rejected = np.zeros(len(trace.prompts)), np.zeros(len(trace.prompts))
    for i, generation in enumerate(trace.generations):
        for step in generation.steps:
            token = _token_behind(generation, step)
            if step.accepted < step.verify_len and token is not None:
                rejected[i] += 1
                outside[i] += token not in vocabulary
    return _estimates(resampler, outside, rejected)


def _token_behind(generation: Generation, step: Step) -> int | None:
    """The target's own token behind the accepted drafts, None past the end of the answer."""
    place = step.position + 1 + step.accepted - generation.prompt_tokens
    return generation.tokens[place] if place < len(generation.tokens) else None


def _same_anchors(ours: Trace, theirs: Trace, resampler: Resampler) -> dict[str, Any]:
    """Chances that drafts 1..k are accepted at common anchors, by each, and by both at once."""
    gamma, prompts = min(ours.gamma, theirs.gamma), len(ours.prompts)
    hits = {name: np.zeros((gamma, prompts)) for name in _PAIRED}
    anchors, equal = np.zeros(prompts), np.zeros(prompts)
    pairs = zip(ours.generations, theirs.generations, strict=True)
    for i, (one, other) in enumerate(pairs):
        if one.tokens != other.tokens:
            continue  # a tie of the target's logits broken by rounding: other anchors from there
        known = {step.position: step for step in other.steps}
        for step in (step for step in one.steps if step.position in known):
            a, b = step.accepted, known[step.position].accepted
            anchors[i] += 1
            equal[i] += step.drafted[0] == known[step.position].drafted[0]
            for name, reach in zip(_PAIRED, (a, b, min(a, b)), strict=True):
                hits[name][: min(reach, gamma), i] += 1
    if not anchors.any():
        raise DSparkError("the traces have no anchor in common: are they of the same target?")
    return {
        "anchors": int(anchors.sum()),
        "first_draft_equal": _estimates(resampler, equal, anchors),
        "cumulative": {
            name: [_estimates(resampler, row, anchors) for row in rows]
            for name, rows in hits.items()
        },
    }


def _estimates(resampler: Resampler, numerator: Floats, denominator: Floats) -> dict[str, Any]:
    """Ratio by domain and in macro average, with intervals."""
    drawn = resampler.ratios(numerator, denominator)
    return {name: asdict(estimate(values)) for name, values in drawn.items()}
