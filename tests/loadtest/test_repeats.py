"""Whole prompts that a cell sends twice: counted by content, said, refused or allowed as asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dspark.cli.sweep import sweep
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.bodies import Prompt
from sglang_dspark.loadtest.client.cell import CellPlan, CellPrompt
from sglang_dspark.loadtest.client.mixes import cell_prompts, load_mix
from sglang_dspark.loadtest.client.schedule import Arrival, Schedule
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.loadtest.sweep.plan import (
    Supply,
    all_loads,
    cell_plan,
    interleaved,
    require_unrepeated,
)
from sglang_dspark.loadtest.sweep.run_dir import Pilot
from sglang_dspark.loadtest.sweep.summary import summarise
from tests.loadtest.test_summary import CONFIG, cell
from tests.loadtest.test_sweep import ended, folder, start, write_sweep  # noqa: F401 - a fixture

PILOT = Pilot(arm="plain", tokens_per_s={1: 64.0, 64: 640.0}, answer_tokens={1: 64.0, 64: 64.0})


def plan_of(contents: list[Prompt], order: list[int]) -> CellPlan:
    prompts = tuple(CellPrompt(str(n), "x", content) for n, content in enumerate(contents))
    arrivals = tuple(Arrival(i, None, prompt, 4) for i, prompt in enumerate(order))
    return CellPlan("completions", prompts, Schedule(arrivals, 1))


def test_repeats_are_counted_by_content() -> None:
    assert plan_of(["a", "b", "c"], [2, 0, 1]).repeats == 0
    assert plan_of(["a", "b", "c"], [2, 0, 2, 2]).repeats == 2
    assert plan_of(["a", "b", "a"], [0, 1, 2]).repeats == 1  # one text under two names
    assert plan_of(["a", "b", "a"], [0, 1]).repeats == 0  # what is not sent does not count
    assert plan_of([[1, 2], [1, 2, 3], [1, 2]], [0, 1, 2]).repeats == 1
    opened = [{"role": "user", "content": "hi"}]
    grown = [*opened, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    assert plan_of([opened, grown], [0, 1]).repeats == 0  # a shared prefix is no whole prompt
    assert plan_of([opened, list(opened)], [0, 1]).repeats == 1


def test_the_shipped_mixes_repeat_only_when_they_are_used_up() -> None:
    for name, api in (("math,code,chat", "completions"), ("multi-turn", "chat")):
        mix = load_mix(name)
        prompts = cell_prompts(mix, api)  # type: ignore[arg-type]  # of the loop
        supply = Supply(mix, prompts)
        config = SweepConfig(arms=["plain"], concurrency=[1, 64], api=api, seconds=10, mix=name)
        low, high = all_loads(config, PILOT)
        few = cell_plan(config, interleaved(config, [low], [0])[0], supply)
        assert (len(few.schedule.arrivals), few.repeats) == (10, 0)
        many = cell_plan(config, interleaved(config, [high], [0])[0], supply)
        assert len(many.schedule.arrivals) == 192
        assert many.repeats == max(0, 192 - len(prompts))


def test_a_cell_with_repeats_is_refused_where_that_is_asked() -> None:
    config = SweepConfig(arms=["plain"], concurrency=[1, 64], mix="multi-turn", repeats="refuse")
    mix = load_mix("multi-turn")
    supply = Supply(mix, cell_prompts(mix, "chat"))
    loads = all_loads(config, PILOT)
    require_unrepeated(config, interleaved(config, loads[:1], [0, 1]), supply)
    with pytest.raises(DSparkError, match=r"cell plain-closed-64-0: .* requests repeat") as error:
        require_unrepeated(config, interleaved(config, loads, [0, 1]), supply)
    assert "write `repeats: note`" in str(error.value)
    for allowed in ("note", "wanted"):
        other = config.model_copy(update={"repeats": allowed})
        require_unrepeated(other, interleaved(other, loads, [0, 1]), supply)


def test_the_summary_says_it_once_a_load() -> None:
    cells = [
        cell("plain", 1, 0, 40.0),
        cell("plain", 4, 0, 20.0, repeats=2),
        cell("dspark", 4, 1, 30.0, repeats=3),
        cell("plain", 2, 0, 30.0, loop="open", level=1.5, repeats=1),
    ]
    notes = [n for n in summarise(CONFIG, cells, 4).notes if "repeat a whole prompt" in n]
    assert [note.partition(" requests of a cell")[0] for note in notes] == [
        "4 users: 3 of 9",
        "1.5 requests/s: 1 of 9",
    ]
    wanted = CONFIG.model_copy(update={"repeats": "wanted"})
    assert summarise(wanted, cells, 4).notes == []


def test_a_sweep_says_that_prompts_repeat(folder: Path) -> None:  # noqa: F811 - the fixture
    (folder / "few.jsonl").write_text(
        "".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in (1, 2))
    )
    write_sweep(folder, mix=str(folder / "few.jsonl"), arms=["slow"], compare=None, trials=1)
    status, out = ended(start(folder))
    assert status == 0, out
    (kept,) = run_dir.read_cells(folder / "run")
    assert kept.repeats == kept.requests - 2 > 0
    assert f"2 users: {kept.repeats} of {kept.requests} requests of a cell repeat" in out
    assert f"{kept.repeats} of {kept.requests} prompts sent before" in out


def test_a_sweep_that_refuses_them_stops_in_one_line(
    folder: Path,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])  # where the stand-in's module is found
    (folder / "one.jsonl").write_text('{"prompt": "p"}\n')
    mix = str(folder / "one.jsonl")
    write_sweep(folder, mix=mix, arms=["slow"], compare=None, repeats="refuse")
    with pytest.raises(DSparkError, match=r"cell slow-closed-2-0: .* repeat a whole prompt"):
        sweep(folder / "sweep.yaml", out=folder / "run")
    assert run_dir.read_cells(folder / "run") == []
