"""`dspark doctor --serve`: a verdict on many argument lines, and no weight is loaded."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_dspark.backends import launch_report
from sglang_dspark.backends.launch_report import LaunchReport
from sglang_dspark.cli import doctor
from sglang_dspark.cli.main import app, main
from sglang_dspark.families.eagle3.checkpoint import save_eagle3
from tests.families.helpers import random_drafter
from tests.integration import tiny_models

pytest.importorskip("sglang")

ROOT = Path(__file__).resolve().parents[2]
BIG = 8 << 30  # bytes that the header of a target's file promises
MOST_RSS = 4 << 30  # bytes of the whole process, SGLang and torch included
MODULES = 5_000  # 4,526 today; with all patches installed 7,400
HEAVY = (  # what a server imports, and no verdict needs: seconds of CPU
    "scipy.optimize",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.llama",
    "sglang.srt.models.registry",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang_dspark.backends.cuda.attach",
    "sympy",
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
)
CHILD = """
import json, os, resource, sys
from sglang_dspark.backends.launch_report import report_launch
found, modules = {}, []
for case in json.load(sys.stdin):
    before = dict(os.environ)
    os.environ.update(case["environment"])
    within = dict(os.environ)
    report = report_launch(case["line"], complete=sys.argv[1] == "complete")
    modules = modules or sorted(sys.modules)  # of the first case
    every = sorted(sys.modules)
    assert dict(os.environ) == within, case["line"]
    os.environ.clear()
    os.environ.update(before)
    found[case["name"]] = report.as_json()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
kept = {"found": found, "peak": peak, "modules": modules, "every": every}
sys.__stdout__.write(json.dumps(kept))
"""


@dataclass(frozen=True)
class Case:
    """says: text of the verdict. fact: text of one fact. drafter: a folder of `folders`; "" none.

    more: further arguments. line: the whole line, if it is another than usual.
    """

    name: str
    scheduled: bool
    says: str = "starts, and is scheduled by confidence"
    more: str = ""
    drafter: str = "drafter"
    target: str = "target"
    fact: str = ""
    line: str | None = None
    config: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def arguments(self, folder: Path) -> str:
        """Return the argument line; FOLDER in it is replaced."""
        if self.line is not None:
            return self.line.replace("FOLDER", str(folder))
        words = [f"--model-path {folder / self.target} --device cpu"]
        if self.drafter:
            words += ["--speculative-algorithm DSPARK"]
            words += [f"--speculative-draft-model-path {folder / self.drafter}"]
        if self.config:
            file = folder / f"{self.name.replace(' ', '-')}.yaml"
            file.write_text(self.config)
            words += [f"--dspark-config {file}"]
        return " ".join([*words, self.more.replace("FOLDER", str(folder))])


DSPARK = "--speculative-algorithm DSPARK --speculative-draft-model-path FOLDER/drafter"
STARTS, NOT = "starts, but is not scheduled: ", "does not start: "
CASES = (
    Case("usual", True, fact="fits: hidden size 64, vocabulary 260"),
    Case("with the command", True, line="python -m sglang.launch_server --model-path "
         f"FOLDER/target --device cpu {DSPARK}"),
    Case("sglang serve", True, line=f"sglang serve FOLDER/target --device cpu {DSPARK}"),
    Case("device not named", True, line=f"--model-path FOLDER/target {DSPARK}"),
    Case("shorter block", True, more="--speculative-dspark-block-size 3",
         fact="drafts 3 of 5 positions"),
    Case("two ranks", True, more="--tp-size 2", fact="2 tensor-parallel"),
    Case("page size", True, more="--page-size 16", fact="page size 16"),
    Case("no overlap", True, more="--disable-overlap-schedule", fact="overlap schedule: off"),
    Case("overlap", True, config="cpu: {overlap: true}", fact="overlap schedule: on"),
    Case("tokens of the pool", True, more="--max-total-tokens 4096",
         fact="768 bytes a token of the target, 4096 tokens: 3 MiB"),
    Case("bfloat16", True, more="--dtype bfloat16", fact=" 384 bytes a token"),
    Case("minimum", True, config="schedule: {min_acceptance: 0.2}"),
    Case("early stop", True, config="schedule: {algorithm: early-stop}"),
    Case("threshold", True, config="schedule: {threshold: 0.4}"),
    Case("headless", True, drafter="headless", fact="no confidence head"),
    Case("Eagle3", True, drafter="eagle3", fact="one layer, run for each of 3 drafts"),
    Case("chain of two ranks", False, "on one rank alone", drafter="eagle3", more="--tp-size 2"),
    Case("MTP of another target", False, "hidden_size is 576", drafter="mtp"),
    Case("no features", False, "Gemma2ForCausalLM of SGLang 0.5.23 has neither", target="gemma2"),
    Case("Qwen2", True, target="qwen2"),
    Case("Gemma3", True, target="gemma3"),
    Case("large target", True, target="large", fact=f"{BIG >> 20} MiB as stored (BF16)"),
    Case("static", False, f"{STARTS}every draft is verified: schedule.mode is static",
         config="schedule: {mode: static}"),
    Case("static by variable", False, f"{STARTS}every draft is verified: SGLANG_RAGGED_VERIFY_MODE",
         environment={"SGLANG_RAGGED_VERIFY_MODE": "static"}),
    Case("plain", False, f"{STARTS}--speculative-algorithm is absent", drafter=""),
    Case("MTP", False, f"{STARTS}--speculative-algorithm is EAGLE", drafter="",
         more="--speculative-algorithm EAGLE --speculative-draft-model-path FOLDER/mtp "
         "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"),
    Case("EAGLE3", False, f"{STARTS}--speculative-algorithm is EAGLE3", drafter="",
         more="--speculative-algorithm EAGLE3 --speculative-draft-model-path FOLDER/mtp "
         "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"),
    Case("EAGLE without parameters", False, f"{STARTS}--speculative-algorithm is EAGLE", drafter="",
         more="--speculative-algorithm EAGLE --speculative-draft-model-path FOLDER/mtp"),
    Case("trees", False, f"{NOT}--speculative-eagle-topk 4: a CPU verifies chains", drafter="",
         more="--speculative-algorithm EAGLE --speculative-draft-model-path FOLDER/mtp "
         "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"),
    Case("simulated acceptance", False, f"{NOT}SGLANG_SIMULATE_ACC_LEN: a CPU accepts", drafter="",
         more="--speculative-algorithm EAGLE --speculative-draft-model-path FOLDER/mtp",
         environment={"SGLANG_SIMULATE_ACC_LEN": "2"}),
    Case("n-grams", False, f"{NOT}--speculative-algorithm NGRAM: its operators", drafter="",
         more="--speculative-algorithm NGRAM"),
    Case("switched off", False, f"{STARTS}sglang-dspark is switched off: DSPARK_DISABLE",
         environment={"DSPARK_DISABLE": "1"}),
    Case("longer block", False, "was trained for blocks of 5 tokens, but gamma 9",
         more="--speculative-dspark-block-size 9"),
    Case("draft tokens", False, "--speculative-num-draft-tokens must be 6, not 3",
         more="--speculative-num-draft-tokens 3"),
    Case("hidden size", False, "hidden_size is 128, but the target", drafter="wide"),
    Case("vocabulary", False, "vocab_size is 300, but the target", drafter="words"),
    Case("depth", False, "num_target_layers is 4, but the target", drafter="deep"),
    Case("layers outside", False, "target_layer_ids", drafter="outside"),
    Case("mask token", False, "mask_token_id 4000 lies outside the vocabulary", drafter="mask"),
    Case("no weights", False, "has no safetensors file", drafter="bare"),
    Case("cut off", False, "is truncated or corrupt", drafter="cut"),
    Case("no such drafter", False, "absent does not exist", drafter="absent"),
    Case("no drafter", False, "DSPARK needs a drafter", drafter="",
         more="--speculative-algorithm DSPARK"),
    Case("no such target", False, NOT, target="nowhere"),
    Case("unknown flag", False, "unrecognized arguments: --no-such-flag", more="--no-such-flag"),
    Case("unknown algorithm", False, "Unknown speculative algorithm name: GUESS", drafter="",
         more="--speculative-algorithm GUESS"),
    Case("no model", False, "--model-path", line="--device cpu"),
    Case("quotes", False, "cannot be split", line="--model-path 'FOLDER"),
    Case("attention backend", False, NOT, more="--attention-backend torch_native"),
    Case("no such backend", False, "invalid choice", more="--attention-backend mine"),
    Case("mode off", False, "it has none for a CPU", config="schedule: {mode: 'off'}"),
    Case("unknown field", False, "unknown field schedule.modus", config="schedule: {modus: auto}"),
    Case("minimum without schedule", False, "min_acceptance needs mode auto",
         config="schedule: {mode: static, min_acceptance: 0.2}"),
    Case("no such configuration", False, "cannot be read", more="--dspark-config FOLDER/no.yaml"),
    Case("cuda", False, "no CUDA device",
         line=f"--model-path FOLDER/target --device cuda {DSPARK}"),
    Case("simulated", False, "SGLANG_SIMULATE_ACC_LEN is set",
         environment={"SGLANG_SIMULATE_ACC_LEN": "2"}),
    Case("memory saver", False, "torch-memory-saver", more="--enable-memory-saver"),
)  # fmt: skip


def changed(folder: Path, name: str, **fields: Any) -> Path:
    """Copy the drafter to folder/name, with other fields in its config.json."""
    shutil.copytree(folder / "drafter", folder / name)
    file = folder / name / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and its drafter, and others that do not fit."""
    folder = tmp_path_factory.mktemp("lines")
    tiny_models.build(folder)
    layers = json.loads((folder / "drafter" / "config.json").read_text())["dflash_config"]
    changed(folder, "wide", hidden_size=128)
    changed(folder, "words", vocab_size=300)
    changed(folder, "deep", num_target_layers=4)
    changed(folder, "outside", dflash_config={**layers, "target_layer_ids": [0, 7]})
    changed(folder, "mask", dflash_config={**layers, "mask_token_id": 4000})
    changed(folder, "headless", enable_confidence_head=False, confidence_head_with_markov=False)
    (changed(folder, "bare") / "model.safetensors").unlink()
    weights = changed(folder, "cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.copytree(ROOT / "drafters" / "smollm2-135m-mtp1", folder / "mtp")
    save_eagle3(random_drafter("eagle3", 260), folder / "eagle3")
    shutil.copytree(folder / "target", folder / "large")
    renamed(folder, "qwen2", architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    gemma3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    renamed(folder, "gemma3", **gemma3, rope_parameters=None)
    renamed(folder, "gemma2", architectures=["Gemma2ForCausalLM"], model_type="gemma2")
    promise_weights(folder / "large" / "model.safetensors")
    return folder


def renamed(folder: Path, name: str, **fields: Any) -> None:
    """Copy the target to folder/name, with other fields in its config.json."""
    shutil.copytree(folder / "target", folder / name)
    file = folder / name / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def promise_weights(file: Path) -> None:
    """Write a header of `BIG` bytes of weights, with a hole in the place of the weights."""
    tensor = {"dtype": "BF16", "shape": [BIG // 2], "data_offsets": [0, BIG]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + BIG)


def reported(folder: Path, imports: str) -> dict[str, Any]:
    """Report all cases in one process, as importing SGLang takes longest."""
    asked = [
        {"name": case.name, "line": case.arguments(folder), "environment": case.environment}
        for case in CASES
    ]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, imports],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, Any]:
    """All cases, with the imports that each needs."""
    return reported(folder, "on demand")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_verdict(reports: dict[str, Any], case: Case) -> None:
    found = reports["found"][case.name]
    assert (found["scheduled"], case.says in found["verdict"]) == (case.scheduled, True), found
    assert "\n" not in found["verdict"]
    assert "Traceback" not in found["verdict"]
    assert case.fact in "\n".join(f"{name}: {text}" for name, text in found["facts"].items())
    if case.scheduled:
        assert {"device", "attention backend", "kernels", "target weights", "drafter weights",
                "KV pool", "graphs", "drafter"} <= found["facts"].keys()  # fmt: skip


def test_no_weight_is_loaded(reports: dict[str, Any]) -> None:
    """Not of the file that promises 8 GiB, either."""
    assert len(CASES) > 30
    assert reports["peak"] < MOST_RSS


def test_all_patches_installed_lead_to_the_same_reports(
    reports: dict[str, Any], folder: Path
) -> None:
    """A start's imports, with all patches checked, decide nothing that fewer imports do not."""
    complete = reported(folder, "complete")
    assert complete["found"] == reports["found"]
    assert set(HEAVY) - {"sglang.srt.entrypoints.http_server"} - set(complete["modules"]) == {
        "sglang_dspark.backends.cuda.attach"  # of a GPU's arguments
    }


def test_what_no_verdict_needs_is_not_imported(reports: dict[str, Any]) -> None:
    """The verdict takes five seconds of CPU at most, nearly all of them imports."""
    assert set(HEAVY) & set(reports["modules"]) == set()
    late = {"scipy.optimize", "sympy", "torch._dynamo.convert_frame", "torch.distributed.tensor"}
    assert late & set(reports["every"]) == set(), "nor by any other list of arguments"
    assert len(reports["modules"]) < MODULES


@pytest.mark.parametrize("scheduled", [True, False])
def test_the_exit_status_is_the_verdicts(scheduled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dspark.backends import launch_report

    report = LaunchReport(scheduled, "as it is", {"device": "cpu"})
    asked = []

    def reporting(line: str, *, complete: bool) -> LaunchReport:
        asked.append((line, complete))
        return report

    monkeypatch.setattr(launch_report, "report_launch", reporting)
    monkeypatch.setattr(gc, "disable", lambda: None)  # this process does not end here
    monkeypatch.setattr(doctor, "exits_without_cleanup", False)
    done = CliRunner().invoke(app, ["doctor", "--serve", "--model-path x"])
    assert done.stdout.splitlines() == ["device: cpu", "verdict: as it is"]
    assert done.exit_code == (0 if scheduled else 1)
    done = CliRunner().invoke(app, ["doctor", "--serve", "--model-path x", "--json"])
    assert json.loads(done.stdout) == report.as_json()
    CliRunner().invoke(app, ["doctor", "--all", "--serve", "--model-path x"])
    assert asked == [("--model-path x", False)] * 2 + [("--model-path x", True)]


def test_a_name_is_looked_up_without_waiting_for_the_hub(folder: Path) -> None:
    """No connection opens, so the cache alone decides; a name may be too long for a path."""
    for name in ("no/model", f"no/{'x' * 300}"):
        done = subprocess.run(
            [sys.executable, "-c", WAITS, f"--model-path {name} --device cpu"],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "no_proxy": "*"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.startswith("does not start: ")


WAITS = """
import sys, time
def sleep(seconds):
    assert seconds < 1, "the client waits between its attempts"
time.sleep = sleep
from sglang_dspark.backends.launch_report import report_launch
print(report_launch(sys.argv[1]).verdict)
"""


def test_a_process_that_reported_ends_without_cleanup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["dspark", "--version"])
    for quick in (False, True):
        monkeypatch.setattr(doctor, "exits_without_cleanup", quick)
        with pytest.raises(SystemExit):
            main()
        assert ended == ([0] if quick else [])
    assert capsys.readouterr().out.count("sglang") >= 2


def test_the_command_ends_with_its_output_written(folder: Path) -> None:
    """The process ends without freeing its modules: through a pipe nothing may be lost."""
    line = CASES[0].arguments(folder)
    for named, status in ((line, 0), (line.replace("DSPARK", "STANDALONE"), 1)):
        done = subprocess.run(
            [sys.executable, "-m", "sglang_dspark.cli.main", "doctor", "--serve", named],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert done.stdout.splitlines()[-1].startswith("verdict: starts, ")
        assert done.stderr == ""


@pytest.mark.parametrize("hub", [True, False])
def test_a_model_that_cannot_be_fetched_says_what_to_do(hub: bool) -> None:
    place = f"{'x' * 300} https://huggingface.co" if hub else "/models/target"  # it is cut short
    with (
        pytest.raises(launch_report._NotStartingError) as raised,
        launch_report._refusals(),
    ):
        raise OSError(f"We couldn't connect to '{place}'")
    assert ("; fetch the model (hf download) or name a folder" in str(raised.value)) == hub
