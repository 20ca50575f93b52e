"""`make figures`: parts that measure at one commit, and go on where a run was cut off."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from tools import figures
from tools.figures import PARTS, ROOT, Part

HASH = "0123456789abcdef"


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with two parts: one of this commit, one of another that appends to `ran`."""
    (tmp_path / "results").mkdir()
    for name, commit in (("new", HASH), ("old", "89abcdef")):
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"commit": commit}))
    script = "import sys; open('ran', 'a').write(sys.argv[1] + '\\n'); sys.exit(int(sys.argv[2]))"
    call = f"python -c {shlex.quote(script)}"
    parts = {
        "there": Part(1, ("new",), (f"{call} there 0",)),
        "again": Part(1, ("new", "old"), (f"{call} {{runs}} 0", f"{call} second 0")),
        "fails": Part(1, ("missing",), (f"{call} fails 3", f"{call} never 0")),
        "shown": Part(1, (), (f"{call} shown 0",)),
        "lacks": Part(1, ("old",), (f"{call} lacks 0",), needs="runs/made"),
    }
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PARTS", parts)
    monkeypatch.setattr(figures, "PAGES", (f"{call} pages 0",))
    monkeypatch.setattr(figures, "commit", lambda: HASH)
    return tmp_path


def test_parts_of_this_commit_are_skipped(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures.main(["there", "again", "lacks", "shown"])
    again = [f"runs/figures-{HASH[:8]}", "second", "pages"]
    assert (room / "ran").read_text().split() == [*again, "shown", "pages"]
    said = capsys.readouterr().out
    assert "there: there already" in said
    assert "lacks: skipped, runs/made is missing" in said


def test_commands_find_those_of_the_environment(room: Path) -> None:
    """A command that starts `dspark` finds the one beside the interpreter."""
    script = "import shutil; open('ran', 'w').write(shutil.which('python'))"
    figures._run([f"python -c {shlex.quote(script)}"], "runs")
    assert Path((room / "ran").read_text()).parent == Path(sys.executable).parent


def test_all_parts_in_turn_until_one_fails(room: Path) -> None:
    (room / "runs" / "made").mkdir(parents=True)
    with pytest.raises(DSparkError, match=r"status 3 of python .* fails 3; run again"):
        figures.main()
    assert (room / "ran").read_text().split()[-2:] == ["pages", "fails"]


def test_uncommitted_changes_and_unknown_parts_are_refused(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DSparkError, match="no part soon; there are there, again"):
        figures.main(["again", "soon"])
    monkeypatch.setattr(figures, "commit", lambda: f"{HASH}+changes")
    with pytest.raises(DSparkError, match="commit the changes first"):
        figures.main(["again"])
    assert not (room / "ran").exists()


@pytest.mark.parametrize("name", PARTS)
def test_a_part_writes_results_that_a_page_shows(name: str) -> None:
    part = PARTS[name]
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    written = re.findall(r"(?:--json|--out) results/(\w+)\.json", " ".join(part.commands))
    assert set(written) == set(part.results)
    for each in part.results:
        assert f"results/{each}.json" in pages


@pytest.mark.parametrize("name", PARTS)
def test_a_parts_commands_are_understood(name: str) -> None:
    """Every option is one of the command's, and every file it reads is there."""
    for command in PARTS[name].commands:
        words = shlex.split(command.replace("{runs}", "runs/x"))
        if words[0] != "dspark":
            assert (ROOT / words[1]).is_file() or words[1] == "-m", command
            continue
        ours = 3 if words[1] == "bench" else 2
        helped = CliRunner().invoke(app, [*words[1:ours], "--help"], env={"COLUMNS": "200"}).stdout
        for flag in (word for word in words[ours:] if word.startswith("--")):
            assert f"{flag} " in helped, command
        for value in words[words.index("--config") + 1 :][:1] if "--config" in words else []:
            named = [ROOT / value, ROOT / "configs" / "sweep" / f"{value}.yaml"]
            assert any(file.is_file() for file in named), command
