"""Test each user error: one line that names file and field, and an exit status.

A package that cannot be imported is a case of test_doctor.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from sglang_dspark.cli.main import main
from sglang_dspark.drafter import save_drafter
from tests.drafter.helpers import tiny_drafter
from tests.drafter.test_speculators import written
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "configs" / "train" / "tiny.yaml"
SWEEP = ROOT / "configs" / "sweep" / "cpu-demo.yaml"
DEMO = "demo --port PORT --no-sweep --target FILES/target --drafter FILES/"
BENCH = "bench serve --port PORT --out FILES/r.json --concurrency"
TRAIN = "train --config FILES/"
USAGE = "Invalid value for "

# name: arguments, exit status, what the line says
CASES: dict[str, tuple[str, int, str]] = {
    "target that is not there": ("demo --port PORT --target /nope", 1, "no model at /nope: there"),
    "target that is a file": (
        "demo --port PORT --target FILES/text.yaml",
        1,
        "text.yaml is a file",
    ),
    "target without a field": (
        "demo --port PORT --target FILES/drafters --drafter FILES/drafter",
        1,
        "FILES/drafters/config.json is no model's configuration (no 'hidden_size')",
    ),
    "unknown device": ("demo --port PORT --device tpu", 1, "device 'tpu' is neither cpu nor cuda"),
    "Eagle3 drafter": (DEMO + "eagle3", 1, "architectures ['LlamaForCausalLMEagle3'] in"),
    "DFlash drafter": (DEMO + "dflash", 1, "architectures ['DFlashDraftModel'] in config.json is"),
    "MTP drafter": (
        "demo --port PORT --target FILES/target --drafter smollm2-135m-mtp",
        1,
        "architectures ['LlamaForCausalLMEagle'] in config.json is no DSpark drafter",
    ),
    "Eagle3 drafter to bench": (
        BENCH + " 1 --target FILES/target --drafter FILES/eagle3",
        1,
        "is no DSpark drafter",
    ),
    "drafter of Speculators": (DEMO + "speculators", 1, "dspark models convert FILES/speculators"),
    "Eagle3 of Speculators": (
        "models convert FILES/speculators-eagle3 --out FILES/o --target FILES/target",
        1,
        "speculators_model_type is 'eagle3'; of the Speculators layout only `dspark` is read",
    ),
    "drafter's broken JSON": (DEMO + "broken", 1, "drafter FILES/broken: config.json cannot be"),
    "drafter without weights": (DEMO + "weightless", 1, "FILES/weightless has no safetensors file"),
    "truncated weights": (DEMO + "cut", 1, "model.safetensors is truncated or corrupt"),
    "drafter of another width": (
        DEMO + "wide",
        1,
        "hidden_size is 64, but the target FILES/target",
    ),
    "drafter of another vocabulary": (DEMO + "words", 1, "vocab_size is 99, but the target FILES"),
    "unknown shipped drafter": ("eval --drafter other", 1, "none ships under that name"),
    "id that is not in the cache": (
        "eval --target org/model",
        1,
        "no model org/model from Hugging Face: it is not in the Hugging Face cache",
    ),
    "id of a drafter": ("eval tau --drafter a=org/draft@main@3", 1, "no model org/draft@main from"),
    "plain text for YAML": (TRAIN + "text.yaml", 1, "text.yaml: a mapping of fields is wanted"),
    "a list for YAML": (TRAIN + "list.yaml", 1, "one `name: value` a line; found a list"),
    "a list for a sweep": ("sweep --config FILES/list.yaml", 1, "list.yaml must be a mapping"),
    "plain text for a plan": ("eval traces --plan FILES/text.yaml", 1, "found plain text"),
    "unknown field": (
        TRAIN + "unknown.yaml",
        1,
        "drafter.gama: no such field; did you mean gamma?",
    ),
    "unknown field of a sweep": (
        "sweep --config FILES/s-unknown.yaml",
        1,
        "trails: no such field; did you mean trials?",
    ),
    "wrong type": (TRAIN + "type.yaml", 1, "drafter.gamma: Input should be a valid integer, un"),
    "out of range": (TRAIN + "range.yaml", 1, "drafter.gamma: Input should be greater than or eq"),
    "negative steps": (TRAIN + "negative.yaml", 1, "schedule.steps: Input should be greater than"),
    "empty file": (TRAIN + "empty.yaml", 1, "empty.yaml: a mapping of fields is wanted, one"),
    "missing file": (TRAIN + "gone.yaml", 1, "gone.yaml, and no configuration of that name"),
    "folder for a file": (TRAIN + "folder", 1, "FILES/folder is a folder; name a file"),
    "binary rubbish": (TRAIN + "binary.yaml", 1, "no text in UTF-8: byte 1 is 0x80"),
    "a zero byte": (TRAIN + "zero.yaml", 1, "a character that YAML does not allow, U+0000"),
    "unclosed YAML": (TRAIN + "unclosed.yaml", 1, "line 2, column 2"),
    "no target for training": (
        TRAIN + "target.yaml",
        1,
        "target.yaml: data.target: no model at /nope",
    ),
    "bad row of prompts": (
        "eval --target FILES/target --prompts FILES/rows.jsonl",
        1,
        "line 2: not",
    ),
    "missing prompts": ("eval --target FILES/target --prompts no.jsonl", 1, "cannot read prompts"),
    "unknown domain": ("sweep --port PORT --config FILES/s-mix.yaml", 1, "poetry"),
    "unknown set of a plan": (
        f"eval traces --plan {ROOT}/configs/eval/traces.yaml --only no",
        1,
        "no set 'no' in the plan",
    ),
    "unknown arm": ("sweep --config FILES/s-arm.yaml", 1, "no arm 'nothing' at"),
    "unknown baseline": ("sweep --config FILES/s-base.yaml", 1, "nothing is not among the arms"),
    "missing sweep": (
        "sweep --config FILES/gone.yaml",
        1,
        "gone.yaml, and no configuration of that name",
    ),
    "words for concurrency": (BENCH + " 1,x", 1, "--concurrency '1,x' is not a list of numbers"),
    "no users": (BENCH + " 4,0", 1, "--concurrency '4,0': at least one user"),
    "negative users": (BENCH + "=-4", 1, "--concurrency '-4': at least one user"),
    "no concurrency": (BENCH + "=", 1, "--concurrency '' is not a list of numbers"),
    "report of no run": ("report FILES/folder", 1, "FILES/folder/run.json (No such file or"),
    "report of nothing": ("report", 1, "name what to report"),
    "trace that is not there": ("calibrate --trace FILES/gone.json", 1, "cannot read the trace"),
    "folder without traces": ("calibrate --trace FILES/folder", 1, "is not a response store"),
    "unknown format": (
        "quantize FILES/drafter --out FILES/o --format int3",
        1,
        "--format int3 is none of bf16, fp8, mxfp4, nvfp4",
    ),
    "quantising a dense drafter": ("quantize FILES/drafter --out FILES/o", 1, "is a dense drafter"),
    "gamma over the block": (
        "eval --target FILES/target --drafter FILES/drafter --gamma 9",
        1,
        "--gamma 9 exceeds the block of 4 that FILES/drafter was trained for",
    ),
    "folder that cannot be made": (
        "models convert FILES/drafter --target FILES/target --out FILES/text.yaml/o",
        1,
        "cannot write the drafter to FILES/text.yaml/o (Not a directory)",
    ),
    "results into a folder": (
        "eval --json FILES/folder --target /nope",
        1,
        "FILES/folder is no file that can be replaced",
    ),
    "results into a pipe": (
        "eval --json FILES/pipe --target /nope",
        1,
        "FILES/pipe is no file that can be replaced",
    ),
    "no such port": ("demo --port 70000", 1, "cannot listen on 127.0.0.1:70000 (no such port)"),
    "zero prompts": ("eval --limit 0", 2, USAGE),
    "negative batch": ("eval --batch -1", 2, USAGE),
    "zero gamma": ("eval --gamma 0", 2, USAGE),
    "negative repeats": (BENCH + " 1 --repeats -1", 2, USAGE),
    "word for a number": ("eval --limit many", 2, USAGE),
    "unknown option": ("eval --nothing", 2, "No such option"),
    "unknown command": ("evaluate", 2, "No such command"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the cases name, by its name."""
    folder = tmp_path_factory.mktemp("files")
    for name, changes in {
        "drafter": {},
        "wide": {"hidden_size": 64},
        "words": {"vocab_size": 99},
    }.items():
        save_drafter(tiny_drafter(**changes), folder / name)
    target = {"hidden_size": 32, "vocab_size": 61, "num_hidden_layers": 4}
    _model(folder / "target", target)
    _model(folder / "drafters", {"vocab_size": 61})
    _model(folder / "eagle3", {"architectures": ["LlamaForCausalLMEagle3"]})
    _model(folder / "dflash", {"architectures": ["DFlashDraftModel"], "block_size": 8})
    written(folder / "speculators", tiny_drafter())
    _model(folder / "speculators-eagle3", {"speculators_model_type": "eagle3"})
    for name in ("broken", "weightless", "cut"):
        shutil.copytree(folder / "drafter", folder / name)
    (folder / "broken" / "config.json").write_text('{"architectures": [')
    (folder / "weightless" / "model.safetensors").unlink()
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    _texts(folder)
    return folder


def _model(folder: Path, config: dict[str, object]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def _texts(folder: Path) -> None:
    training = TRAINING.read_text()
    sweep = f"arms_folder: {ROOT}/configs/serve\n{SWEEP.read_text()}"
    sweep = _changed(sweep, "\ntarget: demo", f"\ntarget: {folder}/target")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "binary.yaml").write_bytes(bytes(range(128, 256)))
    row = json.dumps({"turns": ["1 + 1?"]})
    for name, text in {
        "text.yaml": "train it well\n",
        "list.yaml": "- run_dir\n- data\n",
        "empty.yaml": "",
        "zero.yaml": 'a: "\0"\n',
        "unclosed.yaml": "a: [1\nb: 2\n",
        "rows.jsonl": f"{row}\n{{broken\n",
        "unknown.yaml": _changed(training, "gamma: ", "gama: "),
        "type.yaml": _changed(training, "gamma: ", "gamma: many #"),
        "range.yaml": _changed(training, "gamma: ", "gamma: 0 #"),
        "negative.yaml": _changed(training, "\n  steps: ", "\n  steps: -3 #"),
        "target.yaml": _changed(training, "target: ", "target: /nope #"),
        "s-unknown.yaml": _changed(sweep, "\ntrials:", "\ntrails:"),
        "s-mix.yaml": _changed(sweep, "\nmix: ", "\nmix: poetry #"),
        "s-arm.yaml": _changed(sweep, "\narms: [", "\narms: [nothing, "),
        "s-base.yaml": _changed(sweep, "\nbaseline: ", "\nbaseline: nothing #"),
    }.items():
        (folder / name).write_text(text)


def _changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_a_status(
    name: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, status, says = CASES[name]
    words = arguments.replace("FILES", str(files)).replace("PORT", str(free_ports(4)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "argv", ["dspark", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    print(said)
    assert ended.value.code == status
    assert says.replace("FILES", str(files)) in said
    assert "<unicode string>" not in said
    assert "Traceback" not in said
    if status == 1:
        assert said.startswith("dspark: ")
        assert len(said.splitlines()) == 1
        assert len(said) < 700
    assert not list(tmp_path.iterdir()), "nothing is written"
