"""Curves for TensorBoard: what the journal has, one line of history over resumed runs."""

import json
from importlib import util

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.training.config import RunConfig, load_config
from sglang_dspark.training.curves import Curves
from sglang_dspark.training.optimiser import learning_rate
from tests.training.test_run import _in


def curves(folder):
    """{tag: [(step, value)]} of the event files in a folder."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def train(cfg, tmp_path, steps):
    """`dspark train drafter` up to `steps`; the journal's rows."""
    schedule = cfg.schedule.model_copy(update={"steps": steps})
    file = tmp_path / "c.yaml"
    file.write_text(cfg.model_copy(update={"schedule": schedule}).model_dump_json())
    done = CliRunner().invoke(app, ["train", "drafter", "--config", str(file)])
    assert done.exit_code == 0, done.output
    text = (cfg.run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()], done.output


def test_a_resumed_run_goes_on_in_the_same_curves(config, tmp_path):
    cfg = _in(config, tmp_path / "run", log_every=5, validate_every=10, checkpoint_every=10)
    cfg = cfg.model_copy(update={"tensorboard": True})
    train(cfg, tmp_path, 10)
    with Curves(cfg.curves, 10) as lost:  # reported by a run that was killed before its checkpoint
        lost.write(15, {"loss": 99.0})
    rows, output = train(cfg, tmp_path, 20)
    assert "going on from step 10" in output
    found = curves(tmp_path / "run" / "tensorboard")
    names = {"loss", "loss_ce", "loss_tv", "loss_confidence", "tau", "learning_rate"}
    assert {f"train/{name}" for name in (*names, "tokens_per_s", "steps_per_s")} < found.keys()
    assert {f"held_out/{name}" for name in ("loss", "tau", "ece")} < found.keys()
    for name in ("loss", "tau", "held_out_tau"):
        tag = name.replace("held_out_", "held_out/") if "held" in name else f"train/{name}"
        kept = [(row["step"], pytest.approx(row[name], rel=1e-5)) for row in rows if name in row]
        assert found[tag] == kept
    assert [step for step, _ in found["train/loss"]] == [5, 10, 15, 20]
    assert [step for step, _ in found["held_out/tau"]] == [10, 20]


def test_reports_are_of_the_objective_and_the_schedule(config, tmp_path):
    rows, _ = train(_in(config, tmp_path / "run", log_every=5), tmp_path, 10)
    o = config.objective
    schedule = config.schedule.model_copy(update={"steps": 10})
    for row in rows:
        parts = (
            (o.ce, row["loss_ce"]),
            (o.tv, row["loss_tv"]),
            (o.confidence, row["loss_confidence"]),
        )
        assert row["loss"] == pytest.approx(sum(w * loss for w, loss in parts), rel=1e-4)
        assert min(loss for _, loss in parts) > 0
        assert row["tokens_per_s"] > row["steps_per_s"] > 0
        assert row["learning_rate"] == learning_rate(row["step"] - 1, schedule)
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_where_the_curves_go(config, tmp_path):
    for value, folder in ((False, None), (True, config.run_dir / "tensorboard"), ("here", "here")):
        raw = json.loads(config.model_dump_json()) | {"tensorboard": value}
        found = RunConfig.model_validate(raw).curves
        assert (found and str(found)) == (folder and str(folder))
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(json.loads(config.model_dump_json()) | {"tensorboard": 3}))
    with pytest.raises(DSparkError, match="tensorboard"):
        load_config(file)


def test_without_the_package_it_is_one_line(config, tmp_path, monkeypatch):
    find = util.find_spec
    absent = "sglang_dspark.training.curves.find_spec"
    monkeypatch.setattr(absent, lambda name: None if name == "tensorboard" else find(name))
    cfg = config.model_copy(update={"tensorboard": True, "run_dir": tmp_path / "run"})
    (tmp_path / "c.yaml").write_text(cfg.model_dump_json())
    done = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "c.yaml")])
    assert isinstance(done.exception, DSparkError)
    assert "pip install '.[train]'" in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(DSparkError, match=r"cannot write .*taken"):
        Curves(tmp_path / "taken", 0)
