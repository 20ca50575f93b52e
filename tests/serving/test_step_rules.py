"""Which steps are ours to accept, and what they take along; nothing is asked of the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.serving.step.penalties import OutputCounts
from sglang_dspark.serving.step.rules import Rules, rules_of
from sglang_dspark.serving.step.verify import may_fold
from tests.serving_cpu.draft_world import ALL
from tests.serving_cpu.test_penalties import request

GREEDY: dict[str, Any] = {"temperature": 1.0, "top_k": 1}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": ALL}


def batch(*requests: dict[str, Any]) -> SimpleNamespace:
    """A batch of SGLang's with these settings, and the flags that SGLang finds by them."""
    usual = {"top_p": 1.0, "min_p": 0.0, "sampling_seed": None}
    reqs = [request([], **usual | each) for each in requests]
    params = [req.sampling_params for req in reqs]
    info = SimpleNamespace(
        is_all_greedy=all(p.top_k <= 1 for p in params),
        need_top_k_sampling=any(p.top_k != ALL for p in params),
        need_top_p_sampling=any(p.top_p != 1.0 for p in params),
        need_min_p_sampling=any(p.min_p > 0 for p in params),
        has_custom_logit_processor=False,
    )
    return SimpleNamespace(
        reqs=reqs,
        sampling_info=info,
        seq_lens=torch.full((len(reqs),), 5),
        req_pool_indices_cpu=torch.arange(len(reqs)),
        has_grammar=False,
    )


def rules(*requests: dict[str, Any]) -> Rules:
    pool = SimpleNamespace(req_generation=torch.zeros(8, dtype=torch.int64))
    worker = SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=pool))
    return rules_of(worker, OutputCounts(), batch(*requests))


@pytest.mark.parametrize(
    "requests",
    [
        (GREEDY, GREEDY),
        (SAMPLED, GREEDY),
        (SAMPLED | {"top_k": 5},),
        (SAMPLED | {"top_p": 0.9}, SAMPLED),
        (GREEDY | {"sampling_seed": 3},),
    ],
)
def test_steps_whose_law_is_plain_decodings_are_left_alone(requests: Any) -> None:
    assert rules(*requests) == Rules()


@pytest.mark.parametrize(
    "requests",
    [
        (SAMPLED | {"min_p": 0.1}, GREEDY),
        (SAMPLED | {"top_p": 0.9, "top_k": 5},),
        (SAMPLED | {"top_p": 0.9}, SAMPLED | {"top_k": 5}),
        (SAMPLED, SAMPLED | {"sampling_seed": 3}),
    ],
)
def test_steps_whose_law_is_not_are_ours(requests: Any) -> None:
    assert rules(*requests).own_law


def test_seeds_are_those_of_sampled_requests() -> None:
    seeds = rules(
        SAMPLED, SAMPLED | {"sampling_seed": -7}, GREEDY | {"sampling_seed": 9}, SAMPLED
    ).seeds
    assert seeds is not None
    assert (seeds.rows.tolist(), seeds.values.tolist()) == ([1], [-7])


def test_a_penalised_greedy_step_is_not_accepted_in_the_graph() -> None:
    worker = SimpleNamespace(_verify_executor=SimpleNamespace(verify_epilogue=object()))
    proposal = SimpleNamespace(folded=True)
    free = batch(GREEDY, GREEDY)
    assert may_fold(worker, free, proposal, rules(GREEDY, GREEDY))
    found = rules(GREEDY, GREEDY | {"presence_penalty": 0.5})
    assert found.penalties is not None
    assert found.penalties.places == [1]
    assert not found.own_law
    assert not may_fold(worker, free, proposal, found)
