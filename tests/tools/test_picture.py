"""tools/docs/picture.py: which lines it shows, and that the picture needs nothing but itself."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from tools.docs import picture

PRINTED = "start\n\x1b[1mone\x1b[0m\nfirst\n\ntwo\nsecond\nthree\n"


def test_parts_are_cut_out_and_joined_by_an_ellipsis() -> None:
    got = picture.shown(PRINTED, [("one", "two"), ("three", "")])
    assert got == "\x1b[1mone\x1b[0m\nfirst\n\n…\n\nthree"


def test_text_is_looked_for_without_colours_and_in_order() -> None:
    assert picture.shown("\x1b[1mo\x1b[0mne\nnext", [("one", "")]).endswith("next")
    with pytest.raises(DSparkError, match="no line of the output has 'one'"):
        picture.shown(PRINTED, [("two", "one")])


def test_no_home_directory_is_shown() -> None:
    assert picture.shown(f"in {Path.home()}/models", [("", "")]) == "in ~/models"


def test_the_picture_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "demo.svg"
    script = "print('\\033[32mgreen\\033[0m text')"
    arguments = ["picture", "--title", "a title", str(out), sys.executable, "-c", script]
    monkeypatch.setattr(sys, "argv", arguments)
    picture.main()
    drawn = out.read_text()
    ElementTree.fromstring(drawn)
    assert "a&#160;title" in drawn
    assert "green" in drawn
    assert [part for part in ("url(http", "@font-face", "href") if part in drawn] == []


def test_a_command_that_fails_makes_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "demo.svg"
    arguments = ["picture", str(out), sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(DSparkError, match="status 3"):
        picture.main()
    assert not out.exists()
