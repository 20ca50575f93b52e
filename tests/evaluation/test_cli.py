"""`dspark eval` on the tiny pair, from the command line to the result file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sglang_dspark.cli.evaluate import Subject, engine_like_server, evaluate, read_prompt_files
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import DecodeSettings
from sglang_dspark.serving.config import load_config
from tests.evaluation.conftest import GAMMA, Pair


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(evaluate)
    return app


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"{d}{i}", "domain": d, "prompt": f"w{i + 1} w9"} for d in "ab" for i in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _arguments(pair: Pair, prompts: str, *more: str) -> list[str]:
    models = ["--target", str(pair.target_dir), "--drafter", str(pair.drafter_dir)]
    return [*models, "--prompts", prompts, "--max-new-tokens", "12", *more]


def test_measures_and_writes_the_results(
    app: typer.Typer, pair: Pair, prompt_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results" / "eval.json"
    arguments = _arguments(pair, str(prompt_file), "--limit", "3", "--json", str(out))
    outcome = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert "reference engine" in outcome.output
    record = json.loads(out.read_text())
    assert set(record) == {"name", "command", "commit", "device", "date", "metrics"}
    measured = record["metrics"]
    assert measured["settings"]["gamma"] == GAMMA
    engine = measured["engine"]
    assert set(engine["tau"]) == {"a", "b", "overall", "macro"}
    assert engine["by_domain"]["overall"]["prompts"] == 6
    assert 1 < engine["tau"]["overall"] < 1 + GAMMA
    assert len(engine["by_domain"]["a"]["cumulative"]) == GAMMA
    assert 0 <= engine["ece"]["overall"] <= 1
    assert list(out.parent.iterdir()) == [out], "no temporary file is left"


def test_sampled_and_smaller_gamma(
    app: typer.Typer, pair: Pair, prompt_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "eval.json"
    arguments = _arguments(pair, str(prompt_file), "--temperature", "1", "--top-p", "0.9")
    arguments += ["--gamma", "2", "--json", str(out)]
    outcome = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert "k = 2" in outcome.output
    assert "k = 3" not in outcome.output
    measured = json.loads(out.read_text())["metrics"]
    assert measured["settings"]["temperature"] == 1
    assert len(measured["engine"]["by_domain"]["overall"]["cumulative"]) == 2


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--gamma", "9"], "--gamma 9 exceeds"),
        (["--top-p", "2"], "top_p must lie"),
        (["--drafter", "nowhere"], "no drafter at nowhere"),
        (["--target", "nowhere"], "no model at nowhere"),
        (["--server", "http://127.0.0.1:31499", "--serve"], "exclude each other"),
        (["--server", "http://me:secret@127.0.0.1:31499"], "holds a user or password"),
        (["--server", "http://127.0.0.1:31499"], "lost the server"),
    ],
)
def test_bad_input_is_one_line(
    app: typer.Typer, pair: Pair, prompt_file: Path, more: list[str], complaint: str
) -> None:
    with pytest.raises(DSparkError, match=complaint):
        CliRunner().invoke(app, _arguments(pair, str(prompt_file), *more), catch_exceptions=False)


def test_its_own_server_steps_as_the_engine_does(pair: Pair, tmp_path: Path) -> None:
    """Else tau would be the scheduler's, or at T > 0 that of another accept rule."""
    subject = Subject(pair.target_dir, pair.drafter_dir, [], [], frozenset())
    spec = engine_like_server(subject, 31499, tmp_path)
    file = spec.arguments[spec.arguments.index("--dspark-config") + 1]
    assert load_config(Path(file)).config.verify.rule == DecodeSettings().rule == "token"
    assert spec.environment["SGLANG_RAGGED_VERIFY_MODE"] == "static"


def test_prompt_arguments(prompt_file: Path) -> None:
    assert {p.domain for p in read_prompt_files([str(prompt_file)], None)} == {"a", "b"}
    assert {p.domain for p in read_prompt_files([f"math={prompt_file}"], None)} == {"math"}
    assert len(read_prompt_files(None, None)) == 36
