"""README.md: its numbers are those of the results, its files and commands exist."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_dspark.common.files import load_json
from sglang_dspark.errors import DSparkError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "tools" / "docs" / "sweep.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_table_is_the_sweeps(tool: ModuleType, readme: str) -> None:
    table = tool.section(load_json(tool.RESULTS))
    assert tool.rewritten(readme, table) == readme, "run `python tools/docs/sweep.py`"


def test_the_page_of_results_is_the_sweeps(tool: ModuleType) -> None:
    page = tool.LOAD.read_text()
    document = load_json(tool.RESULTS)
    assert tool.rewritten(page, tool.load_section(document)) == page, "run `make figures`"
    document["metrics"]["by_rate"][0]["dspark"]["speed_p50"]["mid"] += 1  # of which it says nothing
    assert tool.rewritten(page, tool.load_section(document)) == page
    document["metrics"]["slas"][0]["arms"][0]["tokens_per_s"] += 1
    assert tool.rewritten(page, tool.load_section(document)) != page


def test_the_deeper_target_is_its_own_sweeps(tool: ModuleType) -> None:
    page, document = tool.TARGETS.read_text(), load_json(tool.DEEPER)
    assert tool.rewritten(page, tool.deeper_section(document), tool.DEEPER_MARKS) == page
    document["metrics"]["by_concurrency"][0]["dspark"]["tau"] += 1
    assert tool.rewritten(page, tool.deeper_section(document), tool.DEEPER_MARKS) != page


def test_drafters_without_a_head_are_their_own_sweeps(tool: ModuleType) -> None:
    page, document = tool.SCHEDULER.read_text(), load_json(tool.HEADLESS)
    assert tool.rewritten(page, tool.headless_section(document), tool.HEADLESS_MARKS) == page
    row = next(
        each
        for each in document["metrics"]["ratios"]
        if (each["over"], each["under"]) == ("eagle3-scheduled", "plain")
        and (each["what"], each["level"]) == ("tokens_per_s", 16)
    )
    row["low"] -= 0.1
    assert tool.rewritten(page, tool.headless_section(document), tool.HEADLESS_MARKS) != page


def test_the_sampled_sweep_is_its_own_and_sampled(tool: ModuleType) -> None:
    page, document = tool.LOAD.read_text(), load_json(tool.SAMPLED)
    assert "cpu-demo-sampled" in document["command"]
    assert tool.rewritten(page, tool.sampled_section(document), tool.SAMPLED_MARKS) == page
    document["metrics"]["slas"][0]["arms"][0]["tokens_per_s"] += 1
    assert tool.rewritten(page, tool.sampled_section(document), tool.SAMPLED_MARKS) != page


def test_equal_training_is_its_own_sweeps_and_the_cards(tool: ModuleType) -> None:
    page, document = tool.LOAD.read_text(), load_json(tool.EQUAL)
    section = tool.equal_section(document)
    assert tool.rewritten(page, section, tool.EQUAL_MARKS) == page
    stages = load_json(ROOT / "drafters" / "smollm2-135m-dspark" / "training.json")["stages"]
    steps = [stage["config"]["schedule"]["steps"] for stage in stages]
    assert f"{sum(steps[:3]):,} steps" in section
    assert f"{sum(steps):,} steps" in " ".join(section.split())
    row = next(
        each
        for each in document["metrics"]["ratios"]
        if (each["over"], each["under"]) == (tool.EQUAL_ARM, "mtp1")
        and (each["what"], each["level"]) == ("tokens_per_s", 4)
    )
    row["low"] -= 0.1
    assert tool.rewritten(page, tool.equal_section(document), tool.EQUAL_MARKS) != page


def test_the_golden_sweep_is_its_own_and_says_what_it_is(tool: ModuleType) -> None:
    page, document = tool.TARGETS.read_text(), load_json(tool.GOLDEN)
    section = tool.golden_section(document)
    assert tool.rewritten(page, section, tool.GOLDEN_MARKS) == page
    tables = [line for line in section.split("\n") if line.startswith(("| users", "| load"))]
    assert len(tables) == 3
    assert all("simulated acceptance" in line for line in tables)
    document["metrics"]["by_concurrency"][0]["dspark"]["tau"] += 1
    assert tool.rewritten(page, tool.golden_section(document), tool.GOLDEN_MARKS) != page


def test_the_burst_is_its_own_sweeps(tool: ModuleType) -> None:
    page, document = tool.STABILITY.read_text(), load_json(tool.BURST)
    assert tool.rewritten(page, tool.burst_section(document), tool.BURST_MARKS) == page
    document["metrics"]["bursts"][0]["arms"][0]["phases"][1]["ttft_p99"] += 1
    assert tool.rewritten(page, tool.burst_section(document), tool.BURST_MARKS) != page


def test_a_changed_figure_changes_the_table(tool: ModuleType, readme: str) -> None:
    document = load_json(tool.RESULTS)
    document["metrics"]["by_concurrency"][2]["dspark"]["tokens_per_s"]["mid"] += 1
    assert tool.rewritten(readme, tool.section(document)) != readme
    document = load_json(tool.RESULTS)
    document["metrics"]["matched_speed_ratio_vs_mtp1"]["levels"][1]["mid"] -= 0.01
    assert tool.rewritten(readme, tool.section(document)) != readme


@pytest.mark.parametrize(
    ("low", "high", "said"), [(1.01, 1.5, "faster"), (0.9, 1.1, "level"), (0.7, 0.99, "slower")]
)
def test_a_verdict_is_its_interval(tool: ModuleType, low: float, high: float, said: str) -> None:
    document = load_json(tool.RESULTS)
    for each in document["metrics"]["ratios"]:
        if each["what"] == "tokens_per_s":
            each["low"], each["high"] = low, high
    table = tool.section(document)
    assert table.count(f"{said} {'with' if said == 'level' else 'than'} both") == len(tool.SHOWN)


def test_an_interval_below_one_is_stated(tool: ModuleType) -> None:
    document = load_json(tool.RESULTS)
    document["metrics"]["matched_speed_ratio_vs_mtp1"]["levels"][1]["low"] = 0.99
    assert "not every interval is above" in " ".join(tool.section(document).split())


def test_unequal_training_is_stated(tool: ModuleType, tmp_path: Path) -> None:
    """A page may call two drafters alike only when their cards say so."""

    def card(kind: str, *stages: dict[str, Any]) -> None:
        folder = tmp_path / f"smollm2-135m-{kind}"
        folder.mkdir(exist_ok=True)
        (folder / "training.json").write_text(json.dumps({"stages": stages}))

    def stage(steps: int, answers: int, gamma: int = 5, **more: Any) -> dict[str, Any]:
        schedule = {"steps": steps, "sequences_per_step": 6, "anchors_per_sequence": 24}
        config = {"schedule": schedule, "drafter": {"gamma": gamma}}
        return {"config": config, "sequences": answers, **more}

    card("mtp1", stage(2000, 6000))
    card("dspark", stage(8000, 6000), stage(8000, 7000, sequences_at_end=9000))
    said = tool.trained_alike(tmp_path)
    facts = (
        "MTP-1's for 2,000 steps, 1.4 M draft tokens and 6,000 answers, DSpark's for 16,000 "
        "steps, 11.5 M and 9,000;"
    )
    assert f"not trained alike**: {facts}" in said
    card("dspark", stage(2000, 6000, sequences_at_end=6001))
    assert "not trained alike" in tool.trained_alike(tmp_path), "as many steps, other answers"
    card("dspark", stage(1000, 8000), stage(1000, 6000))
    assert "not trained alike" in tool.trained_alike(tmp_path), "an earlier stage had more"
    card("dspark", stage(1000, 6000), stage(1000, 6000, gamma=4))
    assert "not trained alike" in tool.trained_alike(tmp_path), "fewer draft tokens"
    card("dspark", stage(1000, 6000), stage(1000, 6000))
    assert "were trained alike" in tool.trained_alike(tmp_path)


def test_a_readme_without_its_marks_is_refused(tool: ModuleType, readme: str) -> None:
    with pytest.raises(DSparkError, match="must have"):
        tool.rewritten(readme.replace(tool.END, ""), "")


def test_it_holds_no_other_figure(tool: ModuleType, readme: str) -> None:
    """A ratio or a speed outside the table would be of no known run."""
    outside = readme.split(tool.BEGIN)[0] + readme.split(tool.END)[1]
    found = re.findall(r"\d[\d.,]*(?:x\b|%| times\b| tokens/s)", outside)
    assert found == ["95%"]


def test_every_file_it_names_is_there(readme: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    assert len(links) > 10
    named = [*(link.partition("#")[0] for link in links), *re.findall(r"configs/\S+\.yaml", readme)]
    assert [each for each in named if not (ROOT / each).exists()] == []
