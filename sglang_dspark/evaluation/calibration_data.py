"""Convert engine records to calibration data: observed labels, and halves split by prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from sglang_dspark.evaluation.records import Generation
from sglang_dspark.evaluation.traces import TracedPrompt
from sglang_dspark.schedule.calibration import Observations, logits_of


def observations(generations: Sequence[Generation], gamma: int) -> Observations:
    """Collect the verify steps of all generations; generation i is request i.

    The label is the acceptance that the engine's accept rule decided under the request's own
    sampling, never a comparison with the target's most likely token.
    """
    steps = [(i, step) for i, each in enumerate(generations) for step in each.steps]
    confidence = np.array([step.confidence for _, step in steps], dtype=np.float64)
    return Observations(
        logits=logits_of(confidence.reshape(len(steps), gamma)),
        accepted=np.array([step.accepted for _, step in steps], dtype=np.int64),
        verified=np.array([step.verify_len for _, step in steps], dtype=np.int64),
        request=np.array([i for i, _ in steps], dtype=np.int64),
    )


def split_halves(prompts: Sequence[TracedPrompt]) -> tuple[list[int], list[int]]:
    """Return the indices of the fitting and of the held-out half, alternating in each domain.

    Prompts are ordered by digest first: the halves do not depend on the file's order, and copies
    of a prompt are in the same half.
    """
    fitting: set[str] = set()
    seen: set[str] = set()
    for domain in sorted({prompt.domain for prompt in prompts}):
        digests = {prompt.digest for prompt in prompts if prompt.domain == domain} - seen
        fitting.update(sorted(digests)[::2])
        seen |= digests
    fit = [i for i, prompt in enumerate(prompts) if prompt.digest in fitting]
    return fit, held_out(prompts, fitting)


def held_out(prompts: Sequence[TracedPrompt], fit_prompts: Collection[str]) -> list[int]:
    """Return the indices of the prompts whose digests were not used for fitting."""
    used = set(fit_prompts)
    return [i for i, prompt in enumerate(prompts) if prompt.digest not in used]
