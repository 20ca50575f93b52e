"""The drafter commands from the command line to the page, on the tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation import figures
from sglang_dspark.evaluation.analyses import registry
from sglang_dspark.evaluation.prompts import calibration_prompts, demo_prompts, evaluation_prompts
from sglang_dspark.schedule.sts_file import read_sts
from tests.evaluation.conftest import GAMMA, Pair
from tests.evaluation.trace_world import training_run


def run(*arguments: str) -> str:
    outcome = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"id": f"{d}{i}", "domain": d, "prompt": f"w{i + 1} w{ord(d[0])}"}
        for d in ("math", "chat")
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def traces(pair: Pair, prompt_file: Path) -> dict[str, Path]:
    """Recorded once for all tests: greedy and sampled."""
    found = {}
    for name, temperature in (("greedy", "0"), ("sampled", "1")):
        found[name] = prompt_file.parent / f"{name}.json"
        run(
            "eval", "record", "--target", str(pair.target_dir), "--drafter",
            f"tiny={pair.drafter_dir}", "--prompts", str(prompt_file), "--max-new-tokens", "40",
            "--temperature", temperature, "--out", str(found[name]),
        )  # fmt: skip
    return found


def test_from_traces_to_the_page(
    pair: Pair, traces: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    greedy, sampled = f"dspark={traces['greedy']}", f"dspark={traces['sampled']}"
    out = run("calibrate", "--drafter", str(pair.drafter_dir), "--out", "sts.json",
              "--target", str(pair.target_dir),
              "--trace", str(traces["greedy"]), "--trace", str(traces["sampled"]))  # fmt: skip
    assert "held-out prompts" in out
    sts = read_sts(Path("sts.json"), gamma=GAMMA)
    assert set(sts.tables) == {"greedy", "sampled"}
    assert len(sts.fit_prompts) == 6
    assert "overall" in sts.tables["sampled"].held_out

    assert "dspark/again" in run("eval", "tau", "--drafter", greedy, "--drafter",
                                 f"again={traces['greedy']}")  # fmt: skip
    shown = run("eval", "reliability", "--drafter", sampled, "--sts", "sts.json")
    assert "6 held-out prompts" in shown
    page = run("report", "--drafters")
    results = tmp_path / "results"
    assert "drafters.html" in page
    record = json.loads((results / "drafters_reliability_sampled.json").read_text())
    assert set(record) == {"name", "command", "commit", "device", "date", "metrics"}
    assert record["metrics"]["groups"]["overall"]["after"]["ece"]["value"] >= 0
    summary = json.loads((results / "drafters.json").read_text())["metrics"]
    assert set(summary["tau"]["dspark"]) == {"math", "chat", "macro"}
    assert {"auc_sampled", "ece_after_sampled"} <= set(summary)
    assert (results / "figures" / "drafters_tau.svg").is_file()
    assert "<img" in (results / "drafters.html").read_text()


@pytest.mark.parametrize("name", ["positions", "depth", "length", "thresholds", "roc"])
def test_the_other_analyses(name: str, traces: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    said = ["--note", "after 7 steps"] if name in ("depth", "length") else []
    run("eval", name, "--drafter", f"dspark={traces['greedy']}", "--json", str(out), *said)
    record = json.loads(out.read_text())
    assert record["name"] == "found"
    assert record["metrics"]["analysis"] == name
    assert ("after 7 steps" in figures.caption(registry.read(record["metrics"]))) == bool(said)
    assert (tmp_path / "figures" / "found.png").stat().st_size > 5000


def test_learning_curves_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 1, and yet no file of sampled answers: they are teacher forced."""
    monkeypatch.chdir(tmp_path)
    rows = [{"step": at, "held_out_tau": 1 + at / 100, "held_out_loss": 1.6} for at in (2, 4)]
    run("eval", "curves", "--run", f"a={training_run(tmp_path / 'a', rows)}")
    record = json.loads((tmp_path / "results" / "drafters_curves.json").read_text())
    assert record["metrics"]["runs"]["a"]["points"] == rows
    assert (tmp_path / "results" / "figures" / "drafters_curves.svg").is_file()


def test_limits_of_redrafted_answers(
    pair: Pair, prompt_file: Path, traces: dict[str, Path], tmp_path: Path
) -> None:
    """A drafter on another one's answers, with and without its transition, then both compared."""
    place = f"tiny={pair.drafter_dir}"
    shared = ("--target", str(pair.target_dir), "--prompts", str(prompt_file), "--answers",
              str(traces["greedy"]), "--max-new-tokens", "40")  # fmt: skip
    run("eval", "record", *shared, "--drafter", place, "--drafter", f"b{place}", "--out",
        str(tmp_path / "folder"))  # fmt: skip
    run("eval", "record", *shared, "--drafter", place, "--no-transition", "--out",
        str(tmp_path / "bare.json"))  # fmt: skip
    assert {each.name for each in (tmp_path / "folder").iterdir()} == {"tiny.json", "btiny.json"}
    (tmp_path / "vocabulary.json").write_text("[1, 2, 3]")
    out = tmp_path / "found.json"
    run("eval", "limits", "--drafter", f"full={tmp_path / 'folder' / 'tiny.json'}", "--drafter",
        f"bare={tmp_path / 'bare.json'}", "--vocabulary", str(tmp_path / "vocabulary.json"),
        "--json", str(out))  # fmt: skip
    pairs = json.loads(out.read_text())["metrics"]["same_anchors"]["full/bare"]["cumulative"]
    assert pairs["ours"][-1]["macro"]["value"] > pairs["theirs"][-1]["macro"]["value"]


def test_calibrate_decodes_by_itself_and_writes_beside_the_drafter(
    pair: Pair, prompt_file: Path
) -> None:
    out = run(
        "calibrate", "--target", str(pair.target_dir), "--drafter", str(pair.drafter_dir),
        "--prompts", str(prompt_file), "--temperature", "1", "--max-new-tokens", "40",
    )  # fmt: skip
    path = pair.drafter_dir / "sts.json"
    try:
        assert "sampled: 6 held-out prompts" in out
        assert read_sts(path, gamma=GAMMA).tables["sampled"].prompts == 6
    finally:
        path.unlink()


def test_calibrate_judges_on_prompts_of_their_own(
    pair: Pair, prompt_file: Path, tmp_path: Path
) -> None:
    """Prompts used for the fit are skipped in the evaluation; each regime has a table."""
    rows = prompt_file.read_text().splitlines()
    (tmp_path / "fit.jsonl").write_text("\n".join(rows[:8]))
    (tmp_path / "held.jsonl").write_text("\n".join(rows[6:]))
    out = run(
        "calibrate", "--target", str(pair.target_dir), "--drafter", str(pair.drafter_dir),
        "--prompts", str(tmp_path / "fit.jsonl"), "--held-out", str(tmp_path / "held.jsonl"),
        "--max-new-tokens", "24", "--batch", "3", "--half-products",
        "--out", str(tmp_path / "sts.json"),
    )  # fmt: skip
    assert f"greedy: {len(rows) - 8} held-out prompts" in out
    assert "followed" in out
    sts = read_sts(tmp_path / "sts.json", gamma=GAMMA)
    assert {table.prompts for table in sts.tables.values()} == {8}
    held = sts.tables["sampled"].held_out["overall"]
    assert {"before", "after", "shifted", "followed"} <= set(held)
    assert held["followed"]["ece_debiased"] <= held["followed"]["ece"]["value"]


def test_overhead_of_the_tiny_pair(pair: Pair, prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafters_overhead.json"
    run(
        "eval", "overhead", "--target", str(pair.target_dir), "--prompts", str(prompt_file),
        "--drafter", f"dspark={pair.drafter_dir}", "--batch", "2", "--context", "8",
        "--repeats", "30", "--json", str(out),
    )  # fmt: skip
    found = json.loads(out.read_text())["metrics"]["drafters"][0]
    assert found["gamma"] == GAMMA
    assert 0 < found["engine"]["wall"]["share"] < 1


DECODING = (  # options that a trace has no use for
    "--prompts x.jsonl",
    "--held-out x.jsonl",
    "--temperature 1",
    "--limit 3",
    "--max-new-tokens 96",
    "--batch 32",
    "--seed 0",
    "--half-products",
)


def _bad(traces: dict[str, Path], pair: Pair) -> list[tuple[list[str], str]]:
    greedy, sampled = f"a={traces['greedy']}", f"a={traces['sampled']}"
    calibrate = ["calibrate", "--drafter", str(pair.drafter_dir)]
    recorded = [*calibrate, "--trace", str(traces["greedy"])]
    return [
        (["eval", "tau", "--drafter", "a=nowhere"], "no drafter at nowhere"),
        (["eval", "tau", "--drafter", greedy, "--drafter", greedy], "labels must differ"),
        (["eval", "trainings", "--drafter", greedy, "--drafter", greedy], "3 or more, found a 2"),
        (["eval", "tau", "--drafter", greedy, "--drafter", f"b{sampled[1:]}"], "other sampling"),
        (["eval", "reliability", "--drafter", greedy, "--sts", "none.json"], "cannot read"),
        (
            ["eval", "record", "--out", "x", "--drafter", greedy, "--answers", greedy[2:]],
            "name a drafter's directory",
        ),
        (["eval", "record", "--out", "x", "--drafter", greedy, "--no-transition"], "needs --answ"),
        (["eval", "limits", "--drafter", greedy, "--vocabulary", "no.json"], "cannot read the voc"),
        (["eval", "curves", "--run", "here"], "takes LABEL=DIR"),
        ([*calibrate, *["--trace", str(traces["greedy"])] * 2], "one table a regime"),
        ([*calibrate, "--held-out-trace", "x"], "--held-out-trace judges a --trace: give both"),
        *(([*recorded, *each.split()], f"{each.split()[0]} says how to dec") for each in DECODING),
        (
            [*recorded, "--target", str(pair.drafter_dir)],
            f"greedy.json is a trace of another target than --target {pair.drafter_dir}: record",
        ),
        (["eval", "--json", "x", "tau", "--drafter", greedy], "write --json behind the command"),
        (["eval", "--limit", "3", "tau", "--drafter", greedy], "write --limit behind the command"),
        (["report"], "name what to report"),
        (["report", "--drafters", "--results", "nowhere"], "no drafters_"),
    ]


def test_bad_input_is_one_line(
    traces: dict[str, Path], pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, complaint in _bad(traces, pair):
        with pytest.raises(DSparkError, match=complaint) as caught:
            CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_calibrate_judges_on_traces_of_the_same_target(
    traces: dict[str, Path], pair: Pair, tmp_path: Path
) -> None:
    raw = json.loads(traces["greedy"].read_text())
    (tmp_path / "other.json").write_text(json.dumps(raw | {"target_sha256": "0" * 64}))
    arguments = ["calibrate", "--drafter", str(pair.drafter_dir), "--trace", str(traces["greedy"])]
    arguments += ["--held-out-trace", str(tmp_path / "other.json")]
    with pytest.raises(DSparkError, match=r"other\.json is a trace of another target"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_table_of_another_drafter_is_refused(
    traces: dict[str, Path], pair: Pair, tmp_path: Path
) -> None:
    path = tmp_path / "sts.json"
    run("calibrate", "--drafter", str(pair.drafter_dir), "--trace", str(traces["greedy"]),
        "--out", str(path))  # fmt: skip
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "drafter_sha256": "0" * 64}))
    arguments = ["eval", "reliability", "--drafter", f"a={traces['greedy']}", "--sts", str(path)]
    with pytest.raises(DSparkError, match="fitted to another drafter"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_own_prompts_are_enough_and_new() -> None:
    prompts = evaluation_prompts()
    for domain in ("math", "code", "chat"):
        assert sum(prompt.domain == domain for prompt in prompts) >= 60
        assert sum(prompt.domain == domain for prompt in calibration_prompts()) >= 60
    prompts = [*prompts, *calibration_prompts()]
    texts = [prompt.turns for prompt in prompts]
    assert len(set(texts)) == len(texts)
    assert not set(texts) & {prompt.turns for prompt in demo_prompts()}
