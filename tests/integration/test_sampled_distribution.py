"""Test served sampling: tokens drawn through DSPARK follow the target's joint distribution.

The tiny target's next token depends on the last token alone, by a table known exactly. The drafter
holds a distorted table, so about half of its drafts are rejected and the residual distribution
decides. Two chi-square tests over the most visited states compare counts with softmax(logits / T)
after top-k: of the next token, and of the next two together. The same tests must reject the
drafter's own distribution and another temperature. One drafter is dense; one has experts, whose
layers change the output of the table.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.serving import Served, ServerPool
from tests.integration.tiny_models import TinyPair

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]

TEMPERATURE = 0.8
TOP_K = 8
TOKENS = 96
CONCURRENCY = 16
LEAST_EXPECTED = 5.0


def distribution(logits: torch.Tensor, temperature: float = TEMPERATURE) -> torch.Tensor:
    """softmax(logits / T) restricted to the top k of each row: [V, V] -> [V, V]."""
    scaled = logits.double() / temperature
    kth = scaled.topk(TOP_K, dim=-1).values[:, -1:]
    return scaled.masked_fill(scaled < kth, float("-inf")).softmax(-1)


def of_two(probabilities: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """Return state -> distribution of the next two tokens (b, c), outcome b * V + c: [V * V]."""
    return lambda state: (probabilities[state][:, None] * probabilities).flatten()


def p_value(
    counts: Counter[tuple[int, int]], probabilities: Callable[[int], torch.Tensor]
) -> float:
    """Chi-square p-value of counts of (state, outcome); rare outcomes of a state are pooled."""
    visits: Counter[int] = Counter()
    for (state, _), n in counts.items():
        visits[state] += n
    statistic, freedom = 0.0, 0
    for state, total in visits.items():
        expected = probabilities(state) * total
        frequent = (expected >= LEAST_EXPECTED).nonzero().flatten().tolist()
        observed = [counts[state, token] for token in frequent]
        wanted = expected[frequent].tolist()
        observed.append(total - sum(observed))
        wanted.append(total - sum(wanted))
        if wanted[-1] < LEAST_EXPECTED:  # too rare for a cell of its own
            if len(wanted) < 3:
                continue
            if wanted[-1] < 1e-9 * total:
                if observed[-1] > 0:
                    return 0.0  # an outcome of probability 0
                observed.pop(), wanted.pop()
            else:
                observed[-2:] = [sum(observed[-2:])]
                wanted[-2:] = [sum(wanted[-2:])]
        if len(wanted) < 2:
            continue
        statistic += sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
        freedom += len(wanted) - 1
    assert freedom > 50, "too few cells for a test"
    upper_tail = torch.special.gammaincc(
        torch.tensor(freedom / 2.0, dtype=torch.float64),
        torch.tensor(statistic / 2.0, dtype=torch.float64),
    )
    return float(upper_tail)


def drafter_logits(pair: TinyPair) -> torch.Tensor:
    weights = load_file(pair.drafter / "model.safetensors")
    return weights["markov_head.markov_w1.weight"] @ weights["markov_head.markov_w2.weight"].T


@pytest.mark.parametrize(
    ("server", "requests"),
    [
        ("tiny_dspark", 256),
        pytest.param("tiny_moe", 256, marks=pytest.mark.slow),
        pytest.param("tiny_published", 256, marks=pytest.mark.slow),
        pytest.param("greedy_drafts", 256, marks=pytest.mark.slow),
    ],
)
def test_sampled_tokens_follow_the_target(
    pool: ServerPool, server: str, requests: int, noisy: TinyPair, request: pytest.FixtureRequest
) -> None:
    """pool: named, so that its servers stay up for this test."""
    check_distribution(request.getfixturevalue(server), noisy, requests)


def check_distribution(served: Served, pair: TinyPair, requests: int) -> None:
    """Check that sampled answers follow the pair's table, and not a similar distribution."""
    prompts = [[10 + i % 200] for i in range(requests)]
    answers = served.generate_all(
        prompts,
        CONCURRENCY,
        max_new_tokens=TOKENS,
        sampling_params={"temperature": TEMPERATURE, "top_k": TOP_K, "ignore_eos": True},
    )
    ones: Counter[tuple[int, int]] = Counter()
    twos: Counter[tuple[int, int]] = Counter()
    size = len(pair.logits)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer["output_ids"]]
        ones.update(itertools.pairwise(tokens))
        for a, b, c in zip(tokens[::2], tokens[1::2], tokens[2::2], strict=False):  # no overlap
            twos[a, b * size + c] += 1
    metas = [answer["meta_info"] for answer in answers]
    steps = sum(meta["spec_verify_ct"] for meta in metas)
    rate = sum(meta["spec_num_correct_drafts"] for meta in metas) / steps
    right, drafted, warmer = (
        distribution(pair.logits),
        distribution(drafter_logits(pair)),
        distribution(pair.logits, temperature=1.0),
    )
    found = p_value(ones, right.__getitem__), p_value(twos, of_two(right))
    print(f"\n{sum(ones.values())} transitions, {rate:.2f} drafts accepted a step, p {found}")
    assert 0.3 < rate < 4.0, "both acceptance and rejection must occur often"
    assert min(found) > 1e-6
    for wrong in (drafted, warmer):
        assert p_value(ones, wrong.__getitem__) < 1e-9
        assert p_value(twos, of_two(wrong)) < 1e-9
