"""Losslessness of sampling with scheduled, ragged verification, served on the demo pair.

Requests are sampled through DSPARK while others are decoded, so that admission cuts windows short.
The plain server then reads each answer in one pass and returns the distribution of every token
given its prefix. Two tests of the same hypothesis, that token t was drawn from its p_t:

- Ville's inequality. For any other distributions q_t that are known before token t, the running
  product of q_t(x_t) / p_t(x_t) has expectation 1 under any dependence, so it exceeds 1 / alpha
  with a probability of at most alpha. This is exact on any finite number of tokens, and the mean
  over several alternatives is as good. Here q_t are p_t at other temperatures and p_t that lose or
  gain their likeliest token, which is what wrong accept rules do.
- Chi-square of the ranks of the drawn tokens; sums of martingale differences, so the chance of a
  false alarm is alpha up to the normal approximation of thousands of tokens.

Together they raise a false alarm in fewer than 2 of 10,000 runs. The drafter with experts is held
to them in a slow test, with every draft verified: alone, the scheduler seldom drafts with it here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.integration.prompts import PROMPTS
from tests.integration.serving import Served
from tests.integration.test_scheduling import GAMMA, windows

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

Floats = NDArray[np.float64]
ALPHA = 1e-6
REQUESTS = 40
TOKENS = 48
FATES, ROUNDS = 100, 4  # accepted and rejected drafts that the test wants, and when it gives up
CONCURRENCY = 4
SEEN = 40  # likeliest tokens that the plain server returns; more than any cut below keeps
NEAR_TIE = 1e-3  # relative; two passes over one token may differ by that
TILTS = (0.7, 0.85, 1.2, 1.5)  # exponents of p_t, which are temperatures of 1 / tilt
SHARES = (0.8, 1.25)  # the likeliest token's odds


class Cut(NamedTuple):
    """Sampling settings of a request at temperature 1."""

    top_k: int
    top_p: float = 1.0
    min_p: float = 0.0

    def sampling(self) -> dict[str, Any]:
        return {"temperature": 1.0, "ignore_eos": True, **self._asdict()}

    def distribution(self, probs: Floats) -> Floats:
        """Cut and normalise probs [SEEN], descending, as sampling does (docs/losslessness)."""
        rank = np.arange(len(probs))
        kept = (rank < self.top_k) & (np.cumsum(probs) - probs <= self.top_p)
        kept &= probs >= self.min_p * probs[0]
        return np.where(kept, probs, 0.0) / probs[kept].sum()


CUTS = (Cut(top_k=12), Cut(top_k=30, top_p=0.9, min_p=0.05), Cut(top_k=8, top_p=0.7))


class Drawn(NamedTuple):
    """A sampled token: its expected distribution by rank [SEEN], and its rank."""

    distribution: Floats
    rank: int


def tokens_of(server: Served, prompt: str) -> list[int]:
    return list(server.request("POST", "/tokenize", json={"prompt": prompt}).json()["tokens"])


def read_back(plain: Served, prompt: list[int], answer: list[int], cut: Cut) -> list[Drawn]:
    """Return the plain server's distribution of each token; near ties at a cut are skipped."""
    told = plain.generate(
        [*prompt, *answer],
        max_new_tokens=1,
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
        top_logprobs_num=SEEN,
    )["meta_info"]
    tokens = [entry[1] for entry in told["input_token_logprobs"]][1:]
    # SGLang names a vocabulary's last token 0 there (0.5.23, logprob_result_processor.py).
    assert all(named in (token, 0) for named, token in zip(tokens, answer, strict=True))
    found = []
    for token, top in zip(answer, told["input_top_logprobs"][1:], strict=True):
        probs = np.exp([float(entry[0]) for entry in top])
        distribution = cut.distribution(probs)
        ids = [entry[1] for entry in top]
        rank = ids.index(token) if token in ids else SEEN
        if rank == SEEN or distribution[rank] == 0:
            last = int((distribution > 0).sum()) - 1
            near = rank < SEEN and probs[rank] > (1 - NEAR_TIE) * probs[last]
            assert near, f"token {token} (rank {rank}) lies outside what {cut} allows"
            continue
        found.append(Drawn(distribution, rank))
    return found


def evidence(drawn: list[Drawn]) -> float:
    """log of the mean likelihood ratio of the alternatives; above log(1 / alpha) is an alarm."""
    p = np.stack([each.distribution for each in drawn])  # [N, SEEN]
    at = np.arange(len(drawn)), np.array([each.rank for each in drawn])
    sums = []
    for other in [p**tilt for tilt in TILTS] + [_lifted(p, share) for share in SHARES]:
        other = np.where(p > 0, other, 0.0)
        sums.append(np.log((other / other.sum(1, keepdims=True))[at] / p[at]).sum())
    return float(np.logaddexp.reduce(sums) - np.log(len(sums)))


def _lifted(distribution: Floats, share: float) -> Floats:
    """Return the distribution with the likeliest token's weight multiplied."""
    lifted = distribution.copy()
    lifted[:, 0] *= share
    return lifted


def rank_p_value(drawn: list[Drawn], groups: int = 6) -> float:
    """Chi-square of how often ranks 1, 2, ..., groups and beyond were drawn."""
    p = np.stack([each.distribution for each in drawn])
    grouped = np.concatenate([p[:, : groups - 1], p[:, groups - 1 :].sum(1, keepdims=True)], 1)
    ranks = np.minimum([each.rank for each in drawn], groups - 1)
    excess = (np.eye(groups)[ranks] - grouped).sum(0)[1:]  # one of them follows from the rest
    spread = np.diag(grouped.sum(0)) - grouped.T @ grouped
    statistic = float(excess @ np.linalg.solve(spread[1:, 1:], excess))
    half = torch.tensor([(groups - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def redrawn(drawn: list[Drawn], tilt: float, seed: int) -> list[Drawn]:
    """Return the same distributions with tokens drawn from distribution^tilt instead."""
    rng = np.random.default_rng(seed)
    again = []
    for p, _ in drawn:
        weights = p**tilt * (p > 0)
        again.append(Drawn(p, int(rng.choice(len(p), p=weights / weights.sum()))))
    return again


def sampled(dspark: Served, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Each prompt's answer, one cut after the other."""
    answers: list[dict[str, Any]] = [{}] * len(prompts)
    for turn, cut in enumerate(CUTS):
        chosen = range(turn, len(prompts), len(CUTS))
        got = dspark.generate_all(
            [prompts[i] for i in chosen],
            CONCURRENCY,
            max_new_tokens=TOKENS,
            sampling_params=cut.sampling(),
        )
        for i, answer in zip(chosen, got, strict=True):
            answers[i] = answer
    return answers


def fates(answers: list[dict[str, Any]]) -> tuple[int, int]:
    """Drafts accepted and drafts rejected."""
    accepted = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    admitted = sum(steps * (length - 1) for length, steps in enumerate(windows(answers)) if length)
    return accepted, admitted - accepted


def check_distribution(plain: Served, dspark: Served, *, scheduled: bool) -> list[int]:
    """Sample, read back, test; scheduled: windows must be ragged.

    Returns how many windows of each length there were.
    """
    prompts = [tokens_of(dspark, PROMPTS[i % len(PROMPTS)]) for i in range(REQUESTS)]
    answers: list[dict[str, Any]] = []
    for _ in range(ROUNDS):  # how much is drafted depends on how fast the machine is just now
        answers += sampled(dspark, prompts)
        if min(fates(answers)) >= FATES:
            break
    drawn: list[Drawn] = []
    for i, answer in enumerate(answers):
        k = i % REQUESTS
        drawn += read_back(plain, prompts[k], answer["output_ids"], CUTS[k % len(CUTS)])
    assert len(drawn) > 0.98 * len(answers) * TOKENS

    counts = windows(answers)
    print(f"\n{len(drawn)} tokens, windows {counts}, drafts accepted, rejected {fates(answers)}")
    if scheduled:
        assert sum(steps > 0 for steps in counts) >= 3, "windows of one length are not ragged"
        assert sum(counts[1 : GAMMA + 1]) > 0, "no window was cut"
    assert min(fates(answers)) >= FATES, "both fates must occur often"

    assert evidence(drawn) < np.log(1 / ALPHA)
    assert rank_p_value(drawn) > ALPHA
    for tilt in (0.7, 1.4):  # the tests see what they should see
        wrong = redrawn(drawn, tilt, seed=1)
        assert evidence(wrong) > np.log(1e6)
        assert rank_p_value(wrong) < 1e-6
    return counts


@pytest.mark.parametrize(
    ("server", "scheduled"),
    [("dspark_ragged", True), pytest.param("dspark_moe", False, marks=pytest.mark.slow)],
)
def test_sampling_follows_the_plain_distribution(
    plain: Served, server: str, scheduled: bool, request: pytest.FixtureRequest
) -> None:
    check_distribution(plain, request.getfixturevalue(server), scheduled=scheduled)
