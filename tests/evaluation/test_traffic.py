"""Confidence through a change of traffic, on drafters whose true chances are known."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses.traffic import SETTLING, WINDOWS, TrafficResult, compute
from sglang_dspark.evaluation.traces import Trace, write_trace
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey, save
from sglang_dspark.schedule.sts_file import StsTable, write_sts
from tests.evaluation.trace_world import generation, step, sts_file, trace

GAMMA = 3
LONG = 2 * SETTLING  # steps of a request


def world(strays: float, prompts: int = 16, steps: int = LONG) -> Trace:
    """Confidence is right for math; chat's chances are `strays` logits above it."""
    generator = np.random.default_rng(1)
    made, domains = [], []
    for i in range(2 * prompts):
        told = generator.normal(0.5, 1.0, size=(steps, GAMMA))
        chance = 1 / (1 + np.exp(-told - strays * (i % 2)))
        taken = np.cumprod(generator.uniform(size=chance.shape) < chance, axis=1).sum(axis=1)
        said = (1 / (1 + np.exp(-told))).astype(np.float32)
        made.append(
            generation(*(step(int(a), tuple(c)) for a, c in zip(taken, said.tolist(), strict=True)))
        )
        domains.append("chat" if i % 2 else "math")
    return trace(made, domains, GAMMA)


def table() -> StsTable:
    """A table that changes nothing."""
    one, zero = (1.0,) * GAMMA, (0.0,) * GAMMA
    return StsTable(
        one, {}, "d", 1, 1, (1,) * GAMMA, zero, zero, 0.0, one, {}, zero, request_spread=0.1
    )


def costs(row: float, gamma: int = GAMMA) -> CostTable:
    """A pass of B tokens takes 1 + `row` B seconds; drafting is free."""
    key = ProfileKey("m", "d", "", "", "", "", "", gamma)
    return CostTable(
        key, (1, 64), (1 + row, 1 + 64 * row), padded=False, per_request=0.0, per_context=0.0,
        draft_requests=(1,), draft_seconds=((0.0,) * (gamma + 1),),
    )  # fmt: skip


def replayed(strays: float, row: float = 0.2) -> TrafficResult:
    return compute("d", world(strays), table(), costs(row), ("math", "chat"), batch=4, draws=20)


def test_what_strays_is_learned_and_pays() -> None:
    found = replayed(-2.0).windows
    for name, windows in found.items():
        assert windows["before"].ece < 0.04, name
        # Those of the second domain are accepted less often, by every calibration.
        assert windows["after"].accepted < windows["before"].accepted - 0.1
    assert found["fixed"]["after"].ece > 0.25
    for name in ("online", "served"):
        # Not less: drafts that are no longer admitted teach nothing more.
        assert found[name]["after"].ece < 0.6 * found["fixed"]["after"].ece
        assert found[name]["after"].drafts < found["fixed"]["after"].drafts
        assert found[name]["after"].over_fixed.low > 1.05
    # Requests begin at the average, which has changed; each one's outcomes tell before that moves.
    assert found["served"]["change"].ece < found["online"]["change"].ece


def test_what_holds_is_left_as_it_is() -> None:
    for windows in replayed(0.0).windows.values():
        for each in windows.values():
            assert each.ece < 0.05
            assert each.predicted == pytest.approx(each.accepted, abs=0.05)
            assert 0.97 < each.over_fixed.value < 1.03


def test_the_fixed_table_is_what_others_are_compared_with() -> None:
    fixed = replayed(-2.0).windows["fixed"]
    assert [asdict(fixed[each].over_fixed) for each in WINDOWS] == [
        {"value": 1.0, "low": 1.0, "high": 1.0}
    ] * 3


def test_free_rows_are_all_verified_and_costly_ones_none() -> None:
    """By hand: a free row leaves 1 s a step, so tokens a second are tau times the batch."""
    every = replayed(-2.0, row=0.0).windows
    assert {each[name].drafts for each in every.values() for name in WINDOWS} == {float(GAMMA)}
    none = replayed(-2.0, row=50.0).windows
    assert {each[name].drafts for each in none.values() for name in WINDOWS} == {0.0}
    assert none["online"]["after"].over_fixed.value == 1.0, "nothing was verified to learn from"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"domains": ("math", "poems")}, "no verify step of 'poems', only of math, chat"),
        ({"costs": costs(0.1, gamma=5)}, "step times of gamma 5, the trace's is 3"),
        ({"trace": world(0.0, prompts=2, steps=8)}, "give more prompts"),
    ],
)
def test_what_cannot_be_replayed_is_refused(given: dict[str, object], said: str) -> None:
    usual = {"trace": world(0.0, prompts=4), "table": table(), "costs": costs(0.1)}
    with pytest.raises(DSparkError, match=said):
        compute("d", **{**usual, "domains": ("math", "chat"), "batch": 4, "draws": 2, **given})  # type: ignore[arg-type]


def test_the_command_reads_a_servers_step_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = world(-1.0, prompts=6)
    write_trace(tmp_path / "trace.json", recorded)
    fitted = sts_file(GAMMA)
    write_sts(tmp_path / "sts.json", replace(fitted, drafter_sha256=recorded.drafter.sha256))
    save(costs(0.2), tmp_path / "costs.json")
    arguments = ["eval", "traffic", "--drafter", "d=trace.json", "--sts", "sts.json"]
    arguments += ["--batch", "4", "--json", "out.json"]
    ended = CliRunner().invoke(app, [*arguments, "--step-times", "costs.json"])
    assert ended.exit_code == 0, ended.output
    assert "math, then chat, 4 at a time; fitted on d" in " ".join(ended.output.split())
    found = json.loads((tmp_path / "out.json").read_text())["metrics"]
    assert found["requests"] == {"math": 6, "chat": 6}
    assert (tmp_path / "figures" / "out.png").is_file()
    without = [each for each in arguments if each not in ("--sts", "sts.json")]
    ended = CliRunner().invoke(app, [*without, "--step-times", "costs.json"])
    assert "4 at a time; fitted on nothing" in " ".join(ended.output.split())
    told = json.loads((tmp_path / "out.json").read_text())["metrics"]["windows"]["fixed"]["before"]
    assert told["predicted"] == pytest.approx(told["accepted"], abs=0.03)
    refused = CliRunner().invoke(app, [*arguments, "--step-times", "trace.json"])
    assert refused.exit_code == 1
    assert "trace.json is no table of step times" in str(refused.exception)
