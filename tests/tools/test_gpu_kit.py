"""tools/gpu/run: every stage runs here, none twice that ended well, a fault ends its own stage."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.gpu.kit import runner
from tools.gpu.kit.stages import STAGES, Stage

pytestmark = pytest.mark.xdist_group("gpu-kit")  # one dry run for all
ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "tools" / "gpu"


def kit(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KIT / "run", "--out", out, "--stamps", out.parent / "stamps", *words],
        cwd=out.parent,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A dry run of all stages."""
    out = tmp_path_factory.mktemp("kit") / "out"
    done = kit(out, "--commit", "abc1234")
    assert done.returncode == 0, done.stderr
    return {file.stem: json.loads(file.read_text()) for file in out.iterdir()}


def test_every_stage_leaves_a_result_file(results: dict[str, dict[str, Any]]) -> None:
    assert set(results) == {stage.name for stage in STAGES}
    for name, found in results.items():
        assert found["command"] == f"tools/gpu/run {name}"
        assert found["commit"] == "abc1234"
        assert found["incomplete"] is None
        assert found["device"]


def test_parity_is_of_all_kernels_here_too(results: dict[str, dict[str, Any]]) -> None:
    found = results["parity"]["metrics"]
    assert found["admission"]["batches"] >= 50
    assert found["admission"]["different"] == []
    assert found["accept"]["requests"] >= 40
    assert found["accept"]["wrong"] == []
    assert len(found["products"]) >= 70
    assert max(found["products"].values()) < 1e-3
    assert len(found["layers"]) == 7


def test_without_a_device_nothing_is_said_to_be_measured(
    results: dict[str, dict[str, Any]],
) -> None:
    if results["device"]["device"] != "no CUDA device":
        pytest.skip("there is one")
    for name in ("admission", "accept", "experts"):
        assert results[name]["metrics"]["measured"] is False


def test_a_name_that_is_none_is_one_line(tmp_path: Path) -> None:
    done = kit(tmp_path / "out", "parrity")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kit: no stage parrity; there are {', '.join(s.name for s in STAGES)}\n"


def test_the_page_lists_every_stage_and_its_limit() -> None:
    rows = re.findall(r"^\| `(\w+)` .* \| (\d+) \|$", (KIT / "README.md").read_text(), re.MULTILINE)
    assert rows == [(stage.name, str(stage.limit_s)) for stage in STAGES]


def stage(folder: Path, name: str, code: str, limit_s: int = 60) -> Stage:
    """A stage that counts its runs in NAME.runs and does what the code says."""
    counted = f"open({str(folder / name)!r} + '.runs', 'a').write('x')\n"
    (folder / f"stage_{name}.py").write_text(f"import json, sys, time\n{counted}{code}\n")
    return Stage(name, f"stage_{name}", limit_s, "a test's")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules a stage may be; the code of the kit is what lies in it."""
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    return tmp_path


FINE = "print(json.dumps({'device': 'd', 'a': 1})); print(json.dumps({'row': 5}))"


def test_what_ended_well_is_not_run_again(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine, kept = stage(modules, "fine", FINE), modules / "kept"
    seen = []
    for code in ("one", "one", "other"):
        monkeypatch.setattr(runner, "fingerprint", lambda code=code: code)
        assert runner.run_stages([fine], kept, modules / "out", "c", io.StringIO()) == []
        seen.append((modules / "fine.runs").read_text())
        found = json.loads((modules / "out" / "fine.json").read_text())
        assert found["metrics"] == {"a": 1, "rows": [5]}
        assert (found["device"], found["fingerprint"]) == ("d", code)
    assert seen == ["x", "x", "xx"]
    (kept / "fine.json").write_text("{")
    assert runner.run_stages([fine], kept, modules / "out", "c", io.StringIO()) == []
    assert (modules / "fine.runs").read_text() == "xxx"


def test_a_fault_ends_one_stage_and_what_it_said_is_kept(modules: Path) -> None:
    broken = stage(modules, "broken", f"{FINE}; sys.stdout.flush(); sys.exit(3)")
    slow = stage(modules, "slow", f"{FINE}; sys.stdout.flush(); time.sleep(60)", limit_s=3)
    stages, said = [broken, slow, stage(modules, "fine", FINE)], io.StringIO()
    out = modules / "out"
    for _ in range(2):  # neither is taken for done
        assert runner.run_stages(stages, modules / "kept", out, "c", said) == ["broken", "slow"]
    assert (modules / "broken.runs").read_text() == (modules / "slow.runs").read_text() == "xx"
    assert (modules / "fine.runs").read_text() == "x"
    for name, why in (("broken", "it ended with status 3"), ("slow", "not done within 3 s")):
        found = json.loads((out / f"{name}.partial.json").read_text())
        assert (found["incomplete"], found["metrics"]["rows"]) == (why, [5])
        assert f"kit: {name}: failed: {why}" in said.getvalue()
        assert not (out / f"{name}.json").exists()


def test_the_fingerprint_is_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    file = tmp_path / "kernels" / "one.py"
    found = set()
    for text in ("a", "b"):
        file.write_text(text)
        found.add(runner.fingerprint(tmp_path))
    file.rename(file.with_name("two.py"))
    assert len(found | {runner.fingerprint(tmp_path)}) == 3
