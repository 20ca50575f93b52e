"""The step's operators inside a rehearsed server, in captured graphs, run by the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import tiny_models
from tests.integration.serving import Served, ServerPool
from tests.rehearsal.conftest import Rehearsed, start_rehearsed
from tests.rehearsal.kv_faults import POISON
from tests.rehearsal.on_cpu import GAMMA
from tests.rehearsal.test_sampling_rules import tokens

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]

TOKENS = 10  # of an answer; every step of them is interpreted
PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(3 + 2 * i)] for i in range(4)]
ADMIT = "admit_triton"
WRITE = "write_triton"
GREEDY, SAMPLED = "accept_greedy_triton", "accept_block_triton"
LISTED = "accept_listed_triton"


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Name a fault of KV rows here to plant it in the interpreted server."""
    return tmp_path_factory.mktemp("operators") / "fault"


ARGUMENTS = (
    *("--max-running-requests", "4", "--cuda-graph-bs-decode", "1", "2", "4"),
    *("--random-seed", "3"),  # of SGLang's draft noise
)
WORLD = {
    "DSPARK_REHEARSAL_GRAPHS": "1",
    "DSPARK_REHEARSAL_STAIR": "8e-3",
    "DSPARK_REHEARSAL_COINS": "1",
}


@pytest.fixture(scope="module")
def interpreted(pool: ServerPool, pair: tiny_models.TinyPair, fault: Path) -> Rehearsed:
    world = {**WORLD, "DSPARK_REHEARSAL_FAULT": str(fault), "TRITON_INTERPRET": "1"}
    return start_rehearsed(pool, "operators", pair, *ARGUMENTS, **world)


@pytest.fixture(scope="module")
def in_torch(pool: ServerPool, pair: tiny_models.TinyPair) -> Rehearsed:
    """The same server and coins; acceptance and admission by the references in torch."""
    return start_rehearsed(pool, "operators-torch", pair, *ARGUMENTS, **WORLD)


def answers(server: Served, **sampling: Any) -> list[dict[str, Any]]:
    """Of all prompts at once; seeds are their numbers, where there is a temperature."""
    together = [{"max_new_tokens": TOKENS, "ignore_eos": True, **sampling} for _ in PROMPTS]
    if sampling.get("temperature"):
        together = [{**each, "sampling_seed": 70 + i} for i, each in enumerate(together)]
    body = {"input_ids": PROMPTS, "sampling_params": together}
    found: list[dict[str, Any]] = server.request("POST", "/generate", json=body).json()
    return found


def launched(passes: list[dict[str, Any]]) -> set[str]:
    return {name for each in passes for name in each["operators"]}


def assert_accepted(passes: list[dict[str, Any]]) -> None:
    """Each window emits more than 1.5 tokens on average."""
    assert sum(each["pass"] for each in passes) < len(PROMPTS) * TOKENS / 1.5


def test_greedy_answers_are_the_plain_servers(plain: Served, interpreted: Rehearsed) -> None:
    before = len(interpreted.passes())
    got = answers(interpreted.server, temperature=0)
    assert tokens(got) == tokens(answers(plain, temperature=0))
    passes = interpreted.passes()[before:]
    assert all(each["replayed"] and each["folded"] for each in passes)
    assert all(GREEDY in each["operators"] for each in passes)
    drafted = [each for each in passes if each["verified"]]
    assert drafted
    assert all(ADMIT in each["operators"] for each in drafted)
    assert_accepted(passes)
    # In a graph a vanilla head keeps SGLang's steps, which were quicker there.
    assert launched(passes) == {ADMIT, GREEDY, WRITE}


def test_no_draft_reads_a_rejected_row(plain: Served, interpreted: Rehearsed, fault: Path) -> None:
    """Graphs commit without the outcome. A draft that read one such row would be of NaN."""
    before = len(interpreted.passes())
    try:
        fault.write_text(POISON)
        got = answers(interpreted.server, temperature=0)
    finally:
        fault.unlink()
    assert tokens(got) == tokens(answers(plain, temperature=0))
    passes = interpreted.passes()[before:]
    rejected = sum(each["pass"] + each["verified"] for each in passes) - len(PROMPTS) * TOKENS
    assert rejected > 10, "too few verified rows were rejected"
    assert_accepted(passes)


@pytest.mark.parametrize("rules", [{}, {"top_p": 0.9, "min_p": 0.02}], ids=["uncut", "cut"])
def test_seeded_answers_are_the_plain_servers(
    plain: Served, interpreted: Rehearsed, rules: dict[str, float]
) -> None:
    before = len(interpreted.passes())
    got = answers(interpreted.server, temperature=0.9, **rules)
    assert tokens(got) == tokens(answers(plain, temperature=0.9, **rules))
    passes = interpreted.passes()[before:]
    assert all(each["replayed"] and not each["folded"] for each in passes)
    assert {ADMIT, SAMPLED, WRITE} <= launched(passes)


def test_greedy_answers_beside_requests_with_top_k(plain: Served, interpreted: Rehearsed) -> None:
    """Without seeds such steps are accepted on lists, the greedy requests' too."""
    before = len(interpreted.passes())
    usual = {"max_new_tokens": TOKENS, "ignore_eos": True}
    kinds = [{"temperature": 0}, {"temperature": 0.8, "top_k": 7, "top_p": 0.95}] * 2
    body = {"input_ids": PROMPTS, "sampling_params": [{**usual, **each} for each in kinds]}
    got = tokens(interpreted.server.request("POST", "/generate", json=body).json())
    assert got[::2] == tokens(answers(plain, temperature=0))[::2]
    assert [len(each) for each in got] == [TOKENS] * 4
    assert LISTED in launched(interpreted.passes()[before:])


QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # of its generation_config


@pytest.mark.parametrize(
    "rules",
    [
        QWEN3,
        {**QWEN3, "presence_penalty": 1.0, "repetition_penalty": 1.1},
        {"temperature": 0.9, "min_p": 0.02},
        {"temperature": 0.9, "min_p": 0.02, "frequency_penalty": 0.5},
    ],
    ids=["Qwen3", "Qwen3, penalties", "min-p", "min-p, penalty"],
)
def test_sampled_answers_are_those_of_torch(
    interpreted: Rehearsed, in_torch: Rehearsed, rules: dict[str, float]
) -> None:
    """Draw the same coins in two servers, for settings that our rule judges.

    How many drafts a step verifies depends on what has reached the host by then. So tokens are
    compared up to the first step that verified another number: at least one a step before it.
    """
    sampling, compared = {"ignore_eos": True, **rules}, 0
    for prompt in PROMPTS[:2]:
        answers_of, lengths_of = [], []
        for each in (interpreted, in_torch):
            before = len(each.passes())
            answers_of.append(each.server.generate(prompt, TOKENS, sampling_params=sampling))
            passes = each.passes()[before:]
            lengths_of.append([step["lengths"] for step in passes])
            assert (LISTED in launched(passes)) == (each is interpreted)
        mine, theirs = tokens(answers_of)
        same = [a == b for a, b in zip(*lengths_of, strict=False)]
        steps = same.index(False) if False in same else TOKENS
        compared += min(steps, len(same))
        assert mine[: steps + 1] == theirs[: steps + 1]
    assert compared, "no step of the two servers verified the same number of drafts"
    assert not launched(in_torch.passes())


def test_seeded_answers_beside_requests_on_lists(plain: Served, interpreted: Rehearsed) -> None:
    """The vocabulary is shorter than a list: whole rows judge the requests with a seed alone."""
    rules = {"temperature": 0.9, "min_p": 0.02}
    before = len(interpreted.passes())
    usual = {"max_new_tokens": TOKENS, "ignore_eos": True, **rules}
    kinds = [{"sampling_seed": 70 + i} if i % 2 else {} for i in range(len(PROMPTS))]
    body = {"input_ids": PROMPTS, "sampling_params": [{**usual, **each} for each in kinds]}
    got = tokens(interpreted.server.request("POST", "/generate", json=body).json())
    assert got[1::2] == tokens(answers(plain, **rules))[1::2]
    assert [len(each) for each in got] == [TOKENS] * 4
    passes = interpreted.passes()[before:]
    assert any({LISTED, SAMPLED} <= set(each["operators"]) for each in passes)


def test_the_drafts_context_is_what_a_prefill_would_have_written(interpreted: Rehearsed) -> None:
    """Keys and values of an answer's tokens, by our launch and by SGLang's calls."""
    server, prompt, length = interpreted.server, PROMPTS[3], 24
    to_the_end = {"ignore_eos": True}
    (answer,) = tokens([server.generate(prompt, length, sampling_params=to_the_end)])
    decoded = interpreted.context()
    server.flush_cache()
    before = len(interpreted.passes())
    server.generate(prompt + answer, 3, sampling_params=to_the_end)
    assert len(interpreted.passes()) > before, "no step found what the prefill wrote"
    for name, prefilled in interpreted.context().items():
        common = min(decoded[name].shape[1], prefilled.shape[1])
        assert common >= len(prompt) + length - 2 * GAMMA
        mine, other = decoded[name][:, :common], prefilled[:, :common]
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
