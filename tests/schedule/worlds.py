"""A world with a known truth: drafts whose real chance of acceptance is known, and a drafter that
misjudges it by known temperatures. Its mutants label steps wrongly; the tests must notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_dspark.schedule.calibration import Floats, Ints, Observations

TRUE_TEMPERATURES = (2.0, 0.5, 1.5, 1.0)
GAMMA = len(TRUE_TEMPERATURES)


@dataclass(frozen=True)
class World:
    """N steps. chance: [N, gamma] that draft k is accepted under sampling if those before were.
    logits: [N, gamma] what the drafter says: the logit of chance times the true temperature.
    uniforms: [N, gamma] that decide. verified: [N] drafts verified. request: [N]."""

    chance: Floats
    logits: Floats
    uniforms: Floats
    verified: Ints
    request: Ints


def build(steps: int, *, seed: int = 0, censored: bool = False) -> World:
    """A world; `censored` cuts the verify window where the drafter's own survival is below 0.35."""
    generator = np.random.default_rng(seed)
    truth = generator.normal(0.8, 1.5, size=(steps, GAMMA))
    logits = truth * np.array(TRUE_TEMPERATURES)
    verified = np.full(steps, GAMMA)
    if censored:
        survival = np.cumprod(1 / (1 + np.exp(-logits)), axis=1)
        verified = (survival > 0.35).sum(axis=1)
    return World(
        chance=1 / (1 + np.exp(-truth)),
        logits=logits,
        uniforms=generator.uniform(size=(steps, GAMMA)),
        verified=verified,
        request=generator.integers(0, steps // 20 + 1, size=steps),
    )


def sampled(world: World) -> Observations:
    """The right labels: what the accept rule decided, cut at the verify window."""
    accepted = np.cumprod(world.uniforms < world.chance, axis=1).sum(axis=1)
    accepted = np.minimum(accepted, world.verified)
    return Observations(world.logits, accepted, world.verified, world.request)


def greedy_labels(world: World) -> Observations:
    """Mutant: the draft counts as accepted where it is the target's most likely token, which
    is taken to be where its chance exceeds one half, for any samples."""
    accepted = np.cumprod(world.chance > 0.5, axis=1).sum(axis=1)
    accepted = np.minimum(accepted, world.verified)
    return Observations(world.logits, accepted, world.verified, world.request)


def unverified_as_failure(world: World) -> Observations:
    """Mutant: what was not verified is labelled as rejected."""
    right = sampled(world)
    everything = np.full_like(right.verified, GAMMA)
    return Observations(right.logits, right.accepted, everything, right.request)


def rejection_ends_the_labels(world: World) -> Observations:
    """Mutant: positions behind a rejection are skipped as if they had not been verified."""
    right = sampled(world)
    return Observations(
        right.logits,
        right.accepted,
        np.minimum(right.accepted + 1, right.verified),
        right.request,
    )


Labeller = Callable[[World], Observations]
