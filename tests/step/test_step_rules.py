"""The choice of a step's accept rule by its requests, FlashInfer and the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.serving.config import CONFIG_VARIABLE
from sglang_dspark.step import rules as step_rules
from sglang_dspark.step.penalties import OutputCounts
from sglang_dspark.step.rules import Cuts, Rules, cuts_of, rules_of
from sglang_dspark.step.verify import may_fold
from tests.backends.cpu.draft_world import ALL
from tests.step.penalised import request

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


K, P, M = {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Say whether FlashInfer is installed, and what the configuration file says."""

    def is_(flashinfer: bool, file: Path | None = None) -> None:
        found = object() if flashinfer else None
        monkeypatch.setattr(step_rules, "find_spec", lambda name: found)
        if file is not None:
            monkeypatch.setenv(CONFIG_VARIABLE, str(file))
        clear()

    def clear() -> None:
        step_rules.has_flashinfer.cache_clear()
        step_rules.names_block_rule.cache_clear()

    is_(True)
    yield is_
    clear()


@pytest.mark.parametrize("requests", [(GREEDY, GREEDY), (GREEDY | {"sampling_seed": 3} | P,)])
def test_greedy_steps_have_no_rules(requests: Any) -> None:
    assert rules(*requests) == Rules()


@pytest.mark.parametrize(
    ("requests", "cuts"),
    [
        ((SAMPLED, GREEDY), Cuts()),
        ((SAMPLED, GREEDY | P | M), Cuts()),
        ((SAMPLED | K,), Cuts(top_k=True, most=20)),
        ((SAMPLED | {"top_k": 2}, GREEDY), Cuts(top_k=True, most=2)),
        ((SAMPLED | K, GREEDY, SAMPLED | {"top_k": 2048}), Cuts(top_k=True, most=2048)),
        ((SAMPLED | K, SAMPLED), Cuts(top_k=True)),
        ((SAMPLED | P, SAMPLED), Cuts(top_p=True)),
        ((SAMPLED | K | P, SAMPLED | K | M), Cuts(True, True, True, 20)),
    ],
)
def test_cuts_are_those_of_the_sampled_requests(requests: Any, cuts: Cuts) -> None:
    assert rules(*requests).cuts == cuts


def test_no_cut_is_made_unless_named() -> None:
    assert Cuts() == Cuts(top_k=False, top_p=False, min_p=False, most=None)
    assert not Rules().own_rule
    assert cuts_of([SimpleNamespace(**GREEDY)]) == Cuts(), "greedy requests have none"
    assert [Cuts().kinds, Cuts(min_p=True).kinds, Cuts(True, True, True).kinds] == [0, 1, 3]


def test_a_top_k_of_up_to_2048_is_listed() -> None:
    assert rules(SAMPLED | {"top_k": 2048} | P, GREEDY).cuts == Cuts(True, True, most=2048)
    for listed, requests in (
        (2048, (SAMPLED | {"top_k": 2048} | P, GREEDY)),
        (None, (SAMPLED | {"top_k": 2049},)),
        (None, (SAMPLED | K, SAMPLED)),
        (None, (SAMPLED | P,)),
    ):
        cuts = rules(*requests).cuts
        assert cuts is not None
        assert cuts.listed == listed


@pytest.mark.parametrize(
    "requests",
    [
        (SAMPLED, GREEDY),
        (SAMPLED | K, SAMPLED),
        (SAMPLED | P, SAMPLED),
        (SAMPLED | P, GREEDY),
        (SAMPLED, GREEDY | {"sampling_seed": 3} | M),
    ],
)
def test_steps_with_plain_decodings_distribution_are_left_alone(requests: Any) -> None:
    assert not rules(*requests).own_rule


@pytest.mark.parametrize(
    "requests",
    [
        (SAMPLED | M, GREEDY),
        (SAMPLED | P | K,),
        (SAMPLED | P, SAMPLED | K),
        (SAMPLED, SAMPLED | {"sampling_seed": 3}),
    ],
)
def test_steps_with_another_distribution_are_ours(requests: Any) -> None:
    assert rules(*requests).own_rule


@pytest.mark.parametrize("cut", [P, K])
def test_a_cut_that_sglang_needs_flashinfer_for_is_ours_without(cut: Any, world: Any) -> None:
    """SGLang would raise in the scheduler."""
    assert not rules(SAMPLED | cut, SAMPLED).own_rule
    world(False)
    assert rules(SAMPLED | cut, SAMPLED).own_rule
    assert not rules(SAMPLED, GREEDY).own_rule


@pytest.mark.parametrize(
    ("said", "ours"),
    [("{}", False), ("verify: {rule: block}", True), ("verify: {rule: token}", False)],
)
def test_uncut_steps_are_judged_by_block_if_the_file_says_so(
    said: str, ours: bool, world: Any, tmp_path: Path
) -> None:
    file = tmp_path / "dspark.yaml"
    file.write_text(said)
    world(True, file)
    assert rules(SAMPLED, GREEDY).own_rule == ours
    assert not rules(SAMPLED | P).own_rule


def test_seeds_are_those_of_sampled_requests() -> None:
    seeds = rules(
        SAMPLED, SAMPLED | {"sampling_seed": -7}, GREEDY | {"sampling_seed": 9}, SAMPLED
    ).seeds
    assert seeds is not None
    assert (seeds.rows.tolist(), seeds.values.tolist()) == ([1], [-7])


def test_a_sampled_step_is_not_accepted_in_the_graph() -> None:
    worker = SimpleNamespace(_verify_executor=SimpleNamespace(verify_epilogue=object()))
    proposal = SimpleNamespace(folded=True)
    found = rules(GREEDY, SAMPLED)
    assert not may_fold(worker, batch(GREEDY, SAMPLED), proposal, found)
    without = batch(GREEDY, GREEDY)
    without.sampling_info = None  # as in a pass that only warms up
    assert may_fold(worker, without, proposal, found)


def test_a_penalised_greedy_step_is_not_accepted_in_the_graph() -> None:
    worker = SimpleNamespace(_verify_executor=SimpleNamespace(verify_epilogue=object()))
    proposal = SimpleNamespace(folded=True)
    free = batch(GREEDY, GREEDY)
    assert may_fold(worker, free, proposal, rules(GREEDY, GREEDY))
    found = rules(GREEDY, GREEDY | {"presence_penalty": 0.5})
    assert found.penalties is not None
    assert found.penalties.places == [1]
    assert not found.own_rule
    assert not may_fold(worker, free, proposal, found)
