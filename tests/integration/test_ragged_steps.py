"""Windows of unlike lengths, served: every step accepts what the reference engine's drafts allow.

A wrong cache slot of the draft's context costs no token, only acceptance, so the answers alone
cannot show it. From the anchor at a position the engine, which verifies all drafts, accepts A of
them; a server that verifies l of the same drafts must accept min(l, A), step by step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.proposer import open_drafter
from sglang_dspark.evaluation.target import TargetModel
from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]

TOKENS = 40
PROMPTS = [[5 + (7 * i + j) % 200 for j in range(3 + 5 * i)] for i in range(8)]
THRESHOLD = 0.6  # of confidence: admits none, some or all drafts of a block


class Piece(NamedTuple):
    """What one streamed piece tells: output tokens so far, and its steps' window lengths."""

    tokens: int
    windows: list[int]


@pytest.fixture(scope="module")
def listening(noisy: tiny_models.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build_listening(tmp_path_factory.mktemp("listening"), noisy)


@pytest.fixture(scope="module")
def ragged(pool: ServerPool, noisy: tiny_models.TinyPair, listening: Path) -> Iterator[Served]:
    """The tiny target with that drafter; windows by confidence alone, whatever steps cost."""
    config = pool.folder / "threshold.yaml"
    config.write_text(f"schedule: {{threshold: {THRESHOLD}}}\n")
    arguments = ("--max-running-requests", "16", "--dspark-config", str(config))
    yield pool.start("ragged", noisy.target, *DSPARK_FLAGS, str(listening), *arguments)
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


def streamed(server: Served, prompt: Sequence[int]) -> tuple[list[int], list[Piece]]:
    """A greedy answer's tokens and its pieces."""
    asked = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "stream": True,
    }
    answer: list[int] = []
    pieces: list[Piece] = []
    seen: Counter[int] = Counter()
    with server.http.stream("POST", "/generate", json=asked) as lines:
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                continue
            told = json.loads(line.removeprefix("data: "))
            answer, meta = told["output_ids"], told["meta_info"]
            counts = Counter(
                {n - 1: many for n, many in enumerate(meta.get("spec_cap_lens_histogram", []))}
            )
            whole = meta.get("spec_verify_ct", 0) - counts.total()
            counts[tiny_models.GAMMA] += whole  # steps that verify every draft are not listed
            pieces.append(Piece(len(answer), sorted((counts - seen).elements())))
            seen = counts
    return answer, pieces


def explained(at: int, windows: list[int], end: int, allowed: list[int]) -> bool:
    """Whether steps of these windows, in some order, lead from token `at` to token `end`."""
    if not windows:
        return at == end or (at > end == TOKENS - 1)  # the last step may be cut
    return any(
        at < TOKENS
        and explained(
            at + 1 + min(windows[i], allowed[at]), windows[:i] + windows[i + 1 :], end, allowed
        )
        for i in range(len(windows))
    )


@pytest.mark.parametrize("users", [1, 8])
def test_steps_accept_what_the_engine_would(
    ragged: Served, noisy: tiny_models.TinyPair, listening: Path, users: int
) -> None:
    target = TargetModel.load(noisy.target, (0, 1))
    plain = ReferenceEngine(target, None, DecodeSettings(max_new_tokens=TOKENS)).run(PROMPTS)
    allowed = accepts(target, listening, [each.tokens for each in plain])
    ragged.flush_cache()
    answers = ragged.each(lambda prompt: streamed(ragged, prompt), PROMPTS, users)
    lengths: Counter[int] = Counter()
    for reference, (answer, pieces), own in zip(plain, answers, allowed, strict=True):
        assert answer == list(reference.tokens)
        at = 0
        for piece in pieces:
            assert explained(at, piece.windows, piece.tokens - 1, own), (
                f"windows {piece.windows} led from token {at} to {piece.tokens - 1}, the engine "
                f"accepts {own[at : piece.tokens]}"
            )
            at = piece.tokens - 1
            lengths.update(piece.windows)
    print(f"\n{users} users: windows of drafts {sorted(lengths.items())}")
    assert len(lengths) >= 3, "windows of one length are not ragged"
    assert sum(lengths[n] for n in range(1, tiny_models.GAMMA)) > 20, "few windows were cut"
    assert sum(own[0] > 0 for own in allowed) > 0
