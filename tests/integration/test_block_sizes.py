"""Test starts with different block sizes and one cache: all give one answer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dspark.schedule.sts_file import REGIMES, StsFile, StsTable, write_sts
from tests.integration.serving import DSPARK_FLAGS, ServerPool
from tests.integration.tiny_models import GAMMA, TinyPair

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]

PROMPT = "the table of step times"


def calibrate(drafter: Path) -> None:
    """An `sts.json` for every position of the trained block."""
    heats = tuple(1.0 + 0.1 * position for position in range(GAMMA))
    table = StsTable(
        temperatures=heats,
        sampling={},
        dataset="made",
        prompts=1,
        steps=100,
        counts=(100,) * GAMMA,
        ece_before=(0.1,) * GAMMA,
        ece_after=(0.1,) * GAMMA,
        shift=0.0,
        shifted_temperatures=heats,
        held_out={},
    )
    write_sts(drafter / "sts.json", StsFile(dict.fromkeys(REGIMES, table), "", "", (), {}, ""))


def answer(
    pool: ServerPool, pair: TinyPair, cache: Path, name: str, block_size: int
) -> tuple[Sequence[int], str]:
    """Tokens of a greedy answer and the log of a server that ran for it alone."""
    config = cache / "dspark.yaml"
    config.write_text("schedule: {profile_seconds: 30.0}\n")  # enough beside busy neighbours
    flags = (*DSPARK_FLAGS, str(pair.drafter), "--max-running-requests", "8")
    asked = ("--speculative-dspark-block-size", str(block_size), "--dspark-config", str(config))
    server = pool.start(name, pair.target, *flags, *asked, XDG_CACHE_HOME=str(cache))
    try:
        answers = server.generate_all([PROMPT] * 3, 3, max_new_tokens=32)
        assert len({tuple(each["output_ids"]) for each in answers}) == 1
        return answers[0]["output_ids"], server.log
    finally:
        pool.stop(name)


def source(log: str) -> str:
    """Return the source of the step times that the one line about the mode names."""
    (line,) = (line for line in log.splitlines() if "sglang-dspark: mode " in line)
    found = re.search(r"drafts of 1 to (\d) positions (measured in|read from)", line)
    assert found is not None, line
    assert "calibrated by" in line, line
    return f"{found[2]}, {found[1]} positions"


def greedy(pair: TinyPair, count: int, first: int) -> list[int]:
    """The target's own answer: its next token depends on the last one alone."""
    tokens = [first]
    while len(tokens) < count:
        tokens.append(int(pair.logits[tokens[-1]].argmax()))
    return tokens


@pytest.mark.slow
def test_block_sizes_take_turns_on_one_cache(
    pool: ServerPool, noisy: TinyPair, tmp_path: Path
) -> None:
    pair = replace(noisy, drafter=tmp_path / "drafter")
    shutil.copytree(noisy.drafter, pair.drafter)
    calibrate(pair.drafter)
    costs = tmp_path / "sglang-dspark" / "costs"
    starts = []
    for number, block_size in enumerate((GAMMA, 3, GAMMA)):
        tokens, log = answer(pool, pair, tmp_path, f"blocks-{number}", block_size)
        assert list(tokens) == greedy(pair, 32, tokens[0])
        starts.append(source(log))
    assert starts == ["measured in, 5 positions", "measured in, 3 positions", starts[2]]
    assert starts[2] == "read from, 5 positions"
    kept = {json.loads(file.read_text())["key"]["gamma"]: file for file in costs.glob("*.json")}
    assert sorted(kept) == [3, GAMMA]


@pytest.mark.slow
def test_an_answer_reaches_the_contexts_end_with_a_long_block(
    pool: ServerPool, tiny: TinyPair, tmp_path: Path
) -> None:
    """Two windows of eleven places are reserved behind its last token, and cost it none."""
    pair, gamma, context = replace(tiny, drafter=tmp_path / "drafter"), 10, 128
    shutil.copytree(tiny.drafter, pair.drafter)
    settings = pair.drafter / "config.json"
    trained, longer = f'"block_size": {GAMMA}', f'"block_size": {gamma}'
    text = settings.read_text()
    assert trained in text
    settings.write_text(text.replace(trained, longer))
    config = tmp_path / "static.yaml"
    config.write_text("schedule: {mode: static}\n")
    arguments = ("--dspark-config", str(config), "--context-length", str(context))
    server = pool.start("long-block", pair.target, *DSPARK_FLAGS, str(pair.drafter), *arguments)
    try:
        prompts = [[5 + (7 * n + at) % 200 for at in range(8 + n)] for n in range(4)]
        answers = server.each(
            lambda prompt: server.generate(prompt, context - len(prompt)), prompts, len(prompts)
        )
        for prompt, got in zip(prompts, answers, strict=True):
            told = got["meta_info"]
            first = int(pair.logits[prompt[-1]].argmax())
            assert got["output_ids"] == greedy(pair, context - 2 - len(prompt), first)
            assert told["finish_reason"]["type"] == "length"
            assert told["spec_verify_ct"] < told["completion_tokens"] / 5, "windows were short"
    finally:
        pool.stop("long-block")
