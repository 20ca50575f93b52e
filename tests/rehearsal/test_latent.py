"""DeepSeek-V4 with its own drafter on CUDA's side of the step: SGLang's model class, cache and
attention metadata in real servers, with torch for the kernels that only a GPU has (`latent.py`)."""

from __future__ import annotations

import pytest
import torch

from tests.integration.serving import Served, ServerPool
from tests.integration.tiny_models import GAMMA, TinyPair
from tests.rehearsal import latent_models
from tests.rehearsal.conftest import SITE, SLOTS, Rehearsed, start_rehearsed

# Two servers of large classes, for a drafter that is scheduled on request only: two minutes.
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.xdist_group("rehearsal")]

TOKENS = 24
PROMPTS = [[(7 * i + 13 * k * k) % 250 + 6 for i in range(5 + 29 * k)] for k in range(6)]
GREEDY = {"max_new_tokens": TOKENS, "sampling_params": {"ignore_eos": True}}
# The last prompt is longer than a window of 128, and the pool of windows is not smaller than that.
FLAGS = ("--swa-full-tokens-ratio", "1", "--skip-tokenizer-init")
SIZES = ("--cuda-graph-bs-decode", "1", "2", "4")
LATENT = {"DSPARK_REHEARSAL_LATENT": "1"}
GRAPHS = {"DSPARK_REHEARSAL_GRAPHS": "1", "DSPARK_REHEARSAL_STAIR": "1e-3"}
# SGLang's default for a drafter in the target's checkpoint is static verification.
COMPACT = {"SGLANG_RAGGED_VERIFY_MODE": "compact"}


@pytest.fixture(scope="module")
def latent_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A checkpoint that is its own drafter."""
    folder = latent_models.build(tmp_path_factory.mktemp("latent"))
    return TinyPair(folder, folder, torch.empty(0))


@pytest.fixture(scope="module")
def latent_plain(pool: ServerPool, latent_pair: TinyPair) -> Served:
    flags = (*FLAGS, "--skip-server-warmup", "--max-running-requests", SLOTS)
    environment = {"PYTHONPATH": str(SITE), "DSPARK_REHEARSAL": str(pool.folder), **LATENT}
    return pool.start("latent-plain", latent_pair.target, *flags, **environment)


@pytest.fixture(scope="module")
def latent(pool: ServerPool, latent_pair: TinyPair) -> Rehearsed:
    """In graphs of up to four requests; more run eagerly."""
    flags, environment = (*FLAGS, *SIZES), {**LATENT, **GRAPHS, **COMPACT}
    return start_rehearsed(pool, "latent", latent_pair, *flags, **environment)


def equal_and_drafted(plain: Served, served: Rehearsed, users: int) -> None:
    """Greedy answers are the plain server's, with drafts of which some are accepted."""
    expected = plain.generate_all(PROMPTS, users, **GREEDY)
    got = served.server.generate_all(PROMPTS, users, **GREEDY)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    assert sum(each["meta_info"]["spec_num_correct_drafts"] for each in got) > len(PROMPTS)


@pytest.mark.parametrize("users", [1, 4, 6])
def test_greedy_answers_are_the_plain_servers(
    latent_plain: Served, latent: Rehearsed, users: int
) -> None:
    equal_and_drafted(latent_plain, latent, users)


def test_it_is_scheduled(latent_plain: Served, latent: Rehearsed) -> None:
    """Passes of part of the drafts, and of none, without a read of the host by our modules."""
    equal_and_drafted(latent_plain, latent, 4)
    assert "DeepseekV4ForCausalLMDSpark" in latent.server.log
    assert "mode compact, scheduled by confidence" in latent.server.log
    drafted = [each for each in latent.passes() if each["verified"]]
    assert [each for each in drafted if each["verified"] < GAMMA * each["pass"]]
    assert [each for each in latent.launches() if each["reads"]] == []


def test_graphs_accept_and_write_the_context(latent_plain: Served, latent: Rehearsed) -> None:
    """Its captured pass writes the draft's context too, unlike that of other drafters."""
    equal_and_drafted(latent_plain, latent, 4)
    replayed = [each for each in latent.passes() if each["replayed"]]
    assert [each for each in replayed if each["folded"] and each["verified"]]
    assert all(each["drafts_replayed"] for each in replayed if each["verified"])


def test_context_written_outside_graphs_serves_later_drafts(
    latent_plain: Served, latent: Rehearsed
) -> None:
    """Sampled steps write it by SGLang's own calls: drafts of greedy requests beside them fit."""
    sampled = {"max_new_tokens": TOKENS, "sampling_params": {"temperature": 1.0}}
    each = [GREEDY, {**sampled, "sampling_params": {"temperature": 1.0, "ignore_eos": True}}] * 3
    jobs = list(zip(PROMPTS, each, strict=True))
    got = latent.server.each(lambda job: latent.server.generate(job[0], **job[1]), jobs, 4)
    alone = latent_plain.generate_all(PROMPTS, 1, **GREEDY)
    for index in range(0, len(PROMPTS), 2):
        assert got[index]["output_ids"] == alone[index]["output_ids"]
    assert all(len(answer["output_ids"]) == TOKENS for answer in got)
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in got) > len(PROMPTS)


def test_the_drafts_context_is_what_a_prefill_would_have_written(latent: Rehearsed) -> None:
    """Rows of an answer's tokens, quantised to FP8: a value may differ by one of its steps."""
    server, prompt = latent.server, PROMPTS[1]
    answer = server.generate(prompt, **GREEDY)["output_ids"]
    decoded = latent.context()["rows"]
    server.flush_cache()
    before = len(latent.passes())
    server.generate(prompt + answer, **{**GREEDY, "max_new_tokens": 3})
    assert len(latent.passes()) > before, "no step found what the prefill wrote"
    prefilled = latent.context()["rows"]
    common = min(decoded.shape[1], prefilled.shape[1])
    assert common >= len(prompt) + TOKENS - 2 * GAMMA
    mine, other = decoded[:, :common], prefilled[:, :common]
    assert other.abs().amin(dim=1).max() > 0
    torch.testing.assert_close(mine, other, atol=1e-3, rtol=0.13)
