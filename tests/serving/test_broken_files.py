"""Any content of a file that a server reads: one line that refuses it, or a new measurement.

The real readers, on thousands of broken files; only the passes that are timed are made up.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import MOST_DEPTH, brief, load_json, load_yaml
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.errors import DSparkError
from sglang_dspark.paths import cache_root
from sglang_dspark.schedule.cost_model import CostModel, Step
from sglang_dspark.schedule.cost_table import FORMAT, cache_path
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.sts_file import read_sts
from sglang_dspark.serving import profile
from sglang_dspark.serving.checkpoint import validate_drafter
from sglang_dspark.serving.config import load_config
from tests.broken_files import breakages, is_one_line, laughs, nested, refused
from tests.serving.test_profile import KEY, Machine

SHIPPED = Path(__file__).parents[2] / "drafters" / "smollm2-135m-dspark"
CONFIG = {
    "cpu": {"threads": 2, "matrix_kernel": True, "overlap": False, "weights": "int8"},
    "schedule": {"mode": "auto", "profile_seconds": 20.0, "fairness_floor": 1, "speed_target": 9.0},
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def usable(found: profile.Profiled) -> None:
    """The table belongs here and every step that it is asked for takes time."""
    assert found.table.key == KEY
    model = CostModel(found.table, 8)
    for requests in (1, 3, 8):
        for depth in range(KEY.gamma + 1):
            seconds = model.predict(Step(requests, requests * (1 + depth), 4096 * requests, depth))
            assert 0 < seconds < np.inf
            model.observe(Step(requests, requests, 0, depth), 0.02)


def test_broken_tables_are_measured_again(cache: Path) -> None:
    profile.table_for(KEY, Machine(), 5.0, lambda line: None)
    path = cache_path(KEY)
    valid = path.read_text()
    outcomes: Counter[str] = Counter()
    for content in breakages(valid, seed=1, count=1000):
        path.write_bytes(content)
        told: list[str] = []
        machine = Machine(requests=2)  # the fewer, the sooner measured
        found = profile.table_for(KEY, machine, 5.0, told.append)
        usable(found)
        if machine.calls == 0:
            assert told == []
            outcomes["read"] += 1  # the damage left a table, or hit what does not matter
            continue
        assert is_one_line(told[0], path), told[0][:1000]
        assert "kept in" in found.source
        assert json.loads(path.read_text())["key"] == asdict(KEY)
        outcomes["measured again"] += 1
    print(f"step times: {dict(outcomes)}")
    assert outcomes.total() > 1000
    assert outcomes["measured again"] > 800
    path.write_text(valid)
    assert profile.table_for(KEY, Machine(), 5.0, lambda line: None).source == f"read from {path}"


def test_broken_calibrations_are_refused(tmp_path: Path) -> None:
    valid = (SHIPPED / "sts.json").read_text()
    short = json.loads(valid) | {"fit_prompts": ["00"]}
    for table in short["tables"].values():
        table["held_out"] = {"prompts": 1}

    def read(path: Path) -> None:
        sts = read_sts(path, gamma=3)
        tables = [sts.table(temperature).followed for temperature in (0.0, 1.0)]
        online = OnlineCalibration(tables, pool_rows=4)
        rows = np.zeros(1, np.int64)
        out = np.empty((1, 3), np.float32)
        online.confidence(np.full((1, 3), 2.0, np.float32), rows, out, (rows, rows + 1))
        assert ((out >= 0) & (out <= 1)).all()

    _fuzz("calibrations", json.dumps(short), tmp_path, read, 600)
    stock = json.dumps({"temperatures": [1.1, 0.7, 2.0], "dataset": "mine", "num_samples": 9})
    _fuzz("stock calibrations", stock, tmp_path, read, 200)


def test_broken_configurations_are_refused(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        schedule = load_config(path).config.schedule
        assert schedule.speed_target is None or 0 < schedule.speed_target <= 1e6
        assert 1 <= schedule.profile_seconds <= 600

    _fuzz("configurations", json.dumps(CONFIG), tmp_path, read, 800, is_yaml=True)


def test_broken_drafter_configurations_are_refused(tmp_path: Path) -> None:
    valid = (SHIPPED / "config.json").read_text()
    facts = json.loads(valid)
    target = Target("target", facts["hidden_size"], facts["vocab_size"], facts["num_target_layers"])

    def read(path: Path) -> None:
        validate_drafter(path.parent, target, weights=False)

    _fuzz("drafters", valid, tmp_path, read, 300)


def _fuzz(
    what: str,
    valid: str,
    folder: Path,
    read: Callable[[Path], None],
    count: int,
    *,
    is_yaml: bool = False,
) -> None:
    """`read` takes the valid file, and refuses most broken ones in one line."""
    outcomes: Counter[str] = Counter()
    for number, content in enumerate((valid.encode(), valid.encode("utf-8-sig"))):
        assert not refused(read, _placed(folder / what / f"valid-{number}", content))
    for number, content in enumerate(breakages(valid, len(what), count, is_yaml=is_yaml)):
        path = _placed(folder / what / str(number), content)
        outcomes["refused" if refused(read, path) else "read"] += 1
    print(f"{what}: {dict(outcomes)}")
    assert outcomes.total() > count
    assert outcomes["refused"] > 0.5 * count


def _placed(folder: Path, content: bytes) -> Path:
    """A file in a folder of its own: a configuration is read once a path and process."""
    folder.mkdir(parents=True)
    path = folder / "config.json"
    path.write_bytes(content)
    return path


def _directory(path: Path) -> None:
    path.mkdir()


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _of_another_gamma(path: Path) -> None:
    other = replace(KEY, gamma=2)
    shorter = Machine()
    shorter.gamma = 2
    table = profile.measure(other, shorter, 5.0, lambda line: None)
    path.write_text(json.dumps({"format": FORMAT, **asdict(table)}))


@pytest.mark.parametrize(
    ("put", "says", "kept"),
    [
        (_directory, "Is a directory", False),
        (_dangling, None, True),
        (_loop, None, True),
        (_of_another_gamma, "gamma: 2, not 3", True),
    ],
)
def test_any_file_in_place_of_the_table(
    cache: Path, put: Callable[[Path], None], says: str | None, kept: bool
) -> None:
    path = cache_path(KEY)
    path.parent.mkdir(parents=True)
    put(path)
    told: list[str] = []
    found = profile.table_for(KEY, Machine(), 5.0, told.append)
    usable(found)
    assert ("kept in" in found.source) is kept
    assert [name for name in os.listdir(path.parent) if name.startswith(".")] == []
    if says is None:
        assert told[0].startswith("measuring step times"), "there is nothing to complain of"
    else:
        assert says in told[0]
        assert is_one_line(told[0], path)


def test_each_gamma_has_a_table_of_its_own(cache: Path) -> None:
    shorter = Machine()
    shorter.gamma = 2
    other = replace(KEY, gamma=2)
    sources = [
        profile.table_for(key, machine, 5.0, lambda line: None).source.split()[0]
        for key, machine in ((KEY, Machine()), (other, shorter), (KEY, Machine()), (other, shorter))
    ]
    assert sources == ["measured", "measured", "read", "read"]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(DSparkError, match="set XDG_CACHE_HOME"):
        cache_root()
    told: list[str] = []
    usable(profile.table_for(KEY, Machine(), 5.0, told.append))
    assert sum("set XDG_CACHE_HOME" in line for line in told) == 2  # neither read nor kept


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -1e999}', "-1e999 is too large a number"),
        (f'{{"a": {"9" * 400}}}', "an integer of 400 digits"),
        ('{"a": 1, "b": 2, "a": 3}', "the field a stands twice"),
        (nested(MOST_DEPTH + 1), f"nested deeper than {MOST_DEPTH}"),
        (nested(100_000), f"nested deeper than {MOST_DEPTH}"),
    ],
    ids=["NaN", "infinite", "long", "twice", "deep", "very deep"],
)
def test_json_within_limits(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        load_json(path)
    path.write_text(nested(MOST_DEPTH))
    assert load_json(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (laughs(6), "more than 20000 entries"),
        ("a: &a [*a]", "an alias stands inside what it stands for"),
        ("a: 1\na: 2", "the field a stands twice"),
        ("a: !!int ''", "not of the type its tag says"),
        ("a: 0x" + "f" * 5000, "an integer of 5002 digits"),
        ("a: [", "line 1, column 5"),
        ("x: '" + "y" * (1 << 18) + "'", "larger than 256 KiB"),
    ],
    ids=["laughs", "alias", "twice", "tag", "long", "cut off", "large"],
)
def test_yaml_within_limits(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        load_yaml(path)


def test_aliases_and_merges_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: [*a, *a]\n")
    assert load_yaml(path) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": 2},
        "c": [{"x": 1, "y": 2}] * 2,
    }


def test_messages_are_short_and_printable() -> None:
    bad = "\N{REPLACEMENT CHARACTER}"
    assert brief("a\n\tb \x1b[31m \ud800") == f"a b {bad}[31m {bad}"
    assert len(brief("x" * 10**6)) == 160


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(DSparkError, match=r"taken is no file that can be replaced"):
        replace_text(tmp_path / "taken", "new", "a text")
    assert os.listdir(tmp_path) == ["taken"]
