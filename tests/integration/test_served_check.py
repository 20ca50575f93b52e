"""The last stage of `dspark train` against a live server: equal answers pass, others do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dspark.cli._served_check import ask, compare, plain_answers
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.loadtest.client.metrics import Chunk
from tests.integration.serving import Served
from tests.integration.tiny_models import TinyPair

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]

IDS = [[5, 6, 7, 8], [9, 10, 11]]
TOKENS = 16


@pytest.mark.slow
def test_the_server_is_held_to_the_targets_own_answers(
    tiny_dspark: Served, noisy: TinyPair
) -> None:
    model = TargetModel.load(Path(noisy.target))
    expected = plain_answers(model, IDS, TOKENS)
    tiny_dspark.pool.use(tiny_dspark)
    answers = asyncio.run(ask(tiny_dspark.process.spec.url, IDS, TOKENS))
    check = compare(model, IDS, expected, answers)
    assert (check.prompts, check.tokens) == (2, 2 * TOKENS)
    assert check.equal + check.near_ties == 2
    assert check.tau >= 1
    ids = list(answers[1].ids)
    likeliest = ids[5]
    ids[5] = (likeliest + 1) % model.config.vocab_size
    wrong = replace(answers[1], chunks=(Chunk(0.1, "", len(ids), tuple(ids)),))
    with pytest.raises(DSparkError, match=r"demo prompt 1 differs .* at token 5"):
        compare(model, IDS, expected, [answers[0], wrong])
    short = replace(wrong, chunks=(Chunk(0.1, "", 3, tuple(answers[1].ids[:3])),))
    with pytest.raises(DSparkError, match="at token 3: None"):
        compare(model, IDS, expected, [answers[0], short])
