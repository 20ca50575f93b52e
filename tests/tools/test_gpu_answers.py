"""tools/gpu/run: a server whose tokens are not the table's, or of another law, fails its stage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.tools.test_gpu_kit import kit
from tools.gpu.kit.models import TINY, ready
from tools.gpu.kit.sampled import deviation, obeys
from tools.gpu.kit.servers import wrong_tokens

pytestmark = pytest.mark.xdist_group("gpu-kit")


def test_a_share_that_speculation_changes_is_seen() -> None:
    assert deviation([2000, 4096], [2000, 4096]) == 0
    assert deviation([4096, 4096], [4096, 4096]) == 0
    assert deviation([2000, 4096], [2300, 4096]) > 6
    assert deviation([2000, 4096], [1700, 4096]) < -6


@pytest.mark.parametrize(("z", "obeyed"), [(0.0, True), (4.9, True), (5.1, False), (-5.1, False)])
def test_a_share_that_chance_does_not_explain_is_said(
    z: float, obeyed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert obeys("top-p", z) == obeyed
    said = f"sampled: top-p: {z} standard errors from plain decoding\n"
    assert capsys.readouterr().err == ("" if obeyed else said)


def test_a_wrong_token_is_counted() -> None:
    assert wrong_tokens("mtp1", {"users": 8, "right": [288, 288]}) is None
    line = wrong_tokens("mtp1", {"users": 8, "right": [285, 288]})
    assert line == "mtp1, 8 users: 3 of 288 tokens are not the table's"


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("stage", ["arms", "skip"])
def test_servers_that_say_another_token_fail_their_stage(tmp_path: Path, stage: str) -> None:
    """The table is changed behind the target's back, so every answer has wrong tokens."""
    table = ready(tmp_path / "home", TINY, "cpu") / "follows.npy"
    np.save(table, np.roll(np.load(table), 1))
    done = kit(tmp_path / "out", "--commit", "abc1234", stage)
    assert done.returncode == 1
    for server in ("plain", "dspark"):
        assert re.search(rf"{server}, \d users: \d+ of \d+ tokens are not", done.stderr)
    found = json.loads((tmp_path / "out" / f"{stage}.partial.json").read_text())
    rounds = [row for row in found["metrics"]["rows"] if "users" in row]
    assert rounds
    assert all(row["right"][0] < row["right"][1] for row in rounds)
