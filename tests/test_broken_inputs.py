"""Every other file that a command reads: what is broken in it is one line. The server's own files
are the business of tests/serving/test_broken_files.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sglang_dspark.cli._analysis import read_vocabulary
from sglang_dspark.evaluation.page import read_results
from sglang_dspark.evaluation.prompts import read_prompts
from sglang_dspark.evaluation.traces import read_trace, write_trace
from sglang_dspark.experts import times
from sglang_dspark.experts.times import TimesKey, TimesTable, Timing
from sglang_dspark.loadtest.servers.arms import load_arm
from sglang_dspark.loadtest.servers.workload import drafter_gamma
from sglang_dspark.loadtest.sweep.config import load_sweep
from sglang_dspark.training.config import load_config
from tests.broken_files import breakages, refused
from tests.evaluation.trace_world import drawn

ROOT = Path(__file__).parents[1]


def of_yaml(path: str) -> str:
    return json.dumps(yaml.safe_load((ROOT / path).read_text()))


def of_arm(folder: Path) -> str:
    return of_yaml("configs/serve/dspark-fixed-gamma.yaml")


def of_sweep(folder: Path) -> str:
    return of_yaml("configs/sweep/cpu-demo.yaml")


def of_training(folder: Path) -> str:
    return of_yaml("configs/train/tiny.yaml")


def of_drafter(folder: Path) -> str:
    return (ROOT / "drafters" / "smollm2-135m-dspark" / "config.json").read_text()


def of_results(folder: Path) -> str:
    return (ROOT / "results" / "drafters_tau.json").read_text()


def of_vocabulary(folder: Path) -> str:
    return json.dumps([1, 5, 9])


def of_prompts(folder: Path) -> str:
    return json.dumps({"id": "a", "domain": "math", "turns": ["1 + 1?"]})


def of_trace(folder: Path) -> str:
    write_trace(folder / "trace.json", drawn(prompts=2, steps=2, gamma=2))
    return (folder / "trace.json").read_text()


def of_times(folder: Path) -> str:
    key = TimesKey("a cpu", "bf16", "4 experts", "float32", False, "1")
    times.save(TimesTable(key, "2026", (Timing(1, "torch", 5.0),), {}), folder / "times.json")
    return (folder / "times.json").read_text()


CASES: dict[str, tuple[Callable[[Path], object], Callable[[Path], str], str]] = {
    "arm": (load_arm, of_arm, "arm.yaml"),
    "sweep": (load_sweep, of_sweep, "sweep.yaml"),
    "training": (load_config, of_training, "train.yaml"),
    "drafter": (lambda path: drafter_gamma(path.parent), of_drafter, "config.json"),
    "results": (lambda path: read_results(path.parent), of_results, "drafters_tau.json"),
    "vocabulary": (read_vocabulary, of_vocabulary, "vocabulary.json"),
    "prompts": (read_prompts, of_prompts, "prompts.jsonl"),
    "trace": (read_trace, of_trace, "trace.json"),
    "times": (times.read, of_times, "times.json"),
}


@pytest.mark.parametrize("kind", CASES)
def test_what_is_broken_is_one_line(kind: str, tmp_path: Path) -> None:
    read, make, name = CASES[kind]
    valid = make(tmp_path)
    folder = tmp_path / kind
    folder.mkdir()
    path = folder / name
    path.write_text(valid)
    assert not refused(read, path)
    outcomes: Counter[str] = Counter()
    for content in breakages(valid, len(kind), 120, is_yaml=name.endswith(".yaml")):
        path.write_bytes(content)
        outcomes["refused" if refused(read, path) else "read"] += 1
    print(f"{kind}: {dict(outcomes)}")
    assert outcomes["refused"] > 40
    path.unlink()
    path.mkdir()
    assert refused(read, path), "a folder in its place"
