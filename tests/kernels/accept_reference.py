"""The outcome of `kernels.accept_sampled` and `accept_block` by the pure rules of `verify/`, and
which uniforms are too near a boundary to tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from sglang_dspark.kernels.accept_windows import Windows
from sglang_dspark.verify import greedy, rejection, sampling, seeded
from sglang_dspark.verify.acceptance import Acceptance

Rule = Callable[..., Acceptance]
NEAR = 1e-5  # of a uniform, of top-p and of min-p
WARMER = 1e-6  # of a temperature, relative: what the rounding of an exponential amounts to


def reference(given: Windows, rule: Rule = rejection.accept_sampled) -> Acceptance:
    """By `rule`, and as they would have it alone the greedy and the seeded requests."""
    requests, gamma = given.drafts.shape
    limits = given.lengths.long()
    probs = distribution(given)
    found = rule(
        given.drafts,
        _draft_distribution(given),
        probs,
        given.accept_uniforms,
        given.bonus_uniforms,
        limits,
        checked=False,
    )
    if given.seeded is not None and given.seeds is not None and given.anchors is not None:
        own = seeded.accept_seeded(
            given.drafts, probs, given.seeds, given.anchors, limits, checked=False
        )
        found = _either(given.seeded, own, found)
    if given.greedy is not None:
        likeliest = given.logits.view(requests, gamma + 1, -1).argmax(-1)
        own = greedy.accept_greedy(given.drafts, likeliest, limits)
        found = _either(given.greedy, own, found)
    return found


def distribution(given: Windows, module: ModuleType = sampling) -> Tensor:
    """p_t [R, gamma + 1, V] float32."""
    requests, gamma = given.drafts.shape
    ones = torch.ones(requests)
    every = (
        (1 << 30) * ones.int() if given.top_k is None else given.top_k,
        ones if given.top_p is None else given.top_p,
        0 * ones if given.min_p is None else given.min_p,
    )
    temperature, *cuts = (
        each.repeat_interleave(gamma + 1) for each in (given.temperatures, *every)
    )
    cut = any(each is not None for each in (given.top_k, given.top_p, given.min_p))
    flat = module.sampled_distribution(given.logits, temperature, tuple(cuts) if cut else None)
    return flat.view(requests, gamma + 1, -1)


def undecided(given: Windows, found: Acceptance, rule: Rule = rejection.accept_sampled) -> Tensor:
    """[R] bool, requests whose outcome is another one when uniforms or cuts move by NEAR, or
    temperatures by WARMER: rounding may decide there."""
    moved = torch.zeros(len(given.drafts), dtype=torch.bool)
    for way in (-1, 1):
        for other in _moved(given, way):
            there = reference(other, rule)
            moved |= (there.accepted != found.accepted) | (there.bonus != found.bonus)
    return moved


def _moved(given: Windows, way: int) -> list[Windows]:
    below_one = 1 - 2.0**-53
    uniforms = {
        name: (getattr(given, name) + way * NEAR).clamp(0, below_one)
        for name in ("accept_uniforms", "bonus_uniforms")
    }
    others = [replace(given, **uniforms)]
    others.append(replace(given, temperatures=given.temperatures * (1 + way * WARMER)))
    if given.top_p is not None:
        top_p = torch.where(given.top_p < 1, given.top_p + way * NEAR, given.top_p)
        others.append(replace(given, top_p=top_p))
    if given.min_p is not None:
        others.append(replace(given, min_p=(given.min_p * (1 + way * NEAR)).clamp(0, 1)))
    return others


def _draft_distribution(given: Windows) -> Tensor | None:
    if given.draft_logits is None or given.draft_temperatures is None:
        return None
    return torch.softmax(given.draft_logits.float() / given.draft_temperatures[:, None, None], -1)


def _either(chosen: Tensor, ones: Acceptance, others: Acceptance) -> Acceptance:
    return Acceptance(
        torch.where(chosen, ones.accepted, others.accepted),
        torch.where(chosen, ones.bonus, others.bonus),
    )
