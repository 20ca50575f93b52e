"""The kit's second call: kernels are compared in shares and in processes, time is divided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.benchmarks.operators import OPERATORS
from tests.tools.kit_runs import ROOT
from tools.gpu.kit import experts, operators, parity
from tools.gpu.kit.processes import run_together
from tools.gpu.kit.stages import STAGES

pytestmark = pytest.mark.xdist_group("gpu-kit")


def doubled(number: int) -> int:
    return 2 * number


def killed() -> None:
    """Ends without a word, as a process that the kernel kills for its memory."""
    os._exit(9)


def test_jobs_run_side_by_side_and_what_they_raise_comes_back() -> None:
    jobs = {"one": partial(doubled, 1), "two": partial(doubled, 2), "bad": partial(int, "x")}
    found = dict(run_together(jobs, 2, 120.0))
    assert (found["one"], found["two"]) == (2, 4)
    assert isinstance(found["bad"], ValueError)


def test_a_job_that_does_not_end_is_given_up_and_killed(tmp_path: Path) -> None:
    mark = tmp_path / "ended"
    late = f"import time, pathlib; time.sleep(10); pathlib.Path({str(mark)!r}).touch()"
    began = time.monotonic()
    jobs: dict[str, Any] = {"late": partial(exec, late), "gone": killed}
    found = dict(run_together(jobs, 2, 5.0))
    assert time.monotonic() - began < 20
    assert {type(each) for each in found.values()} == {TimeoutError}
    assert str(found["gone"]) == "not done within 5 s"
    time.sleep(max(0.0, began + 17 - time.monotonic()))
    assert not mark.exists(), "its process goes on"


def test_on_a_device_long_comparisons_are_divided() -> None:
    assert list(parity.jobs(("accept", "greedy"), "cpu")) == ["accept 1/1", "greedy 1/1"]
    found = parity.jobs(("markov", "greedy"), "cuda")
    assert list(found) == [*(f"markov {n}/4" for n in (1, 2, 3, 4)), "greedy 1/1"]
    assert found["markov 2/4"].args == ("cuda", (1, 4))  # type: ignore[attr-defined]


def test_shares_have_every_case_once() -> None:
    cases = "abcdefg"
    shares = [list(parity.shared(cases, (part, 3))) for part in range(3)]
    assert sorted(each for share in shares for each in share) == list(enumerate(cases))
    assert shares[1] == [(1, "b"), (4, "e")]


def test_a_comparison_is_reported_once_all_its_shares_have_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = parity.Findings(("accept", "greedy"), "cuda")
    for part in (1, 2, 3):
        findings.add(f"accept {part}/4", {"requests": 10, "undecided": 0, "wrong": []})
    assert capsys.readouterr().out == ""
    findings.add("accept 4/4", {"requests": 7, "undecided": 1, "wrong": []})
    told = json.loads(capsys.readouterr().out)
    assert told == {"accept": {"requests": 37, "undecided": 1, "wrong": []}}
    assert findings.whole
    findings.add("greedy 1/1", {"requests": 3, "wrong": ["step 2, bonus"]})
    assert "parity: greedy, step 2, bonus is off" in capsys.readouterr().err
    assert not findings.whole


def test_a_share_that_was_not_made_fails_the_comparison(
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = parity.Findings(("markov",), "cuda")
    findings.add("markov 1/4", TimeoutError("not done within 40 s"))
    for part in (2, 3, 4):
        findings.add(f"markov {part}/4", {"drafts": 5, "wrong": []})
    told = json.loads(capsys.readouterr().out)["markov"]
    assert told["drafts"] == 15
    assert told["failed"] == ["markov 1/4: not done within 40 s"]
    assert not findings.whole


def test_layers_that_are_off_are_named() -> None:
    found = {"bf16 x bf16": 1e-6, "fp8 x fp8": 0.2, "bf16 x nvfp4": float("nan")}
    assert parity.wrong("layers", found) == ["fp8 x fp8: 0.2", "bf16 x nvfp4: nan"]


def test_every_operator_is_compiled_ahead() -> None:
    assert set(operators.COMPILED_IN) == set(operators.TIMED) <= set(OPERATORS)
    assert len(operators.compiling()) == sum(operators.COMPILED_IN.values())
    assert set(operators.CHANGED) <= set(parity.PARTS)
    assert not any(name.split()[0] in parity.PARTS for name in operators.compiling())


def test_experts_are_compiled_by_kind_and_tokens() -> None:
    jobs = experts.compiling()
    assert len(jobs) == len(experts.SLIM.kinds) * len(experts.SLIM.tokens) == 16
    matrix = jobs["compiling bf16 x nvfp4, 64 tokens"].args[0]  # type: ignore[attr-defined]
    assert (matrix.kinds, matrix.tokens) == (("bf16 x nvfp4",), (64,))
    assert [layer.name for layer in matrix.layers] == ["DeepSeek-V4-Flash"]


def test_rows_end_with_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    left = iter([9.0, 2.0, 1.0])
    assert not experts.print_until(iter([{"a": 1}, {"a": 2}, {"a": 3}]), lambda: next(left))
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert experts.print_until(iter([{"a": 1}]), lambda: 1.0)


def test_a_kind_that_is_off_fails_the_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    diffs = {kind: {kind: 1e-6} for kind in experts.SLIM.kinds}
    diffs["fp8 x fp8"] = {"fp8 x fp8": 0.1}
    monkeypatch.setattr(experts, "run_together", lambda *_: iter(diffs.items()))
    assert not experts.prepare("cpu", 1.0)
    assert "experts: fp8 x fp8 is off: 0.1" in capsys.readouterr().err
    monkeypatch.setattr(experts, "run_together", lambda *_: iter([("bf16 x mxfp4", OSError("x"))]))
    assert not experts.prepare("cpu", 1.0), "a kind that was not compared is off"


def test_the_second_call_fits_three_minutes() -> None:
    """Each of its stages begins although the one before took all of its time."""
    limits = {stage.name: stage for stage in STAGES}
    least = limits["experts"].least_s
    assert least is not None
    assert limits["operators"].limit_s + least <= 180


def test_the_dry_run_compares_and_measures_nothing(results: dict[str, dict[str, Any]]) -> None:
    found = {name: results[name]["metrics"] for name in ("operators", "experts")}
    for name in operators.CHANGED:
        assert found["operators"][name]["wrong"] == []
    assert found["operators"]["accept_listed"]["requests"] >= 40
    assert [each["measured"] for each in found.values()] == [False, False]
    assert set(found["experts"]["calc_diff"]) == set(experts.SLIM.kinds)
    assert len(found["experts"]["rows"]) == 4 * 4
    assert "ours_us" not in found["experts"]["rows"][0]


@pytest.mark.slow
def test_all_kernels_can_be_compared() -> None:
    """Kernels that have not changed are compared by hand, in no stage."""
    command = [sys.executable, "-m", "tools.gpu.kit.parity"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    assert found["admission"]["batches"] >= 50
    assert found["accept"]["requests"] >= 40
    assert found["accept_block"]["requests"] >= 40
    assert found["markov"]["drafts"] >= 200
    assert found["greedy"]["requests"] >= 100
    assert found["commit"]["rows"] >= 200
    assert found["commit_write"]["rows"] >= 60
    assert max(found["products"].values()) < 1e-3
    assert (len(found["products"]) >= 70, len(found["layers"])) == (True, 7)
    done = subprocess.run([*command, "greedly"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no kernel greedly; there are window_attention, pass_rows," in done.stderr
