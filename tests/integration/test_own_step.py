"""A CPU server decodes by our own stages: one whose SGLang step raises serves the same answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.test_greedy_equal import accepted_drafts
from tests.integration.tiny_models import TinyPair

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]

PLANTED = Path(__file__).parent / "planted"
TOKENS, USERS = 24, 4
LASTS = range(10, 250, 30)  # prompts of one token
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "log-probabilities": {"return_logprob": True},
    "biased": {"sampling_params": {"logit_bias": {"7": -2.0}}},
    "penalised": {"sampling_params": {"frequency_penalty": 0.5, "repetition_penalty": 1.1}},
    "seeded": {"sampling_params": {"temperature": 1.0, "sampling_seed": 5}},
    "cut": {"sampling_params": {"temperature": 1.0, "top_k": 1, "top_p": 0.9}},
    "grammar": {"sampling_params": {"regex": "[a-z ]*"}},
}


@pytest.fixture(scope="module", params=["static", "threshold"])
def broken(request: pytest.FixtureRequest, pool: ServerPool, noisy: TinyPair) -> Iterator[Served]:
    """A server on which SGLang's own step raises; with whole windows, and with some cut short."""
    schedule = {"static": "{mode: static}", "threshold": "{threshold: 0.3}"}[request.param]
    config = pool.folder / f"own-step-{request.param}.yaml"
    config.write_text(f"schedule: {schedule}\n")
    name = f"own-step-{request.param}"
    yield pool.start(
        name, noisy.target, *DSPARK_FLAGS, str(noisy.drafter), "--dspark-config", str(config),
        PYTHONPATH=os.pathsep.join([str(PLANTED), *filter(None, sys.path)]),
        DSPARK_PLANTED_EXECUTOR="1",
    )  # fmt: skip
    pool.stop(name)


@pytest.fixture(scope="module")
def without_drafts(pool: ServerPool, noisy: TinyPair) -> Iterator[Served]:
    yield pool.start("own-step-plain", noisy.target)
    pool.stop("own-step-plain")


def answers(server: Served, kind: str) -> list[dict[str, Any]]:
    fields = dict(KINDS[kind])
    sampling = {"ignore_eos": True} | fields.pop("sampling_params", {})
    return server.generate_all(
        [[last] for last in LASTS], USERS,
        max_new_tokens=TOKENS, sampling_params=sampling, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("kind", list(KINDS))
def test_answers_are_the_plain_servers(broken: Served, without_drafts: Served, kind: str) -> None:
    found, wanted = answers(broken, kind), answers(without_drafts, kind)
    assert [each["output_ids"] for each in found] == [each["output_ids"] for each in wanted]
    assert accepted_drafts(found)[0] > 0, "no draft was accepted: nothing was tested"
