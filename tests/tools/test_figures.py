"""`make figures`: parts that measure at one commit, and go on where a run was cut off."""

from __future__ import annotations

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
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository root with four parts, whose commands append to the file `ran`."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "old.json").write_text('{"commit": "89abcdef01"}')
    script = "import sys; open('ran', 'a').write(sys.argv[1] + '\\n'); sys.exit(int(sys.argv[2]))"
    call = f"python -c {shlex.quote(script)}"
    write = f"import json; json.dump({{'commit': '{HASH}'}}, open('results/half.json', 'w'))"
    parts = {
        "whole": Part(1, ("old",), (f"{call} {{runs}} 0", f"{call} second 0")),
        "shown": Part(1, (), (f"{call} shown 0",)),
        "half": Part(1, ("half",), (f"python -c {shlex.quote(write)}", f"{call} half 3")),
        "lacks": Part(1, ("old",), (f"{call} lacks 0",), needs=("results", "runs/made")),
    }
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PARTS", parts)
    monkeypatch.setattr(figures, "PAGES", (f"{call} pages 0",))
    monkeypatch.setattr(figures, "commit", lambda: HASH)
    return tmp_path


def ran(root: Path) -> list[str]:
    return (root / "ran").read_text().split()


def test_parts_measured_at_this_commit_are_skipped(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures.main(["whole", "lacks", "shown"])
    first = [f"runs/figures-{HASH[:8]}", "second", "pages", "shown", "pages"]
    assert ran(root) == first
    assert "lacks: skipped, runs/made missing" in capsys.readouterr().out
    (root / "runs" / "made").mkdir()
    figures.main(["whole", "lacks", "shown"])
    assert ran(root) == [*first, "lacks", "pages"]
    assert "whole: already measured at this commit" in capsys.readouterr().out
    monkeypatch.setattr(figures, "commit", lambda: "f" * 40)
    figures.main(["shown"])
    assert ran(root)[-2:] == ["shown", "pages"], "another commit"


def test_a_part_that_was_cut_off_is_run_again(root: Path) -> None:
    """Its result file has this commit already."""
    for _ in range(2):
        with pytest.raises(DSparkError, match=r"status 3 of python .* half 3; run again"):
            figures.main(["half", "shown"])
    assert ran(root) == ["half", "half"]
    assert (root / "results" / "half.json").is_file()


def test_parts_are_listed_with_their_commits(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures.main(listed=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "whole: 1 minutes, results/old.json of 89abcdef",
        "shown: 1 minutes",
        "half: 1 minutes, results/half.json of no commit",
    ]
    assert not (root / "ran").exists()


def test_commands_find_those_of_the_environment(root: Path) -> None:
    """A command that starts `dspark` finds the one beside the interpreter."""
    script = "import shutil; open('ran', 'w').write(shutil.which('python'))"
    figures._run([f"python -c {shlex.quote(script)}"], "runs")
    assert Path((root / "ran").read_text()).parent == Path(sys.executable).parent


def test_uncommitted_changes_and_unknown_parts_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DSparkError, match="no part soon; there are whole, shown"):
        figures.main(["whole", "soon"])
    monkeypatch.setattr(figures, "commit", lambda: f"{HASH}+changes")
    with pytest.raises(DSparkError, match="commit the changes first"):
        figures.main(["whole"])
    assert not (root / "ran").exists()


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
