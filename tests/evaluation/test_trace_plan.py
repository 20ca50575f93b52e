"""`dspark eval traces`: what it makes, keeps and misses; the published plan is held to what is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.trace_plan import load_plan
from sglang_dspark.evaluation.traces import read_trace
from sglang_dspark.training.config import load_config
from tests.evaluation.conftest import GAMMA, Pair

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "configs" / "eval" / "traces.yaml"


@pytest.fixture
def plan(pair: Pair, tmp_path: Path) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"m{i}", "domain": "math", "prompt": f"w{i + 1} w9"} for i in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drafters = {
        "tiny": {"path": str(pair.drafter_dir)},
        "tiny-1": {"path": str(pair.drafter_dir), "gamma": 1},
        "absent": {"path": str(tmp_path / "absent"), "made_by": "dspark train --config x.yaml"},
    }
    greedy = {
        "prompts": [f"math={prompts}"],
        "max_new_tokens": 20,
        "batch": 2,
        "answers": {"file": "engine.json", "by": "tiny"},
        "traces": {"a": "tiny", "b": "tiny-1", "c": "absent"},
    }
    sampled = {**greedy, "temperature": 1.0, "answers": {"file": "hot.json", "by": "tiny"}}
    folder = str(tmp_path / "traces")
    sets = {"greedy": greedy, "sampled": sampled}
    return {"folder": folder, "target": str(pair.target_dir), "drafters": drafters, "sets": sets}


def make(plan: dict[str, Any], folder: Path, *more: str) -> tuple[int, str]:
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    arguments = ["eval", "traces", "--plan", str(folder / "plan.yaml"), *more]
    outcome = CliRunner().invoke(app, arguments)
    assert not isinstance(outcome.exception, DSparkError), outcome.exception
    return outcome.exit_code, outcome.output


def test_what_can_be_made_is_made_and_the_rest_is_named(
    plan: dict[str, Any], tmp_path: Path
) -> None:
    status, said = make(plan, tmp_path)
    assert status == 1
    assert said.count("make it by: dspark train --config x.yaml") == 1
    folder = tmp_path / "traces"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.json")}
    kinds = ("greedy", "sampled")
    assert files == {"engine.json", "hot.json"} | {f"{k}/{n}.json" for k in kinds for n in "ab"}
    engine, again = read_trace(folder / "engine.json"), read_trace(folder / "greedy" / "a.json")
    assert [g.tokens for g in again.generations] == [g.tokens for g in engine.generations]
    assert [len(g.steps) for g in again.generations] == [len(g.steps) for g in engine.generations]
    assert (again.gamma, read_trace(folder / "greedy" / "b.json").gamma) == (GAMMA, 1)
    assert read_trace(folder / "sampled" / "a.json").temperature == 1.0


def test_what_is_there_is_kept_unless_it_would_be_another(
    plan: dict[str, Any], tmp_path: Path
) -> None:
    del plan["drafters"]["absent"], plan["sets"]["greedy"]["traces"]["c"], plan["sets"]["sampled"]
    assert make(plan, tmp_path)[0] == 0
    status, said = make(plan, tmp_path, "--only", "greedy")
    assert (status, said) == (0, "")
    (tmp_path / "traces" / "greedy" / "b.json").write_text("cut off")
    assert make(plan, tmp_path)[1].count("written to") == 1
    plan["drafters"]["tiny-1"]["gamma"] = 2
    assert make(plan, tmp_path)[1].count("written to") == 1
    assert read_trace(tmp_path / "traces" / "greedy" / "b.json").gamma == 2
    plan["sets"]["greedy"]["limit"] = 3  # other prompts: all anew, the answers too
    assert make(plan, tmp_path)[1].count("written to") == 3


def test_absent_prompts_are_named(plan: dict[str, Any], tmp_path: Path) -> None:
    plan["sets"]["greedy"]["prompts"] = ["math=nowhere.jsonl"]
    status, said = make(plan, tmp_path, "--only", "greedy")
    assert (status, said) == (1, "not here: prompts of greedy: nowhere.jsonl\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sets": {}}, "sets: "),
        ({"drafters": {}}, "names no drafter of the file"),
        ({"folders": "x"}, "folders: "),
    ],
)
def test_a_wrong_plan_is_one_line(
    plan: dict[str, Any], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({**plan, **change}))
    with pytest.raises(DSparkError, match=said) as raised:
        load_plan(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(DSparkError, match="cannot read the plan"):
        load_plan(tmp_path / "none.yaml")
    path.write_text("[: not yaml")
    with pytest.raises(DSparkError, match="is no plan of traces"):
        load_plan(path)
    with pytest.raises(DSparkError, match="no set 'x'"):
        load_plan(PUBLISHED).chosen("x")


def test_every_published_drafter_is_shipped_or_has_instructions() -> None:
    for name, drafter in load_plan(PUBLISHED).drafters.items():
        if drafter.path.parts[0] == "drafters":
            assert (ROOT / drafter.path / "config.json").is_file(), name
        elif trained := re.fullmatch(
            r"dspark train drafter --config (\S+)((?: --set \S+)*)", drafter.made_by
        ):
            changes = trained[2].split(" --set ")[1:]
            assert load_config(ROOT / trained[1], changes).run_dir / "drafter" == drafter.path
        else:
            archived = re.fullmatch(
                r"mkdir -p (\S+) && git archive [0-9a-f]+ (\S+) \| tar -x -C \1", drafter.made_by
            )
            assert archived, name
            assert Path(archived[1]) / archived[2] == drafter.path


def test_every_published_trace_is_in_the_plan() -> None:
    """The commands of the result files name traces; each is made by the plan under that name."""
    plan = load_plan(PUBLISHED)
    made = {str(plan.folder / each.answers.file) for each in plan.sets.values()}
    made |= {
        str(plan.folder / name / f"{label}.json")
        for name, each in plan.sets.items()
        for label in each.traces
    }
    asked = {
        trace
        for path in (ROOT / "results").glob("*.json")
        for trace in re.findall(r"runs/traces/\S+\.json", json.loads(path.read_text())["command"])
    }
    of_the_third_stage = {"runs/traces/third-stage.json", "runs/traces/shipped.json"}
    assert asked - made == of_the_third_stage  # a stage that was thrown away, and its rival
