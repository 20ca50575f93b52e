"""Test the effect of weights in fewer bits: none without rounding, else the planted changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sglang_dspark.backends.cpu.weight_formats import BFLOAT16, INT8, rounded_rows
from sglang_dspark.cli._bench_weights import _rounded
from sglang_dspark.cli.main import app
from sglang_dspark.evaluation.engine import DecodeSettings
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.evaluation.weight_rounding import answer, compare, round_weights
from tests.evaluation.conftest import VOCAB, Pair

SETTINGS = DecodeSettings(max_new_tokens=24, batch=4)


def changed(pair: Pair, prompts: list[list[int]], rounded: TargetModel):  # type: ignore[no-untyped-def]
    ours, theirs = (answer(each, prompts, SETTINGS) for each in (pair.target, rounded))
    return compare(pair.target, rounded, prompts, ours, theirs)


def fresh(pair: Pair) -> TargetModel:
    return TargetModel.load(pair.target_dir)


def test_nothing_rounded_changes_nothing(pair: Pair, prompts: list[list[int]]) -> None:
    rounded = fresh(pair)
    assert round_weights(rounded, lambda weight: weight.clone()) == 2 * 7 + 2
    found = changed(pair, prompts[:4], rounded)
    assert (found.prompts, found.tokens) == (4, 4 * 24)
    assert found.logit_rms == found.logit_max == found.kl == 0
    assert found.same_choice == found.same_answers == found.same_start == 1


def test_fewer_bits_change_more(pair: Pair, prompts: list[list[int]]) -> None:
    found = []
    for form in (BFLOAT16, INT8):
        found.append(changed(pair, prompts[:4], _rounded(pair.target_dir, form, "wide")))
    half, byte = found
    assert 0 < half.logit_rms < byte.logit_rms < half.logit_max < byte.logit_max
    assert 0 < half.kl < byte.kl < 0.1


def test_rounded_activations_change_little_and_are_seen(
    pair: Pair, prompts: list[list[int]]
) -> None:
    few, sixteen = fresh(pair), fresh(pair)
    round_weights(few, lambda weight: weight, lambda x: x.bfloat16().float())
    round_weights(sixteen, lambda weight: weight, rounded_rows)
    coarse, fine = (changed(pair, prompts[:4], each) for each in (few, sixteen))
    assert 0 < fine.logit_rms < coarse.logit_rms / 4


def test_eight_bits_beside_int8_change_more_than_sixteen(
    pair: Pair, prompts: list[list[int]]
) -> None:
    few, sixteen, half = (
        changed(pair, prompts[:4], _rounded(pair.target_dir, *way))
        for way in ((INT8, "narrow"), (INT8, "auto"), (BFLOAT16, "auto"))
    )
    assert 0 < half.kl < few.kl < 0.1
    assert sixteen.kl < few.kl


def test_planted_changes_are_reported(pair: Pair, prompts: list[list[int]]) -> None:
    """A head whose logits are all a third larger; one that always says token 9."""
    larger = fresh(pair)
    larger.head_weight.data *= 4 / 3
    found = changed(pair, prompts[:4], larger)
    assert found.same_choice == found.same_answers == 1
    assert found.kl > 0
    with torch.no_grad():
        ids = torch.tensor([prompts[0]])
        hidden = larger.forward(ids, torch.zeros(1, dtype=torch.long), larger.new_cache(1, 99))
        logits = pair.target.logits(hidden.hidden[0])
        spread = (logits - logits.mean(-1, keepdim=True)).square().mean().sqrt() / 3
    assert found.logit_rms == pytest.approx(float(spread), rel=0.2)

    stubborn = fresh(pair)
    stubborn.head_weight.data.zero_()
    stubborn.head_weight.data[9] = 0.0
    found = changed(pair, prompts[:4], stubborn)  # all logits are 0: the first token is chosen
    said = [answer(pair.target, prompts[:4], SETTINGS)[i].tokens for i in range(4)]
    zeros = sum(token == 0 for tokens in said for token in tokens)
    assert found.same_choice == zeros / (4 * 24)
    assert found.same_answers == 0
    starts = [next((i for i, t in enumerate(tokens) if t != 0), 24) / 24 for tokens in said]
    assert found.same_start == pytest.approx(sum(starts) / 4)


def test_a_shift_of_all_logits_is_no_change(pair: Pair, prompts: list[list[int]]) -> None:
    """Softmax does not see it: one more direction of the head, the same for every token."""
    shifted = fresh(pair)
    generator = torch.Generator().manual_seed(0)
    shifted.head_weight.data += torch.randn(1, 64, generator=generator).expand(VOCAB, 64)
    found = changed(pair, prompts[:4], shifted)
    assert found.logit_rms < 1e-4
    assert found.kl < 1e-8


def test_the_command_writes_what_it_found(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "weights.json"
    options = ["--prompts", "3", "--tokens", "8", "--json", str(out)]
    done = CliRunner().invoke(app, ["bench", "weights", "--target", str(pair.target_dir), *options])
    assert done.exit_code == 0, done.output
    metrics = json.loads(out.read_text())["metrics"]
    ways = {"bfloat16": ("wide", "auto"), "int8": ("auto", "narrow")}  # others round alike
    assert set(metrics["formats"]) == {
        f"{form}, activations {told}" for form, each in ways.items() for told in each
    }
    assert metrics["formats"]["int8, activations narrow"]["prompts"] == 3
    wrong = CliRunner().invoke(app, ["bench", "weights", "--formats", "int4"])
    assert wrong.exit_code != 0
