"""The result file: its keys, its bytes, places that cannot be, and code no commit holds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from sglang_dspark.common.machine import cpu_description, speed
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest import results
from sglang_dspark.loadtest.results import commit, require_clean, write_results


def test_results_file_keeps_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    write_results(path, "x", "a GPU", {"tau": 2.0, "none": float("nan"), "rows": [{"a": 1}]})
    written = json.loads(path.read_text())
    assert set(written) == {"name", "command", "commit", "device", "date", "metrics"}
    assert written["metrics"] == {"tau": 2.0, "none": None, "rows": [{"a": 1}]}
    assert written["device"] == "a GPU"
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    with pytest.raises(DSparkError, match="cannot write results"):
        write_results(path / "below" / "a-file.json", "x", "a GPU", {})


def test_a_cpu_is_listed_with_its_speed(tmp_path: Path) -> None:
    write_results(tmp_path / "x.json", "x", cpu_description(), {})
    device = json.loads((tmp_path / "x.json").read_text())["device"]
    assert device == f"{cpu_description()}; one thread: {speed()}"


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository that stands for ours, with a file of code and a published result."""
    folder = tmp_path / "checkout"
    (folder / "results").mkdir(parents=True)
    (folder / "code.py").write_text("1\n")
    (folder / "results" / "old.json").write_text("{}\n")
    git(folder, "init")
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "first")
    monkeypatch.setattr(results, "ROOT", folder)
    monkeypatch.chdir(folder)
    return folder


def test_nothing_is_published_from_uncommitted_changes(checkout: Path) -> None:
    path = Path("results") / "new.json"
    (checkout / "code.py").write_text("2\n")
    with pytest.raises(DSparkError, match=r"uncommitted changes \(code\.py\): commit them") as told:
        require_clean(path)  # what a long measurement asks before it begins
    assert "\n" not in str(told.value)
    with pytest.raises(DSparkError, match=r"kept in runs/not-published/new\.json"):
        write_results(path, "new", "a GPU", {"tau": 2.0})
    assert not path.exists()
    kept = json.loads((checkout / "runs" / "not-published" / "new.json").read_text())
    assert kept["metrics"] == {"tau": 2.0}
    assert kept["commit"].endswith("+changes")
    write_results(Path("elsewhere.json"), "x", "a GPU", {})  # outside results/: not checked
    require_clean(None)
    git(checkout, "commit", "-am", "second")
    write_results(path, "new", "a GPU", {"tau": 2.0})
    assert json.loads(path.read_text())["commit"] == commit()


def test_results_pages_and_new_files_are_no_changes_of_code(checkout: Path) -> None:
    """Else the first of two measurements would make the second one unclean."""
    (checkout / "results" / "old.json").write_text('{"a": 1}\n')
    (checkout / "runs").mkdir()
    (checkout / "runs" / "trace.json").write_text("{}\n")
    write_results(Path("results") / "new.json", "new", "a GPU", {})
    assert not commit().endswith("+changes")


def test_an_installed_package_may_write_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    write_results(tmp_path / "results" / "x.json", "x", "a GPU", {})
    assert json.loads((tmp_path / "results" / "x.json").read_text())["commit"].startswith("sglang-")
