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


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    """One build for all kinds of links; each is named."""
    links = ("gone.md", "../results/gone.json", "glossary.md#gone")
    for entry in ROOT.iterdir():
        if entry.name != "docs":
            (tmp_path / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.writelines(f"\n[gone]({link})\n" for link in links)
    done = build(tmp_path, tmp_path / "built")
    assert done.returncode != 0
    warned = [line for line in done.stderr.splitlines() if "WARNING" in line and "gone" in line]
    assert len(warned) == len(links), done.stderr
    for link in links:
        assert any(Path(link).name in line for line in warned), link
