"""tools/gpu: a checkout small enough to be sent, and weights that follow it in pieces."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "gpu"
LARGEST_TREE = 24 * 2**20  # bytes; a tree that is sent may have 64 MiB, pieces of weights included
WEIGHTS = "drafters/*/model.safetensors"

in_a_clone = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="a checkout made by git is what it is about"
)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkout, .git aside."""
    files = [p for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository's commit, with the scripts as they stand here."""
    folder = tmp_path_factory.mktemp("clone") / "tree"
    done = run("git", "clone", "--quiet", "--local", ROOT, folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    shutil.copytree(TOOLS, folder / "tools" / "gpu", dirs_exist_ok=True)
    return folder


@in_a_clone
def test_slim_leaves_a_small_tree_and_undo_brings_every_byte_back(clone: Path) -> None:
    slim = clone / "tools" / "gpu" / "slim"
    whole = digests(clone)
    assert len(list(clone.glob(WEIGHTS))) == 4
    for said in ("weights left out", "already slim"):
        done = run(slim, cwd=clone.parent)  # from any folder
        assert (done.returncode, said in done.stdout) == (0, True), done.stderr
        small = digests(clone)
        assert sum((clone / name).stat().st_size for name in small) <= LARGEST_TREE
        assert set(whole) - set(small) == {str(p) for p in map(Path, whole) if p.match(WEIGHTS)}
        assert small == {name: whole[name] for name in small}
    for said in ("weights are back", "nothing to undo"):
        done = run(slim, "--undo", cwd=clone)
        assert (done.returncode, said in done.stdout) == (0, True), done.stderr
        assert digests(clone) == whole
        assert WEIGHTS not in run("git", "sparse-checkout", "list", cwd=clone).stdout


@in_a_clone
@pytest.mark.parametrize("obstacle", ["changed weights", "another sparse checkout", "wrong option"])
def test_slim_refuses_in_one_line_and_leaves_all(clone: Path, obstacle: str) -> None:
    weights = next(clone.glob(WEIGHTS))
    options = ["--all"] if obstacle == "wrong option" else []
    if obstacle == "changed weights":
        with weights.open("ab") as file:
            file.write(b"x")
    elif obstacle == "another sparse checkout":
        run("git", "sparse-checkout", "set", "--no-cone", "/*", "!/docs/*.png", cwd=clone)
    before = digests(clone)
    done = run(clone / "tools" / "gpu" / "slim", *options, cwd=clone)
    after = digests(clone)
    run("git", "sparse-checkout", "disable", cwd=clone)
    run("git", "checkout", "--quiet", "--", WEIGHTS, cwd=clone)
    assert (done.returncode, done.stderr.count("\n"), after == before) == (1, 1, True)
    assert done.stderr.startswith("slim: ")


def test_pieces_are_small_and_make_the_file_again(tmp_path: Path) -> None:
    content = os.urandom(5 * 2**19 + 7)  # two pieces of a MiB and one of half a MiB
    (tmp_path / "weights").write_bytes(content)
    done = run(TOOLS / "pieces", "split", "weights", "out", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pieces = sorted((tmp_path / "out").glob("piece.*"))
    assert [piece.stat().st_size for piece in pieces] == [2**20, 2**20, 2**19 + 7]
    done = run(TOOLS / "pieces", "join", "out", "again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again").read_bytes() == content
    again = run(TOOLS / "pieces", "split", "weights", "out", "1", cwd=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "missing or damaged, send again: piece.001"),
        ("damaged", "missing or damaged, send again: piece.001"),
        ("list cut", "the pieces in out make another file"),
        ("no list", "out lacks SHA256SUMS or whole.sha256"),
    ],
)
def test_join_writes_nothing_unless_it_is_the_file(tmp_path: Path, fault: str, said: str) -> None:
    (tmp_path / "weights").write_bytes(os.urandom(3 * 2**20))
    run(TOOLS / "pieces", "split", "weights", "out", "1", cwd=tmp_path)
    out = tmp_path / "out"
    if fault == "missing":
        (out / "piece.001").unlink()
    elif fault == "damaged":
        (out / "piece.001").write_bytes(b"x" * 2**20)
    elif fault == "list cut":
        sums = (out / "SHA256SUMS").read_text().splitlines(keepends=True)
        (out / "SHA256SUMS").write_text("".join(sums[:-1]))
    else:
        (out / "SHA256SUMS").unlink()
    done = run(TOOLS / "pieces", "join", "out", "again", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert said in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "weights"]
