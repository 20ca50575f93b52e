"""Families of files that a user writes or a program keeps: the product's own readers, on contents
that begin with what its own writers, or its examples, make.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sglang_dspark.cli._analysis import read_vocabulary
from sglang_dspark.cli._models import target_facts
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.page import read_results
from sglang_dspark.evaluation.prompts import read_prompts
from sglang_dspark.evaluation.trace_plan import load_plan
from sglang_dspark.experts import times
from sglang_dspark.loadtest.bench.republish import taken_again
from sglang_dspark.loadtest.client.traces import read_trace as read_load
from sglang_dspark.loadtest.servers.arms import load_arm
from sglang_dspark.loadtest.servers.workload import drafter_gamma
from sglang_dspark.loadtest.sweep.config import load_sweep
from sglang_dspark.schedule import cost_table
from sglang_dspark.schedule.cost_model import CostModel, Step
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.sts_file import read_sts
from sglang_dspark.serving.config import load_config
from sglang_dspark.training import config as training
from sglang_dspark.training.prompts import read_prompts as read_training_prompts
from tests.broken_files import is_one_line
from tests.fuzz.documents import JSON, LINES, TABLE, Dialect, broken, yaml_dialect
from tests.fuzz.explore import Family
from tests.fuzz.guards import watched
from tests.serving.test_profile import KEY, Machine

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "drafters" / "smollm2-135m-dspark"
SENTINEL = "executed"  # a file that appears in a family's folder if what it reads is executed
CONFIG = {
    "cpu": {"threads": 2, "matrix_kernel": True, "overlap": False},
    "schedule": {"mode": "auto", "profile_seconds": 20.0, "fairness_floor": 1, "speed_target": 9.0},
    "requests": {"answers": 16, "logprobs": 20},
}
STOCK_STS = {"temperatures": [1.1, 0.7, 2.0], "dataset": "mine", "num_samples": 9}


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name on disk, a valid document, and its reader."""

    name: str
    group: str
    file: str
    document: Callable[[], Any]
    read: Callable[[Path], object]
    dialect: Dialect | None = JSON  # None: YAML
    share: float = 1.0


class Reading:
    """Write a case to a file and read it, in its own folder: some files are read once a path.

    Returns True for an accepted case, False for a DSparkError in one line that names the file.
    Raises any other error.
    """

    def __init__(self, folder: Path, file: str, read: Callable[[Path], object]):
        self.folder, self.file, self.read = folder, file, read
        self.sentinel = folder / SENTINEL
        self.numbers = itertools.count()

    def __call__(self, content: bytes) -> bool:
        place = self.folder / str(next(self.numbers))
        place.mkdir()
        path = place / self.file
        path.write_bytes(content)
        taken = accepts(self.read, path, place)
        assert not self.sentinel.exists(), "something was executed"
        left = sorted(each.name for each in place.iterdir())
        assert left == [self.file], f"left behind: {left}"
        path.unlink()
        place.rmdir()
        return taken


def accepts(read: Callable[[Path], object], path: Path, named: Path) -> bool:
    """Return whether `read` accepts the file. named: the path that a refusal must name."""
    try:
        with watched():
            read(path)
    except DSparkError as error:
        message = str(error)
        assert is_one_line(message, named), f"no fit line: {message[:600]!r}"
        return False
    return True


def families(folder: Path) -> Iterator[Family]:
    """One a kind; they work below `folder`."""
    for kind in KINDS:
        place = folder / kind.name.replace(" ", "-")
        place.mkdir(parents=True)
        reading = Reading(place, kind.file, kind.read)
        document = kind.document()
        if kind.dialect is None:
            both = [yaml_dialect(str(reading.sentinel), block=block) for block in (False, True)]
        else:
            both = [kind.dialect]
        valid = place / kind.file
        valid.write_text(both[-1].render(document))
        kind.read(valid)  # what is compiled or imported for it is there from now on
        yield Family(kind.name, kind.group, broken(document, *both), reading, kind.share)


def _example(path: str) -> Callable[[], Any]:
    return lambda: yaml.safe_load((ROOT / path).read_text())


def _published(name: str) -> Callable[[], Any]:
    return lambda: json.loads((ROOT / "results" / f"{name}.json").read_text())


def _short(value: Any, most: int = 4) -> Any:
    """The same document with lists of at most `most` entries."""
    if isinstance(value, dict):
        return {name: _short(each, most) for name, each in value.items()}
    if isinstance(value, list):
        return [_short(each, most) for each in value[:most]]
    return value


def _config(path: Path) -> None:
    schedule = load_config(path).config.schedule
    assert schedule.speed_target is None or 0 < schedule.speed_target <= 1e6
    assert 1 <= schedule.profile_seconds <= 600


def _step_times() -> Any:
    from dataclasses import asdict

    from sglang_dspark.serving import profile

    table = profile.measure(KEY, Machine(requests=2), 5.0, lambda line: None)
    return json.loads(json.dumps({"format": cost_table.FORMAT, **asdict(table)}))


def _read_step_times(path: Path) -> None:
    model = CostModel(cost_table.load(path, KEY), 8)
    for requests in (1, 3, 8):
        for depth in range(KEY.gamma + 1):
            seconds = model.predict(Step(requests, requests * (1 + depth), 4096 * requests, depth))
            assert 0 < seconds < np.inf
            model.observe(Step(requests, requests, 0, depth), 0.02)


def _sts() -> Any:
    table = json.loads((SHIPPED / "sts.json").read_text()) | {"fit_prompts": ["00"]}
    for each in table["tables"].values():
        each["held_out"] = {"prompts": 1}
    return table


def _read_sts(path: Path) -> None:
    sts = read_sts(path, gamma=3)
    tables = [sts.table(temperature).followed for temperature in (0.0, 1.0)]
    online = OnlineCalibration(tables, pool_rows=4)
    rows = np.zeros(1, np.int64)
    out = np.empty((1, 3), np.float32)
    online.confidence(np.full((1, 3), 2.0, np.float32), rows, out, (rows, rows + 1))
    assert ((out >= 0) & (out <= 1)).all()


def _expert_times() -> Any:
    import tempfile

    key = times.TimesKey("a cpu", "bf16", "4 experts", "float32", False, "1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        timings = (times.Timing(1, "torch", 5.0), times.Timing(8, "torch", 9.0))
        times.save(times.TimesTable(key, "2026", timings, {"other": "absent"}), path)
        return json.loads(path.read_text())


def _bench(path: Path) -> None:
    from sglang_dspark.common.files import load_json, reading

    with reading(path, "result of `dspark bench`", "name such a result file"):
        taken_again(load_json(path)["metrics"])


def _mooncake() -> Any:
    return [
        {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [1, 2]},
        {"timestamp": 27, "input_length": 12, "output_length": 0, "hash_ids": [3]},
        {"timestamp": 900.5, "input_length": 513, "output_length": 2, "hash_ids": [1, 4]},
    ]


def _burstgpt() -> Any:
    return [
        ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"],
        ["5", "ChatGPT", "472", "18", "490", "Conversation log"],
        ["45.5", "GPT-4", "12", "0", "12", "API log"],
        ["118", "ChatGPT", "9", "7", "16", "Conversation log"],
    ]


def _chats() -> Any:
    said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    return [
        {"id": "a", "domain": "math", "turns": ["1 + 1?"]},
        {"id": "b", "prompt": "Write a line."},
        {"messages": [{"role": "system", "content": "Be brief."}, *said]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
    ]


def _target() -> Any:
    config = {"hidden_size": 64, "vocab_size": 260, "num_hidden_layers": 3}
    return {"architectures": ["LlamaForCausalLM"], "text_config": config, **config}


KINDS = (
    Kind("configuration", "config", "dspark.yaml", lambda: CONFIG, _config, None, 2.0),
    Kind("sweep", "config", "sweep.yaml", _example("configs/sweep/cpu-demo.yaml"), load_sweep,
         None),
    Kind("burst sweep", "config", "sweep.yaml", _example("configs/sweep/cpu-burst.yaml"),
         load_sweep, None),
    Kind("arm", "config", "arm.yaml", _example("configs/serve/dspark-fixed-gamma.yaml"), load_arm,
         None),
    Kind("training", "config", "train.yaml", _example("configs/train/tiny.yaml"),
         training.load_config, None, 2.0),
    Kind("plan of traces", "config", "traces.yaml", _example("configs/eval/traces.yaml"), load_plan,
         None),
    Kind("step times", "tables", "times.json", _step_times, _read_step_times, share=2.0),
    Kind("calibration", "tables", "sts.json", _sts, _read_sts, share=2.0),
    Kind("stock calibration", "tables", "sts.json", lambda: STOCK_STS, _read_sts),
    Kind("expert times", "tables", "times.json", _expert_times, times.read),
    Kind("results of drafters", "records", "drafters_tau.json",
         lambda: _short(_published("drafters_tau")()), lambda path: read_results(path.parent)),
    Kind("results of reliability", "records", "drafters_reliability.json",
         lambda: _short(_published("drafters_reliability")()),
         lambda path: read_results(path.parent)),
    Kind("results of a bench", "records", "adaptive.json",
         lambda: _short(_published("adaptive_cpu")()), _bench),
    Kind("load in mooncake", "records", "trace.jsonl", _mooncake,
         lambda path: read_load(path, "mooncake"), LINES),
    Kind("load in burstgpt", "records", "trace.csv", _burstgpt,
         lambda path: read_load(path, "burstgpt"), TABLE),
    Kind("prompts", "records", "prompts.jsonl", _chats, read_prompts, LINES),
    Kind("prompts as a list", "records", "prompts.json", _chats, read_prompts),
    Kind("training prompts", "records", "prompts.jsonl", _chats, read_training_prompts, LINES),
    Kind("vocabulary", "records", "vocabulary.json", lambda: [1, 5, 9], read_vocabulary, share=0.5),
    Kind("drafter's gamma", "records", "config.json",
         lambda: json.loads((SHIPPED / "config.json").read_text()),
         lambda path: drafter_gamma(path.parent), share=0.5),
    Kind("target's config", "records", "config.json", _target,
         lambda path: target_facts(path.parent), share=0.5),
)  # fmt: skip
