"""The trainer benchmark: our side runs on its own store, pairs are timed in turn, and without the
other package there is one clear line."""

from __future__ import annotations

import statistics
import time
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import paired_ratio
from sglang_dspark.training import benchmark


def test_pairs_are_interleaved_and_the_ratio_is_of_their_times() -> None:
    calls: list[str] = []

    def quick() -> None:
        calls.append("ours")
        time.sleep(0.02)

    def slow() -> None:
        calls.append("peer")
        time.sleep(0.06)

    found = benchmark.paired(quick, slow, anchors=10, repeats=6, warm_up=1)
    assert calls.count("ours") == calls.count("peer") == 7
    assert "ours ours ours" not in " ".join(calls)
    assert found["ratio"]["low"] <= found["ratio"]["value"] <= found["ratio"]["high"]
    assert min(found["seconds"]["ours"]) >= 0.02
    assert min(found["seconds"]["peer"]) >= 0.06
    kept = paired_ratio(found["seconds"]["peer"], found["seconds"]["ours"])
    assert [found["ratio"]["low"], found["ratio"]["high"]] == kept.bounds
    for side in ("ours", "peer"):
        typical = statistics.median(found["seconds"][side])
        assert found[f"{side}_anchors_per_s"] == pytest.approx(10 / typical)


def test_our_side_trains_on_random_answers(target_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "LAYERS", (0, 1))
    shape = benchmark.TrainerShape(
        sequences=2, anchors=4, prompt=4, answer=12, gamma=3, layers=1, draft_vocab=40,
        markov_rank=8,
    )  # fmt: skip
    benchmark.random_store(tmp_path / "store", target_dir, shape, stored=8)
    threads = torch.get_num_threads()
    trainer = benchmark.our_trainer(tmp_path, target_dir, shape, half=False)
    torch.set_num_threads(threads)
    sums = trainer.train_step()
    assert torch.isfinite(sums).all()
    assert 0 < int(sums[3]) <= shape.anchors_per_step
    if find_spec("speculators") is None:
        with pytest.raises(DSparkError, match="pip install --no-deps speculators"):
            benchmark.PeerStep(trainer, target_dir, shape, half=False)


def test_an_unknown_precision_is_one_line() -> None:
    outcome = CliRunner().invoke(app, ["bench", "trainer", "--precision", "float8"])
    assert isinstance(outcome.exception, DSparkError)
    assert "float8" in str(outcome.exception)
