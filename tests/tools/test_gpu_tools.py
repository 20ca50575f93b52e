"""tools/gpu/slim: a checkout small enough to be sent."""

from __future__ import annotations

import hashlib
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
    assert len(list(clone.glob(WEIGHTS))) == 5
    for said in ("without weights", "already slim"):
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
