"""Test served ragged windows: every step accepts what the reference engine's drafts allow.

A wrong cache slot of the draft's context costs no token, only acceptance, so the answers alone
cannot show it. From the anchor at a position the engine, which verifies all drafts, accepts A of
them; a server that verifies l of the same drafts must accept min(l, A), step by step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.registry import open_drafter
from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]

TOKENS = 40
PROMPTS = [[5 + (7 * i + j) % 200 for j in range(3 + 5 * i)] for i in range(8)]
THRESHOLD = 0.6  # of confidence: admits none, some or all drafts of a block


class Answer(NamedTuple):
    """tokens: of the output. ends: how many there were after each streamed piece, which is a step
    or, on a busy machine, several. windows: steps that verified 0 .. GAMMA drafts."""

    tokens: list[int]
    ends: list[int]
    windows: tuple[int, ...]


@pytest.fixture(scope="module")
def listening(tiny: tiny_models.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build_listening(tmp_path_factory.mktemp("listening"), tiny)


@pytest.fixture(scope="module")
def ragged(pool: ServerPool, tiny: tiny_models.TinyPair, listening: Path) -> Iterator[Served]:
    """The tiny target with that drafter; windows by confidence alone, at any step cost."""
    config = pool.folder / "threshold.yaml"
    config.write_text(f"schedule: {{threshold: {THRESHOLD}}}\n")
    arguments = ("--max-running-requests", "16", "--dspark-config", str(config))
    yield pool.start("ragged", tiny.target, *DSPARK_FLAGS, str(listening), *arguments)
    pool.stop("ragged")


def accepts(target: TargetModel, drafter: Path, tokens: Sequence[Sequence[int]]) -> list[list[int]]:
    """Drafts that the engine accepts behind each token of each answer: [prompts][TOKENS]."""
    settings = DecodeSettings(max_new_tokens=2, batch=8)
    engine = ReferenceEngine(target, open_drafter(drafter, target), settings)
    begun = [
        [*prompt, *answer[:k]]
        for prompt, answer in zip(PROMPTS, tokens, strict=True)
        for k in range(TOKENS)
    ]
    steps = [generation.steps[0].accepted for generation in engine.run(begun)]
    return [steps[first : first + TOKENS] for first in range(0, len(steps), TOKENS)]


def streamed(server: Served, prompt: Sequence[int]) -> Answer:
    """A greedy answer, piece by piece."""
    asked = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "stream": True,
    }
    pieces = []
    with server.http.stream("POST", "/generate", json=asked) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: ")))
    meta = pieces[-1]["meta_info"]
    counts = [*meta["spec_cap_lens_histogram"][1:], *[0] * tiny_models.GAMMA]  # from the anchor on
    counts = counts[: tiny_models.GAMMA + 1]
    counts[-1] += meta["spec_verify_ct"] - sum(counts)  # the histogram omits whole windows
    ends = [len(piece["output_ids"]) for piece in pieces]
    return Answer(pieces[-1]["output_ids"], ends, tuple(counts))


def explained(answer: Answer, allowed: list[int]) -> bool:
    """Return whether steps of these windows, in some order, lead from piece to piece."""

    @cache
    def leads(at: int, left: tuple[int, ...]) -> bool:
        """From token `at` to the last one with the windows that are left."""
        if at >= TOKENS - 1 or not any(left):
            return at >= TOKENS - 1 and not any(left)
        end = min(each - 1 for each in answer.ends if each - 1 > at)
        return any(
            leads(then, (*left[:n], left[n] - 1, *left[n + 1 :]))
            for n, many in enumerate(left)
            if many
            and (
                (then := at + 1 + min(n, allowed[at])) <= end or end == TOKENS - 1
            )  # the last is cut
        )

    return leads(0, answer.windows)


@pytest.mark.parametrize("users", [1, 8])
def test_steps_accept_what_the_engine_would(
    ragged: Served, tiny: tiny_models.TinyPair, listening: Path, users: int
) -> None:
    target = TargetModel.load(tiny.target, (0, 1))
    plain = ReferenceEngine(target, None, DecodeSettings(max_new_tokens=TOKENS)).run(PROMPTS)
    allowed = accepts(target, listening, [each.tokens for each in plain])
    ragged.flush_cache()
    answers = ragged.each(lambda prompt: streamed(ragged, prompt), PROMPTS, users)
    windows = [0] * (tiny_models.GAMMA + 1)
    for reference, answer, own in zip(plain, answers, allowed, strict=True):
        assert answer.tokens == list(reference.tokens)
        assert explained(answer, own), f"{answer} does not follow from {own}"
        windows = [a + b for a, b in zip(windows, answer.windows, strict=True)]
    print(f"\n{users} users: steps that verified 0 .. gamma drafts: {windows}")
    assert sum(windows[1:-1]) > 20, "few windows were cut: nothing was ragged"
    assert windows[0] + windows[-1] > 20, "windows were all cut"
