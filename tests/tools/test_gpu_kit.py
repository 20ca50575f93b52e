"""tools/gpu/run: every stage runs here, none twice that ended well, a fault ends its own stage."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.models.drafters import shipped_drafter_path
from tests.tools.kit_runs import ALONE, KIT, ROOT, dry_run, kit
from tools.gpu.kit import runner
from tools.gpu.kit.first import LATER, PLAIN
from tools.gpu.kit.rounds import SCHEDULED
from tools.gpu.kit.runner import Places, run_stages
from tools.gpu.kit.servers import server_of
from tools.gpu.kit.stages import STAGES, Stage
from tools.gpu.packing.arrival import environment, take_in
from tools.gpu.packing.pieces import Contents, pack

pytestmark = pytest.mark.xdist_group("gpu-kit")  # one dry run for all


def test_every_stage_leaves_a_result_file(results: dict[str, dict[str, Any]]) -> None:
    assert set(results) == set(ALONE)
    for name, found in results.items():
        assert found["command"] == f"tools/gpu/run {name}"
        assert found["commit"] == "abc1234"
        assert found["incomplete"] is None
        assert found["device"]


def test_without_a_device_nothing_is_said_to_be_measured(
    results: dict[str, dict[str, Any]],
) -> None:
    if results["device"]["device"] != "no CUDA device":
        pytest.skip("there is one")
    for name in ("operators", "experts"):
        assert results[name]["metrics"]["measured"] is False


def test_a_name_that_is_none_is_one_line(tmp_path: Path) -> None:
    done = kit(tmp_path / "out", "parrity")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kit: no stage parrity; there are {', '.join(s.name for s in STAGES)}\n"


def test_the_page_lists_every_stage_and_its_limit() -> None:
    page = (KIT / "README.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` .* \| (\d+) \|$", page, re.MULTILINE)
    assert rows == [(stage.name, str(stage.limit_s)) for stage in STAGES]


def stage(folder: Path, name: str, code: str, limit_s: int = 60, **given: Any) -> Stage:
    """A stage that counts its runs in NAME.runs and does what the code says."""
    counted = f"open({str(folder / name)!r} + '.runs', 'a').write('x')\n"
    (folder / f"stage_{name}.py").write_text(f"import json, sys, time\n{counted}{code}\n")
    return Stage(name, f"stage_{name}", limit_s, "a test's", **given)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules a stage may be; the code of the kit is what lies in it."""
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "kept", tmp_path / "out", tmp_path / "home")


FINE = "print(json.dumps({'device': 'd', 'a': 1})); print(json.dumps({'row': 5}))"


def test_what_ended_well_is_not_run_again(
    modules: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = stage(modules, "fine", FINE)
    seen = []
    for code in ("one", "one", "other"):
        monkeypatch.setattr(runner, "fingerprint", lambda folders, code=code: code)
        assert run_stages([fine], places, "c", io.StringIO()) == []
        seen.append((modules / "fine.runs").read_text())
        found = json.loads((places.out / "fine.json").read_text())
        assert found["metrics"] == {"a": 1, "rows": [5]}
        assert (found["device"], found["fingerprint"]) == ("d", code)
        assert [file.name for file in places.out.iterdir()] == ["fine.json"]
    assert seen == ["x", "x", "xx"]
    (places.kept / "fine.json").write_text("{")
    assert run_stages([fine], places, "c", io.StringIO()) == []
    assert (modules / "fine.runs").read_text() == "xxx"


def test_results_of_an_earlier_call_come_again_only_when_asked(
    modules: Path, places: Places
) -> None:
    fine = stage(modules, "fine", FINE)
    assert run_stages([fine], places, "c", io.StringIO()) == []
    (places.out / "fine.json").unlink()
    for again in (False, True):
        assert run_stages([fine], places, "c", io.StringIO(), again=again) == []
        assert (places.out / "fine.json").exists() == again


def test_a_stage_whose_pieces_have_not_come_waits(modules: Path, places: Places) -> None:
    """Neither failed nor done: once they are here, the same call runs it."""
    pieces, said = modules / "pieces", io.StringIO()

    def fill(folder: Path) -> None:
        (folder / "one").write_bytes(bytes(3000))

    pack([Contents("odd", "", fill)], pieces, 8192, lambda line: None)
    stages = [stage(modules, "odd", FINE, needs=("odd",)), stage(modules, "fine", FINE)]
    (pieces / "2-odd.tar").rename(modules / "2-odd.tar")
    assert take_in(pieces, places.home, lambda line: None) == []
    assert run_stages(stages, places, "c", said) == []
    assert "kit: odd: waits for pieces 2-odd\n" in said.getvalue()
    assert [file.name for file in places.kept.iterdir()] == ["fine.json"]
    (modules / "2-odd.tar").rename(pieces / "2-odd.tar")
    assert take_in(pieces, places.home, lambda line: None) == []
    assert run_stages(stages, places, "c", said) == []
    assert (modules / "odd.runs").read_text() == "x"


def test_a_stage_that_may_not_end_in_time_is_left_for_the_next_call(
    modules: Path, places: Places
) -> None:
    stages, said = [stage(modules, "long", FINE, 400), stage(modules, "short", FINE)], io.StringIO()
    assert run_stages(stages, places, "c", said, seconds=300) == []
    assert re.search(r"kit: long: may take 400 s of \d+ left; run it in", said.getvalue())
    assert [file.name for file in places.out.iterdir()] == ["short.json"]


def test_what_a_stage_said_is_left_when_the_call_is_cut_off(modules: Path, places: Places) -> None:
    stage(modules, "slow", f"{FINE}; sys.stdout.flush(); time.sleep(20)")
    call = (
        "from pathlib import Path\nfrom tools.gpu.kit import runner\n"
        "from tools.gpu.kit.stages import Stage\n"
        f"here = Path({str(modules)!r})\nrunner.ROOT = here\n"
        "places = runner.Places(here / 'kept', here / 'out', here / 'home')\n"
        "runner.run_stages([Stage('slow', 'stage_slow', 300, 'slow')], places, 'c')\n"
    )
    lines = places.out / "slow.lines"
    with subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, start_new_session=True) as child:
        try:
            deadline = time.monotonic() + 120
            while not (lines.is_file() and "row" in lines.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            child.kill()
    assert json.loads(lines.read_text().splitlines()[-1]) == {"row": 5}


def test_a_fault_ends_one_stage_and_what_it_said_is_kept(modules: Path, places: Places) -> None:
    broken = stage(modules, "broken", f"{FINE}; sys.stdout.flush(); sys.exit(3)")
    slow = stage(modules, "slow", f"{FINE}; sys.stdout.flush(); time.sleep(60)", limit_s=5)
    stages, said = [broken, slow, stage(modules, "fine", FINE)], io.StringIO()
    out = places.out
    for _ in range(2):  # neither is taken for done
        assert run_stages(stages, places, "c", said) == ["broken", "slow"]
    assert (modules / "broken.runs").read_text() == (modules / "slow.runs").read_text() == "xx"
    assert (modules / "fine.runs").read_text() == "x"
    for name, why in (("broken", "it ended with status 3"), ("slow", "not done within 5 s")):
        found = json.loads((out / f"{name}.partial.json").read_text())
        assert (found["incomplete"], found["metrics"]["rows"]) == (why, [5])
        assert f"kit: {name}: failed: {why}" in said.getvalue()
        assert not (out / f"{name}.json").exists()


def test_what_failed_before_comes_last_until_its_code_is_another(
    modules: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not take the time of stages that have not been tried."""
    one, two, three = (stage(modules, name, "sys.exit(3)") for name in ("one", "two", "three"))
    tried = []
    for code, stages in (("a", [one]), ("a", [one, two]), ("b", [one, three])):
        monkeypatch.setattr(runner, "fingerprint", lambda folders, code=code: code)
        said = io.StringIO()
        run_stages(stages, places, "c", said)
        tried.append(re.findall(r"kit: (\w+): failed", said.getvalue()))
    assert tried == [["one"], ["two", "one"], ["one", "three"]]


def test_the_fingerprint_is_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "other").mkdir()
    file = tmp_path / "kernels" / "one.py"
    found = set()
    for text in ("a", "b"):
        file.write_text(text)
        found.add(runner.fingerprint(("kernels",), tmp_path))
    (tmp_path / "other" / "one.py").write_text("a")
    assert runner.fingerprint(("kernels",), tmp_path) in found
    file.rename(file.with_name("two.py"))
    assert len(found | {runner.fingerprint(("kernels",), tmp_path)}) == 3
    assert all((ROOT / folder).is_dir() for stage in STAGES for folder in stage.code)


@pytest.mark.parametrize("arm", [SCHEDULED, PLAIN, *LATER["cuda"]])
def test_sglang_knows_the_flags_for_a_gpu(arm: str, tmp_path: Path) -> None:
    """A slip there would cost a call on a machine that is there for minutes."""
    server_args = pytest.importorskip("sglang.srt.server_args")
    drafters = {"dspark": shipped_drafter_path(), "mtp": shipped_drafter_path("smollm2-135m-mtp")}
    spec = server_of(arm, tmp_path, drafters, "cuda", (1, 8, 128), tmp_path)
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    found = parser.parse_args(spec.command()[3:])
    assert (found.device, found.dtype, found.attention_backend) == ("cuda", "bfloat16", "triton")
    assert found.speculative_draft_attention_backend == (None if arm == "plain" else "triton")
    assert (found.cuda_graph_bs_decode[0], found.cuda_graph_bs_decode[-1]) == (1, 128)
    assert found.max_running_requests == 128


@pytest.mark.slow
@pytest.mark.server
def test_servers_run_from_what_was_packed(tmp_path: Path) -> None:
    """With a network: everything is fetched, sent, installed, and served from there."""
    python, home = f"{sys.version_info.major}.{sys.version_info.minor}", tmp_path / "home"
    command = [KIT / "pack", "--python", python, "--out", tmp_path / "pieces"]
    with_us = {**os.environ, "PYTHON": sys.executable}
    packed = subprocess.run(command, env=with_us, capture_output=True, text=True, timeout=3600)
    assert packed.returncode == 0, packed.stderr
    pieces = sorted((tmp_path / "pieces").glob("*.tar"))
    assert [piece.name.split("-")[0] for piece in pieces] == ["1", "2", "3", "4"]
    assert max(piece.stat().st_size for piece in pieces) <= 48 << 20
    found = dry_run(tmp_path / "out", "first")["first"]
    assert found["seconds"] < 560
    code = "import sglang, openai; print(sglang.__file__, openai.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment(home)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.split() == [
        str(home / "sglang" / "sglang" / "__init__.py"),
        str(home / "sglang" / "openai" / "__init__.py"),
    ], done.stderr
