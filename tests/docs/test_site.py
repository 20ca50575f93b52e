"""`make docs`: the strict build passes, a broken link fails it, and no page fetches anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"'](?:https?:)?//[^\"']*")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_fetch_nothing(site: Path) -> None:
    pages = list(site.glob("*.html"))
    assert len(pages) > 10
    for page in pages:
        assert FETCHED.findall(page.read_text()) == []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import [\"']http", sheet.read_text())


def test_linked_results_are_part_of_the_site(site: Path) -> None:
    page = (site / "scheduler.html").read_text()
    linked = re.findall(r'href="(repository/results/[^"]+\.json)"', page)
    assert linked
    for name in linked:
        assert (site / name).is_file()


@pytest.mark.parametrize(
    "line", ["[gone](gone.md)", "[gone](../results/gone.json)", "[gone](glossary.md#gone)"]
)
def test_a_broken_link_fails_the_build(tmp_path: Path, line: str) -> None:
    for entry in ROOT.iterdir():
        if entry.name != "docs":
            (tmp_path / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write(f"\n{line}\n")
    done = build(tmp_path, tmp_path / "built")
    assert done.returncode != 0
    assert "gone" in done.stderr
