"""The kit's training: it fits the call, goes on in the next one, and its drafter comes back."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.drafter.backbone import MLP
from sglang_dspark.errors import DSparkError
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.trainer import Trainer
from tests.tools.test_gpu_kit import FINE, KIT, dry_run, stage
from tools.gpu.kit import runner, training
from tools.gpu.kit.carry import MOST, join, send
from tools.gpu.kit.runner import Places, run_stages
from tools.gpu.kit.runs import KINDS, answer_prompts, run_config
from tools.gpu.kit.stages import GOES_ON, STAGES
from tools.gpu.kit.training import PROBE, Course, planned, timed, train
from tools.gpu.packing.arrival import PROMPTS, take_in
from tools.gpu.packing.parcels import all_parcels
from tools.gpu.packing.pieces import pack

pytestmark = pytest.mark.xdist_group("gpu-kit")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A drafter whose weights are larger than a file that comes back."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    draws = torch.Generator().manual_seed(0)
    weights = {
        "markov_head.markov_w2.weight": torch.randn(9_000_000, generator=draws).bfloat16(),
        "backbone.fc.weight": torch.randn(64, 64, generator=draws),
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text('{"markov_rank": 8}')
    return folder


def test_a_drafter_comes_back_in_small_files_and_is_the_same(drafter: Path, tmp_path: Path) -> None:
    came = tmp_path / "came"
    sizes = send("train-dspark", drafter, came)
    assert sizes == {file.name: file.stat().st_size for file in came.glob("*.tar")}
    assert len(sizes) == 2
    assert max(sizes.values()) <= MOST < 16 << 20
    done = subprocess.run(
        [KIT / "join", came, tmp_path / "out"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"{tmp_path / 'out' / 'train-dspark'}\n", done.stderr
    made = tmp_path / "out" / "train-dspark"
    sent, found = (load_file(folder / "model.safetensors") for folder in (drafter, made))
    assert sent.keys() == found.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert (made / "config.json").read_text() == '{"markov_rank": 8}'


def test_a_lost_or_damaged_file_is_named(drafter: Path, tmp_path: Path) -> None:
    came = tmp_path / "came"
    send("train-dspark", drafter, came)
    piece = came / "2-train-dspark.tar"
    spoilt = bytearray(piece.read_bytes())
    spoilt[100] ^= 1
    piece.write_bytes(spoilt)
    with pytest.raises(DSparkError, match=r"lacks 2-train-dspark\.tar"):
        join(came, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(DSparkError, match=r"has no manifest\.json"):
        join(tmp_path, tmp_path / "out")


def test_a_folder_that_is_there_is_kept(drafter: Path, tmp_path: Path) -> None:
    send("train-dspark", drafter, tmp_path / "came")
    (tmp_path / "out" / "train-dspark").mkdir(parents=True)
    with pytest.raises(DSparkError, match="is there already"):
        join(tmp_path / "came", tmp_path / "out")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    return Places(tmp_path / "kept", tmp_path / "out", tmp_path / "home")


def test_a_stage_that_goes_on_is_neither_failed_nor_done(places: Places, tmp_path: Path) -> None:
    code = f"{FINE}; sys.stdout.flush(); n = len(open({str(tmp_path / 'long')!r} + '.runs').read())"
    long = stage(tmp_path, "long", f"{code}\nsys.exit({GOES_ON} if n < 3 else 0)")
    said = io.StringIO()
    for _ in range(2):
        assert run_stages([long], places, "c", said) == []
        found = json.loads((places.out / "long.partial.json").read_text())
        assert found["incomplete"] == "it goes on in the next call"
        assert list(places.kept.glob("*")) == []
    assert run_stages([long], places, "c", said) == []
    assert json.loads((places.out / "long.json").read_text())["incomplete"] is None
    assert (tmp_path / "long.runs").read_text() == "xxx"


def test_a_stage_fits_itself_into_what_is_left(places: Places, tmp_path: Path) -> None:
    code = "import os; print(json.dumps({k: os.environ[k] for k in ('KIT_SECONDS', 'KIT_FILES')}))"
    stages = [
        stage(tmp_path, "fits", code, 500, least_s=100),
        stage(tmp_path, "does_not", code, 500, least_s=400),
    ]
    assert run_stages(stages, places, "c", io.StringIO(), seconds=300) == []
    assert [file.name for file in places.out.iterdir()] == ["fits.json"]
    found = json.loads((places.out / "fits.json").read_text())["metrics"]
    assert 250 <= float(found["KIT_SECONDS"]) <= 300
    assert found["KIT_FILES"] == str(places.out / "fits")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A tiny target's answers, and the run of a DSpark drafter on them."""
    cfg = run_config("dspark", tmp_path_factory.mktemp("home"), "cpu", tiny=True)
    said = answer_prompts(cfg, "cpu", 120.0)
    assert said["answers"] == said["asked"] == 48
    assert said["tokens"] >= 48 * 20
    return cfg


def course(steps: int) -> Course:
    return Course(steps=steps, compiled=False, step_s=30.0, eager_s=30.0, compiled_s=30.0)


def test_a_call_that_ends_leaves_a_run_that_goes_on_to_the_same_drafter(
    answered: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {}
    for name, calls in (("whole", [99]), ("parts", [1, 2, 99])):
        cfg = timed(answered.model_copy(update={"run_dir": tmp_path / name}), course(12))
        for number, lines in enumerate(calls):
            asked = iter(range(lines))  # so many lines of the log may be written in this call
            ended = train(cfg, False, lambda asked=asked: next(asked, None) is not None)
            assert ended == (number == len(calls) - 1)
        weights[name] = load_file(tmp_path / name / "drafter" / "model.safetensors")
    notes = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "note" in line]
    assert [each["note"] for each in notes[2:]] == [f"going on from step {n}" for n in (2, 5)]
    for name, tensor in weights["whole"].items():
        assert torch.equal(tensor, weights["parts"][name]), name


def test_so_many_steps_are_planned_as_fit(
    answered: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the quicker way; the steps that were timed are steps of the run."""
    times = iter([0.4, 0.3, 0.4, 0.4])

    def seconds(trainer: Trainer) -> float:
        trainer.train_step()
        return next(times)

    monkeypatch.setattr(training, "step_seconds", seconds)
    monkeypatch.setitem(training._MOST_STEPS, "cpu", 10**6)
    cfg = answered.model_copy(update={"run_dir": tmp_path / "a"})
    found = planned(cfg, "cpu", 3000.0)
    assert (found.compiled, found.step_s) == (True, 0.3)
    assert 2 * PROBE + 0.9 * 2900 / 0.3 < found.steps <= 2 * PROBE + 0.9 * 3000 / 0.3
    monkeypatch.setenv("KIT_TRAIN_SECONDS", "6000")
    again = planned(answered.model_copy(update={"run_dir": tmp_path / "b"}), "cpu", 3000.0)
    assert not again.compiled
    assert again.steps > 2 * PROBE + 0.9 * 5900 / 0.4


def test_compiled_parts_learn_as_others_do(answered: RunConfig, tmp_path: Path) -> None:
    """What is compiled on a GPU is traced here."""
    from sglang_dspark.training.setup import prepare

    losses = []
    for compiled in (False, True):
        cfg = answered.model_copy(update={"run_dir": tmp_path / str(compiled)})
        trainer, _ = prepare(cfg)
        if compiled:
            training.compile_parts(trainer.learner.module, "cpu")
            parts = [each for each in trainer.learner.module.modules() if isinstance(each, MLP)]
            assert [each._compiled_call_impl is not None for each in parts] == [True]
        sums = torch.stack([trainer.train_step() for _ in range(3)])
        losses.append(sums[:, 0] / sums[:, 1])
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_prompts_that_were_packed_are_answered(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "Why is the sky blue?"}\n')
    [contents] = [
        each for each in all_parcels(tmp_path, "3.12", [file, file]) if each.name == PROMPTS
    ]
    pack([contents], tmp_path / "pieces", 1 << 20, lambda line: None)
    assert take_in(tmp_path / "pieces", tmp_path / "home", lambda line: None) == []
    came = sorted((tmp_path / "home" / PROMPTS).glob("*.jsonl"))
    assert [each.name for each in came] == ["0-mine.jsonl", "1-mine.jsonl"]
    assert came[0].read_bytes() == file.read_bytes()
    file.write_text("{}\n")
    with pytest.raises(DSparkError, match=r"mine\.jsonl holds no prompts"):
        all_parcels(tmp_path, "3.12", [file])


def check_trained(found: dict[str, Any], kind: str, out: Path) -> None:
    figures = found["metrics"]
    assert (figures["measured"], figures["kind"]) == (False, kind)
    rows = figures["rows"]
    assert rows[-1]["step"] == figures["course"]["steps"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["held_out_tau"] > 1
    [place] = join(out / f"train-{kind}", out.parent / "joined")
    assert load_file(place / "model.safetensors")


@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_a_drafter_of_each_kind_is_trained_and_sent_back(tmp_path: Path, kind: str) -> None:
    out, pieces = tmp_path / "out", tmp_path / "pieces"
    command = [KIT / "run", "--out", out, "--stamps", tmp_path, "--pieces", pieces]
    done = subprocess.run(
        [*command, f"train-{kind}", "--commit", "c"],
        env={**os.environ, "PYTHON": sys.executable, "KIT_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    check_trained(json.loads((out / f"train-{kind}.json").read_text()), kind, out)


def test_one_process_of_torchrun_trains_as_one_without(tmp_path: Path) -> None:
    [found] = dry_run(tmp_path / "out", "fsdp").values()
    figures = found["metrics"]
    assert (figures["backend"], figures["sharded"], figures["measured"]) == ("gloo", True, False)
    assert figures["losses"] == pytest.approx(figures["losses_by_fsdp"], abs=1e-5)
    assert len(set(figures["losses"])) == figures["steps"]


def test_training_comes_last_as_it_takes_all_the_time() -> None:
    names = [each.name for each in STAGES]
    assert names[-4:] == ["answers", *(f"train-{kind}" for kind in KINDS)]
    assert all(each.least_s for each in STAGES[-4:])
