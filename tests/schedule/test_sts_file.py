"""sts.json: written, read back, read by stock SGLang's format, refused where it does not belong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.calibration import Calibration, Observations, fit
from sglang_dspark.schedule.sts_file import (
    GREEDY,
    SAMPLED,
    StsFile,
    StsTable,
    read_sts,
    regime,
    write_sts,
)


class StockTable(msgspec.Struct, frozen=True):
    """The fields that SGLang 0.5.23 reads (srt/speculative/dspark_components/dspark_sts.py)."""

    temperatures: list[float]
    dataset: str = ""
    num_samples: int = 0
    ece_before: list[float] = []
    ece_after: list[float] = []


def _table(*temperatures: float) -> StsTable:
    return StsTable(
        temperatures=temperatures,
        sampling={"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0},
        dataset="prompts",
        prompts=12,
        steps=345,
        counts=(345,) * len(temperatures),
        ece_before=(0.1,) * (len(temperatures) - 1) + (math.nan,),
        ece_after=(0.01,) * (len(temperatures) - 1) + (math.nan,),
        shift=-0.5,
        shifted_temperatures=temperatures[::-1],
        held_out={"prompts": 12},
        position_shifts=(0.25,) * len(temperatures),
        request_spread=0.15,
    )


@pytest.fixture
def sts() -> StsFile:
    return StsFile(
        tables={GREEDY: _table(1.5, 0.8), SAMPLED: _table(1.25, 0.9)},
        drafter_sha256="d" * 64,
        target_sha256="e" * 64,
        fit_prompts=("00aa", "11bb"),
        versions={"torch": "2"},
        date="2026-11-21T00:00:00+00:00",
    )


def test_comes_back_as_written(sts: StsFile, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "sts.json"
    write_sts(path, sts)
    back = read_sts(path, drafter_sha256="d" * 64, gamma=2)
    assert repr(back) == repr(sts), "NaN, which equals nothing, included"
    assert back.table(0.0).plain == Calibration((1.5, 0.8))
    assert back.table(0.7).plain == Calibration((1.25, 0.9))
    ours = Calibration((0.9, 1.25), -0.5, (0.25, 0.25))
    assert back.table(0.7).shifted == ours
    assert back.table(0.7).followed == replace(ours, spread=0.15)
    assert [regime(t) for t in (0.0, 0.7)] == [GREEDY, SAMPLED]
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_a_missing_regime_borrows_the_other(sts: StsFile) -> None:
    one = replace(sts, tables={GREEDY: sts.tables[GREEDY]})
    assert one.table(1.0) is one.table(0.0) is sts.tables[GREEDY]


def test_stock_sglang_reads_it(sts: StsFile, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    write_sts(path, sts)
    stock = msgspec.json.decode(path.read_bytes(), type=StockTable)
    assert stock.temperatures == [1.25, 0.9]
    assert stock.num_samples == 345
    assert len(stock.ece_before) == len(stock.ece_after) == 2


def test_reads_a_table_of_stock_sglang(tmp_path: Path) -> None:
    path = tmp_path / "stock.json"
    path.write_bytes(msgspec.json.encode(StockTable([1.1, 0.7, 2.0], "mine", 9)))
    sts = read_sts(path, drafter_sha256="any, for it records none", gamma=3)
    assert sts.table(0.0).shifted == sts.table(1.0).plain == Calibration((1.1, 0.7, 2.0))
    assert sts.drafter_sha256 == ""
    assert read_sts(path, gamma=2).table(0.0).shifted == Calibration((1.1, 0.7))
    with pytest.raises(DSparkError, match="fitted for gamma 3"):
        read_sts(path, gamma=5)


def test_table_of_another_drafter_is_refused(sts: StsFile, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    write_sts(path, sts)
    with pytest.raises(DSparkError, match="fitted to another drafter") as caught:
        read_sts(path, drafter_sha256="f" * 64)
    assert "\n" not in str(caught.value)
    assert "dspark calibrate" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"temperatures": []}', '{"temperatures": [1, 0]}', '{"temperatures": ["a"]}',
     '{"temperatures": [1, -2]}', '{"format": "sglang-dspark sts 1"}'],
)  # fmt: skip
def test_what_is_no_table_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    path.write_text(content)
    with pytest.raises(DSparkError, match="is no calibration table") as caught:
        read_sts(path)
    assert "\n" not in str(caught.value)


def test_missing_file_and_bad_place(sts: StsFile, tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="cannot read"):
        read_sts(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(DSparkError, match="cannot write"):
        write_sts(tmp_path / "file" / "sts.json", sts)


def test_tables_must_agree(sts: StsFile) -> None:
    with pytest.raises(ValueError, match="different gamma"):
        replace(sts, tables={GREEDY: _table(1.0, 1.0), SAMPLED: _table(1.0)})
    with pytest.raises(ValueError, match="expected tables"):
        replace(sts, tables={"lukewarm": _table(1.0)})
    with pytest.raises(ValueError, match="expected tables"):
        replace(sts, tables={})


def test_provenance_is_in_the_file(sts: StsFile, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    write_sts(path, sts)
    raw = json.loads(path.read_text())
    for name in ("drafter_sha256", "target_sha256", "versions", "date", "fit_prompts"):
        assert raw[name], name
    assert raw["tables"][SAMPLED]["sampling"]["temperature"] == 1.0


def test_files_without_our_later_fields_are_read(sts: StsFile, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    write_sts(path, sts)
    raw = json.loads(path.read_text())
    for table in raw["tables"].values():
        del table["position_shifts"], table["request_spread"]
    path.write_text(json.dumps(raw))
    table = read_sts(path).table(0.0)
    assert table.followed == table.shifted == Calibration((0.8, 1.5), -0.5)
    assert table.shifted.shifts == (-0.5, -0.5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperatures": [1.5, 1e308]}, "a temperature of 1e+308, not from 0.01 to 100"),
        ({"temperatures": [1.5, 1e-300]}, "a temperature of 1e-300, not from 0.01 to 100"),
        ({"temperatures": [1.5, True]}, "True is not a number"),
        ({"temperatures": [1.5, [1.0]]}, "not a number"),
        ({"temperatures": "12"}, "'1' is not a number"),
        ({"shifted_temperatures": [1.0, 101.0]}, "a temperature of 101"),
        ({"shift": 1e308}, "is not a number from -1000 to 1000"),
        ({"position_shifts": [0.0, -2e3]}, "is not a number from -1000 to 1000"),
        ({"request_spread": 10.0}, "is not a number from 0 to 9"),
        ({"steps": -1}, "-1 is no integer from 0"),
        ({"counts": [1, 2.5]}, "2.5 is no integer from 0"),
    ],
)
def test_what_no_fit_finds_is_refused(
    sts: StsFile, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    path = tmp_path / "sts.json"
    write_sts(path, sts)
    raw = json.loads(path.read_text())
    raw["tables"][GREEDY] |= change
    path.write_text(json.dumps(raw))
    with pytest.raises(DSparkError, match="is no calibration table") as caught:
        read_sts(path)
    assert says in str(caught.value)


def test_a_table_for_more_drafts_serves_fewer(sts: StsFile, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    write_sts(path, sts)
    cut = read_sts(path, drafter_sha256="d" * 64, gamma=1)
    assert cut.gamma == 1
    for name, table in cut.tables.items():
        whole = sts.tables[name]
        assert table.plain == Calibration(whole.temperatures[:1])
        assert table.followed == Calibration(whole.shifted_temperatures[:1], -0.5, (0.25,), 0.15)
        assert len(table.counts) == len(table.ece_before) == len(table.ece_after) == 1
    with pytest.raises(DSparkError, match="fitted for gamma 2, the drafter runs with 3"):
        read_sts(path, gamma=3)


def test_a_fit_of_fewer_positions_finds_the_same_temperatures() -> None:
    """`shortened` is exact: later positions are unseen when an earlier one is fitted."""
    rng = np.random.default_rng(0)
    steps, gamma = 600, 5
    logits = rng.normal(1.0, 1.5, (steps, gamma))
    hits = rng.uniform(size=(steps, gamma)) < 1 / (1 + np.exp(-0.6 * logits))
    verified = rng.integers(0, gamma + 1, steps)
    accepted = np.minimum(np.cumprod(hits, axis=1).sum(axis=1), verified)
    whole = fit(Observations(logits, accepted, verified, np.arange(steps)))
    for fewer in (1, 3):
        data = Observations(
            logits[:, :fewer],
            np.minimum(accepted, fewer),
            np.minimum(verified, fewer),
            np.arange(steps),
        )
        assert fit(data).temperatures == whole.temperatures[:fewer]
    assert len(set(whole.temperatures)) > 2
