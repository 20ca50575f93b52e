"""The kit's training: a server answers, time is divided, a run goes on, its drafter comes back."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.drafter.backbone import MLP
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.collect import answer, plan_answers
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.store import StoreReader
from sglang_dspark.training.trainer import Trainer
from tests.tools.kit_runs import KIT, kit
from tests.tools.test_gpu_kit import FINE, stage
from tools.gpu.files import write_whole
from tools.gpu.kit import answers, runner, runs, training
from tools.gpu.kit.carry import MOST, join, send
from tools.gpu.kit.runner import Places, run_stages
from tools.gpu.kit.runs import run_config
from tools.gpu.kit.stages import GOES_ON, STAGES
from tools.gpu.kit.training import PROBE, Course, budget_of, planned, timed, train
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
    sizes = send("drafter", drafter, came)
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
    assert done.stdout == f"{tmp_path / 'out' / 'drafter'}\n", done.stderr
    made = tmp_path / "out" / "drafter"
    sent, found = (load_file(folder / "model.safetensors") for folder in (drafter, made))
    assert sent.keys() == found.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert (made / "config.json").read_text() == '{"markov_rank": 8}'


def test_a_lost_or_damaged_file_is_named(drafter: Path, tmp_path: Path) -> None:
    came = tmp_path / "came"
    send("drafter", drafter, came)
    piece = came / "2-drafter.tar"
    spoilt = bytearray(piece.read_bytes())
    spoilt[100] ^= 1
    piece.write_bytes(spoilt)
    with pytest.raises(DSparkError, match=r"lacks 2-drafter\.tar"):
        join(came, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(DSparkError, match=r"has no manifest\.json"):
        join(tmp_path, tmp_path / "out")


def test_a_folder_that_is_there_is_kept(drafter: Path, tmp_path: Path) -> None:
    send("drafter", drafter, tmp_path / "came")
    (tmp_path / "out" / "drafter").mkdir(parents=True)
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


class Answering:
    """A server on a thread that answers each prompt with the next token ids and a stop token."""

    def __init__(self, stop: int, *, broken: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                found = [{"output_ids": [ids[-1], ids[-1], stop]} for ids in body["input_ids"]]
                answer = json.dumps(found[:-1] if broken else found).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The run of a machine without a GPU, whose store is empty."""
    return run_config(tmp_path_factory.mktemp("home"), "cpu")


def in_store(cfg: RunConfig, folder: Path, **changes: Any) -> RunConfig:
    """The run with a store of its own."""
    data = cfg.data.model_copy(update={"store": folder / "answers", **changes})
    return cfg.model_copy(update={"data": data})


def test_answers_of_a_server_are_what_is_trained_on(tiny: RunConfig, tmp_path: Path) -> None:
    cfg, server = in_store(tiny, tmp_path), Answering(2)
    found = answers.with_server(cfg, server.url, lambda: 60.0, batch=10)
    assert (found["asked"], found["answers"], found["tokens"]) == (48, 48, 48 * 3)
    assert {len(body["input_ids"]) for body in server.asked} == {10, 8}
    params = [each for body in server.asked for each in body["sampling_params"]]
    assert sorted(each["temperature"] for each in params) == [0.0] * 32 + [0.6] * 16
    assert {(each["top_p"], each["top_k"], each["min_p"]) for each in params} == {(1.0, -1, 0.0)}
    reader = StoreReader(cfg.data.store)
    asked = {
        tuple(ids): each["temperature"]
        for body in server.asked
        for ids, each in zip(body["input_ids"], body["sampling_params"], strict=True)
    }
    for i in range(len(reader)):
        tokens, size = reader.tokens(i)
        prompt = tuple(tokens[:size].tolist())
        assert tokens[size:].tolist() == [prompt[-1], prompt[-1], 2]
        assert reader.rows[i]["temperature"] == asked[prompt]
    again = answers.with_server(cfg, server.url, lambda: 60.0, batch=10)
    assert (again["asked"], again["tokens"], again["answers"]) == (0, 0, 48)


def test_no_prompt_is_sent_once_the_time_is_over(tiny: RunConfig, tmp_path: Path) -> None:
    cfg, server = in_store(tiny, tmp_path), Answering(2)
    left = iter([1.0, 1.0, *[0.0] * 99])  # two batches begin
    found = answers.with_server(cfg, server.url, lambda: next(left), batch=10)
    assert (len(server.asked), found["answers"]) == (2, 20)
    found = answers.with_server(cfg, server.url, lambda: 60.0, batch=10)
    assert (found["asked"], found["answers"]) == (28, 48)


def test_a_server_that_loses_an_answer_ends_it_and_keeps_the_others(
    tiny: RunConfig, tmp_path: Path
) -> None:
    cfg = in_store(tiny, tmp_path)
    left = iter([1.0, *[0.0] * 99])
    answers.with_server(cfg, Answering(2).url, lambda: next(left), batch=10)
    with pytest.raises(DSparkError, match="answered 9 of 10 prompts"):
        answers.with_server(cfg, Answering(2, broken=True).url, lambda: 60.0, batch=10)
    assert len(StoreReader(cfg.data.store)) == 10
    with pytest.raises(DSparkError, match="did not answer"):
        answers.with_server(cfg, "http://127.0.0.1:1", lambda: 60.0)


def test_a_target_writes_its_own_prompts(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that end, are long enough and differ; then it answers them."""
    sky = "what is the sky made of"
    texts = iter([sky, "too short", None, sky, "why is it"])
    monkeypatch.setattr(answers, "OWN_PROMPTS", 5)
    monkeypatch.setattr(answers, "usable_text", lambda *_: next(texts))
    own = tmp_path / "own.jsonl"
    cfg, server = in_store(tiny, tmp_path, prompts=(), self_prompts=own), Answering(2)
    found = answers.with_server(cfg, server.url, lambda: 60.0, batch=3)
    assert (found["prompts_written"], found["answers"]) == (3, 3)
    rows = [json.loads(line) for line in own.read_text().splitlines()]
    assert {row["turns"][0] for row in rows} == {sky, "too short", "why is it"}
    params = [each for body in server.asked[:2] for each in body["sampling_params"]]
    assert {each["temperature"] for each in params} == {1.0}
    written = len(server.asked)
    found = answers.with_server(cfg, server.url, lambda: 60.0)
    assert "prompts_written" not in found
    assert len(server.asked) == written, "prompts are written once"


def test_seconds_of_a_call_are_divided() -> None:
    """The server's start, answers for two minutes, and at least as long to train; the end apart."""
    whole = budget_of(560)
    assert (whole.ready_s, whole.answers_s) == (pytest.approx(212), 120)
    assert whole.ready_s + whole.answers_s + whole.training_s == pytest.approx(530)
    assert budget_of(5000).ready_s == 250
    short = budget_of(230)
    assert (short.ready_s, short.answers_s, short.training_s) == pytest.approx((80, 48, 72))


@pytest.mark.parametrize("seconds", [195, 20, -5])
def test_too_little_time_is_one_line(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with pytest.raises(
        DSparkError, match=rf"^{seconds} s leave \d+ to train, not 60; give the call"
    ):
        budget_of(seconds)
    monkeypatch.setenv("KIT_HOME", str(tmp_path))
    monkeypatch.setenv("KIT_SECONDS", str(seconds))
    assert training.main() == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("train: ")


def test_the_stage_begins_only_where_it_can_end() -> None:
    [least] = [each.least_s for each in STAGES if each.name == "train"]
    assert least is not None
    assert budget_of(least).training_s >= training.LEAST_TRAINING_S


def test_the_run_is_the_papers_but_for_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of L_tv, bfloat16 on a GPU, five layers where they are asked for."""
    monkeypatch.setattr(runs, "demo_target", lambda home: home / "target")
    cfg = run_config(tmp_path, "cuda")
    assert (cfg.objective.ce, cfg.objective.tv, cfg.objective.confidence) == (0.1, 0.9, 1.0)
    assert (cfg.drafter.kind, cfg.drafter.layers, cfg.schedule.device) == ("dspark", 3, "cuda")
    assert not cfg.data.cache
    monkeypatch.setenv("KIT_LAYERS", "5")
    five = run_config(tmp_path, "cuda")
    assert five.drafter.layers == 5
    assert five.run_dir != cfg.run_dir
    assert five.data.store == cfg.data.store


@pytest.fixture(scope="module")
def answered(tiny: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A tiny target's answers, and the run of a DSpark drafter on them."""
    cfg = in_store(tiny, tmp_path_factory.mktemp("answered"))
    target = TargetModel.load(cfg.data.target)
    plan = plan_answers(cfg, target.config, lambda _: None)
    assert answer(plan, cfg.data, target, 5.0, lambda *_: None) >= 48 * 20
    return cfg


def course(steps: int) -> Course:
    return Course(steps=steps, compiled=False, step_s=30.0, eager_s=30.0, compiled_s=30.0)


@pytest.mark.slow  # half a minute; tests/training resumes runs of every kind
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
    times = iter([0.4, 0.3, 0.4, 0.39])  # 0.39 is within the margin: not compiled

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
    assert (again.compiled, again.step_s) == (False, 0.4)
    assert again.steps > 2 * PROBE + 0.9 * 5900 / 0.4


@pytest.mark.slow  # torch.compile takes as long
def test_compiled_parts_learn_as_others_do(answered: RunConfig, tmp_path: Path) -> None:
    """Trace the parts that a GPU compiles, and compare their losses."""
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


def test_a_drafter_of_too_many_pieces_is_one_line(
    answered: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call returns eight files, and it would be lost."""
    cfg = answered.model_copy(update={"run_dir": tmp_path / "run"})
    write_whole(cfg.run_dir / "course.json", json.dumps(asdict(course(1))))
    monkeypatch.setenv("KIT_FILES", str(tmp_path / "files"))
    monkeypatch.setattr(training, "MOST_PIECES", 0)
    with pytest.raises(DSparkError, match="the drafter has 1 pieces, 0 come back"):
        training.trained(cfg, "cpu", lambda: 999.0)
    monkeypatch.setattr(training, "MOST_PIECES", 1)
    assert training.trained(cfg, "cpu", lambda: 999.0) == 0
    assert [each.name for each in join(tmp_path / "files", tmp_path / "joined")] == ["drafter"]


@pytest.mark.slow
@pytest.mark.server
def test_a_server_answers_a_drafter_is_trained_and_sent_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = kit(out, "--commit", "c", "train")
    assert done.returncode == 0, done.stderr
    figures = json.loads((out / "train.json").read_text())["metrics"]
    assert (figures["measured"], figures["layers"]) == (False, 1)
    assert (figures["answers"]["answers"], figures["answers"]["asked"]) == (48, 48)
    assert figures["answers"]["tokens_per_s"] > 0
    rows = figures["rows"]
    assert rows[-1]["step"] == figures["course"]["steps"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["held_out_tau"] > 1
    [place] = join(out / "train", tmp_path / "joined")
    assert load_file(place / "model.safetensors")
