"""`dspark doctor`: fit or not in words and by exit status; JSON alone on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.serving import installation
from sglang_dspark.serving.diagnosis import Diagnosis, look_at_config
from sglang_dspark.serving.installation import read_lock


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_dspark.cli.main", "doctor", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout)  # fails when anything else is on stdout


def test_fit_here(doctor_report: dict[str, Any]) -> None:
    assert doctor_report["fit"] is True
    assert doctor_report["problems"] == []
    assert doctor_report["sglang_supported"] is True
    assert doctor_report["versions"]["sglang"] == "0.5.23"
    assert doctor_report["install"]["kind"] in ("cpu", "cuda")
    assert all(doctor_report["entry_points"].values())
    assert len(doctor_report["entry_points"]) == 2
    assert doctor_report["drafter"]["megabytes"] == {"bf16": 49.7}
    assert "mxfp4 3.8 MB" in doctor_report["device"]["experts"]
    keys = {"name", "target", "kind", "state", "signature_ok", "why", "issue", "drop_when"}
    assert all(keys <= set(seam) for seam in doctor_report["seams"])
    fixes = [seam for seam in doctor_report["seams"] if seam["issue"]]
    assert {seam["state"] for seam in fixes} == {"installed"}


def test_it_is_short_where_all_is_well() -> None:
    done = doctor()
    assert done.returncode == 0
    assert done.stderr == "", "what the imports print is kept away"
    first, *others = done.stdout.splitlines()
    assert first.startswith("ok: fit to serve with DSPARK (sglang 0.5.23, torch 2")
    assert all(line.startswith("note: ") for line in others)


def test_the_table_for_humans() -> None:
    done = doctor("--all", COLUMNS="160")
    assert done.returncode == 0
    assert "drafter-check" in done.stdout
    assert "issue: sgl-project" in done.stdout
    assert "drop when: upstream" in done.stdout
    assert "cpu.threads" in done.stdout
    assert "fit to serve with DSPARK" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("package", "raises"),
    [
        ("torch", 'OSError("libcudart.so.12: cannot open shared object file")'),
        ("torch", 'ImportError("undefined symbol: iJIT_NotifyEvent")'),
        ("sglang", 'RuntimeError("no platform")'),
    ],
)
def test_a_package_that_cannot_be_imported(tmp_path: Path, package: str, raises: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {raises}\n")
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "not fit to serve with DSPARK: one problem"
    assert lines[1].startswith(f"problem: {package} ")
    name, _, said = raises.removesuffix('")').partition('("')
    assert lines[1].endswith(f"cannot be imported: {name}: {said}")
    assert lines[2].startswith("what to do: in ")
    assert "make clean setup" in lines[2]
    report = found(doctor("--json", PYTHONPATH=str(tmp_path)))
    assert report["fit"] is False
    assert report["problems"] == [lines[1].removeprefix("problem: ")]


def test_what_to_do_is_for_this_kind_of_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "make clean setup" in installation.advice()
    monkeypatch.setattr(installation, "CHECKOUT", tmp_path)
    monkeypatch.setattr(installation, "NVIDIA_DRIVER", tmp_path / "absent")
    assert "pip install --no-deps sglang==" in installation.advice()
    monkeypatch.setattr(installation, "NVIDIA_DRIVER", tmp_path)
    assert installation.advice().startswith("pip install '.[cuda]' in a checkout")


def test_a_bad_configuration_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "dspark.yaml"
    config.write_text("cpu: {thread: 2}\n")
    monkeypatch.setenv("SGLANG_DSPARK_CONFIG", str(config))
    diagnosis = Diagnosis()
    look_at_config(diagnosis)
    assert not diagnosis.fit
    assert "unknown field cpu.thread" in diagnosis.problems[0]


def test_values_of_a_file_name_their_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "dspark.yaml"
    config.write_text("cpu: {threads: 1}\n")
    monkeypatch.setenv("SGLANG_DSPARK_CONFIG", str(config))
    diagnosis = Diagnosis()
    look_at_config(diagnosis)
    values = diagnosis.config["values"]
    assert values["cpu.threads"] == {"value": 1, "origin": f"file {config}"}
    assert values["cpu.matrix_kernel"] == {"value": True, "origin": "default"}


def test_fixes_of_sglang_can_be_switched_off(tmp_path: Path) -> None:
    config = tmp_path / "dspark.yaml"
    config.write_text("upstream_fixes: false\n")
    done = doctor("--json", SGLANG_DSPARK_CONFIG=str(config))
    report = found(done)
    assert done.returncode == 0, report["problems"]
    fixes = [seam for seam in report["seams"] if seam["issue"]]
    assert {seam["state"] for seam in fixes} == {"not installed"}
    others = {seam["state"] for seam in report["seams"] if not seam["issue"]}
    assert others == {"installed", "inert"}
    said = f"upstream_fixes is false: {len(fixes)} fixes of SGLang are not installed"
    assert said in report["notes"]


def test_switched_off_is_said() -> None:
    done = doctor("--json", DSPARK_DISABLE="1")
    report = found(done)
    assert done.returncode == 1
    assert any("DSPARK_DISABLE is set" in problem for problem in report["problems"])
    assert not any(seam["state"] == "installed" for seam in report["seams"])


def test_an_unsupported_sglang_is_said(tmp_path: Path) -> None:
    info = tmp_path / "sglang-0.5.99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    done = doctor("--json", PYTHONPATH=str(tmp_path))
    report = found(done)
    assert done.returncode == 1
    assert report["sglang_supported"] is False
    assert any("sglang 0.5.99 is not supported" in problem for problem in report["problems"])


def test_lock_lines(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.lock"
    lock.write_text(
        "--index-url https://example.org\n# a comment\nnumpy==2.4.6\n"
        "triton==3.9.0 ; sys_platform == 'linux'\nwinonly==1 ; sys_platform == 'win32'\n"
        "torch==2.13.0+cpu --hash=sha256:00\nloose>=1\n"
    )
    pins = read_lock(lock)
    assert pins["numpy"] == "2.4.6"
    assert pins["torch"] == "2.13.0+cpu"
    assert "winonly" not in pins
    assert "loose" not in pins
    assert ("triton" in pins) is sys.platform.startswith("linux")


@pytest.mark.parametrize("command", [["--help"], ["doctor", "--help"]])
def test_help_is_fast_because_nothing_heavy_is_imported(command: list[str]) -> None:
    code = (
        "import sys\nfrom sglang_dspark.cli.main import app\n"
        f"sys.argv = ['dspark', *{command!r}]\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'sglang', 'transformers'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stderr[-2000:]
