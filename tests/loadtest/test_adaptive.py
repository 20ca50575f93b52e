"""The adaptive comparison: same requests for all arms, nothing measured twice, ratios by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dspark.cli._bench_adaptive import _gammas
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench.adaptive import (
    LEAST_REQUESTS,
    Figure,
    Journal,
    Plan,
    arms_of,
    measure,
    shortened,
)
from sglang_dspark.loadtest.bench.adaptive_results import as_metrics, draw
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from tests.ports import free_ports

ARMS = ("plain", "fixed-1", "fixed-2", "scheduled")
PLAN = Plan(tuple(f"prompt {i}" for i in range(40)), (1, 4), ARMS, trials=3, mean_tokens=20)
SPEEDS = {"plain": 100.0, "fixed-1": 110.0, "fixed-2": 80.0, "scheduled": 121.0}


def head(plan: Plan) -> dict[str, str]:
    return {"plan": plan.fingerprint()}


def figures(users: int, wobble: tuple[float, ...]) -> list[Figure]:
    """All arms of trial t are `wobble[t]` times as fast: a machine with slow minutes."""
    return [
        Figure(t, users, arm, SPEEDS[arm] * factor, None if arm == "plain" else 1.5, 10.0, 1.0)
        for t, factor in enumerate(wobble)
        for arm in ARMS
    ]


def test_arms_of_a_trial_answer_the_same_and_trials_differ() -> None:
    first, again, other = PLAN.requests(4, 0), PLAN.requests(4, 0), PLAN.requests(4, 1)
    assert first == again
    assert len(first) == 8
    assert not {prompt for prompt, _ in first} & {prompt for prompt, _ in other}
    lengths = [sampling.max_new_tokens for _, sampling in first + other]
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(set(lengths)) > 4
    assert len(PLAN.requests(1, 0)) == LEAST_REQUESTS
    short = replace(PLAN, least=2)
    assert [len(short.requests(users, 0)) for users in (1, 4)] == [2, 8]
    assert short.fingerprint() != PLAN.fingerprint()
    with pytest.raises(DSparkError, match="a request"):
        replace(PLAN, least=0)


def test_every_arm_once_a_trial_in_changing_order() -> None:
    rounds = PLAN.rounds()
    assert Counter(rounds).most_common(1)[0][1] == 1
    assert len(rounds) == 3 * 2 * 4
    orders = {tuple(arm for *at, arm in rounds if at == [t, 4]) for t in range(3)}
    assert len(orders) == 3
    assert all(sorted(order) == sorted(ARMS) for order in orders)


def test_ratios_are_taken_within_trials() -> None:
    metrics = as_metrics(figures(4, (1.0, 0.5, 2.0)), (4,))
    (row,) = metrics["by_concurrency"]
    assert row["plain"] == pytest.approx(100.0)
    assert row["fixed"] == pytest.approx({"1": 110.0, "2": 80.0})
    assert row["best_fixed"] == "1"
    assert row["over_plain"]["low"] == pytest.approx(1.21)
    assert row["over_plain"]["high"] == pytest.approx(1.21)
    assert row["over_best_fixed"]["mid"] == pytest.approx(1.1)
    assert row["over_plain"]["met"] == row["over_best_fixed"]["met"] == "yes"
    assert "DSPARK beats plain decoding in throughput at 4 users" in metrics["verdicts"][0]


@pytest.mark.parametrize(("ours", "met"), [(90.0, "no"), (100.5, "within noise")])
def test_a_broken_promise_is_distinguished_from_noise(ours: float, met: str) -> None:
    measured = [
        replace(each, tokens_per_s=ours * (1 + 0.01 * each.trial))
        if each.arm == "scheduled"
        else each
        for each in figures(4, (1.0, 1.01, 0.99))
    ]
    (row,) = as_metrics(measured, (4,))["by_concurrency"]
    assert row["over_plain"]["met"] == met


def test_a_trial_that_lacks_an_arm_is_skipped() -> None:
    whole = figures(4, (1.0, 1.0, 1.0))
    cut = [each for each in whole if (each.trial, each.arm) != (2, "fixed-2")]
    (row,) = as_metrics(cut, (4,))["by_concurrency"]
    assert row["over_plain"]["trials"] == 2
    assert row["over_plain"]["low"] is None  # two trials name no winner
    with pytest.raises(DSparkError, match="no trial at 8 users is whole"):
        as_metrics(whole, (8,))


def test_the_journal_goes_on_and_refuses_another_plan(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "journal.jsonl"
    first = figures(4, (1.0,))[0]
    Journal(path, head(PLAN)).add(first)
    again = Journal(path, head(PLAN))
    assert again.figures == [first]
    assert again.has(0, 4, "plain")
    assert not again.has(1, 4, "plain")
    with pytest.raises(DSparkError, match="another plan"):
        Journal(path, head(replace(PLAN, mean_tokens=21)))
    path.write_text(path.read_text() + '{"trial": 0}\n')
    with pytest.raises(DSparkError, match="no journal"):
        Journal(path, head(PLAN))


def test_rounds_on_servers_that_answer(tmp_path: Path) -> None:
    plan = replace(PLAN, arms=("plain", "fixed-1", "scheduled"), concurrency=(2,), trials=1)
    journal = Journal(tmp_path / "journal.jsonl", head(plan))
    journal.add(Figure(0, 2, "fixed-1", 50.0, 1.5, 1.0, 1.0))
    seen: list[Figure] = []
    servers = {name: small_server(name, tmp_path) for name in ("plain", "scheduled")}
    try:
        for server in servers.values():
            server.wait_ready(30)
            server.pause()
        measure(servers, plan, journal, seen.append)
    finally:
        for server in servers.values():
            server.stop()
    assert sorted(each.arm for each in seen) == ["plain", "scheduled"]  # fixed-1 was there
    assert len(Journal(journal.path, head(plan)).figures) == 3
    for each in seen:
        assert 2 * 3 < each.tokens_per_s < 2 * 7 / 0.3  # 7 tokens in 0.3 s or more, two users
    assert seen[0].tau is None or seen[1].tau is None
    assert as_metrics(journal.figures, (2,))["by_concurrency"][0]["fixed"] == pytest.approx(
        {"1": 50}
    )


def small_server(name: str, run_dir: Path) -> ServerProcess:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    module = "tests.loadtest.small_server"
    spec = ServerSpec(name, Path("m"), free_ports(), environment=environment, module=module)
    return ServerProcess(spec, run_dir).start()


def test_arms_differ_in_what_they_verify_alone(tmp_path: Path) -> None:
    plain, fixed, ours = arms_of((3,), slots=8)
    assert [arm.name for arm in (plain, fixed, ours)] == ["plain", "fixed-3", "scheduled"]
    assert plain.arguments == fixed.arguments[1:] == ours.arguments[1:]
    assert (fixed.config, ours.config) == ({"schedule": {"mode": "static"}}, {})


def test_a_shorter_drafter_keeps_its_weights(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps({"block_size": 5, "hidden_size": 8}))
    (drafter / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):  # a resumed run makes it again
        made = shortened(drafter, 2, tmp_path / "run")
    assert json.loads((made / "config.json").read_text()) == {"block_size": 2, "hidden_size": 8}
    assert (made / "model.safetensors").read_bytes() == b"weights"
    with pytest.raises(DSparkError, match="no drafter at"):
        shortened(tmp_path / "nothing", 2, tmp_path / "run")


def test_the_figure_has_a_caption_on_every_axis(tmp_path: Path) -> None:
    rows = figures(1, (1.0, 1.1, 0.9)) + figures(4, (1.0,))
    canvas = draw(as_metrics(rows, (1, 4)), "a title")
    assert all(axes.get_xlabel() == "users at once" for axes in canvas.axes)
    assert all("throughput" in axes.get_ylabel() for axes in canvas.axes)
    labels = [text.get_text() for text in canvas.axes[0].get_legend().get_texts()]
    assert labels == ["fixed gamma 1", "fixed gamma 2", "scheduled", "plain decoding"]
    path = tmp_path / "figure.png"
    canvas.savefig(path)
    assert path.stat().st_size > 5_000


def test_plans_that_cannot_be_measured_are_refused() -> None:
    for wrong in ({"concurrency": (0,)}, {"trials": 0}, {"arms": ("plain", "fixed-1")}):
        with pytest.raises(DSparkError):
            replace(PLAN, **wrong)  # type: ignore[arg-type]


def test_the_command_names_a_wrong_gamma() -> None:
    assert _gammas("", 5, False) == (1, 2, 3, 4, 5)
    assert _gammas("3,1", 5, False) == (3, 1)
    for wrong in ("2,9", "0", "1,1"):
        with pytest.raises(DSparkError, match=f"--gammas {wrong}: .* trained for 1 to 5"):
            _gammas(wrong, 5, False)
