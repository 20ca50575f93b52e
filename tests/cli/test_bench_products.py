"""`dspark bench products`: what it refuses, and a run over small weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dspark.backends.cpu import csrc
from sglang_dspark.backends.cpu.linear import Processor
from sglang_dspark.backends.cpu.weight_formats import BFLOAT16, BYTES
from sglang_dspark.cli import _bench_products
from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError

RUN = ["bench", "products", "--repeats", "3"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--formats", "int4"], "--formats int4: choose of float32, bfloat16, int8"),
        (["--rows", "1,0"], "--rows '1,0': give numbers from 1 to 256"),
        (["--rows", ""], "--rows '': give numbers"),
        (["--levels", "3"], "--levels '3': give numbers from 1 to 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    result = tmp_path / "products.json"
    found = CliRunner().invoke(app, [*RUN, *options, "--json", str(result)])
    assert isinstance(found.exception, DSparkError)
    assert said in str(found.exception)
    assert not result.exists()


@pytest.mark.skipif(csrc.why_not() is not None, reason="no fused multiply-add")
def test_each_way_has_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ((48, 64), (32, 128))
    monkeypatch.setattr(_bench_products, "_LAYER", small)
    monkeypatch.setattr(_bench_products, "SHAPES", small * 2)
    result = tmp_path / "products.json"
    options = ["--formats", "bfloat16,int8", "--rows", "1,3", "--json", str(result)]
    found = CliRunner().invoke(app, [*RUN, *options])
    assert found.exit_code == 0, found.output
    rows = json.loads(result.read_text())["metrics"]["products"]
    ways = [(row["format"], row["activations"], row["rows"], row["level"]) for row in rows]
    host = Processor.host()
    beside = ["float32", "bfloat16"] if host.multiplies(BFLOAT16) else ["float32"]
    bits = ["16-bit", "8-bit"] if host.multiplies(BYTES) else ["16-bit"]
    assert ways == [
        *(("bfloat16", x, count, level) for x in beside for count in (1, 3) for level in (1, 2)),
        *(("int8", x, count, None) for x in bits for count in (1, 3)),
    ]
    for row in rows:
        assert len(row["repeats"]) == 3
        assert min(row["repeats"]) <= row["ms"] <= max(row["repeats"])
        size = 2 * (48 * 64 + 32 * 128) * (2 if row["format"] == "bfloat16" else 17 / 16)
        assert row["gb_per_s"] == pytest.approx(size / row["ms"] / 1e6)
