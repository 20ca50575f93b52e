"""Journals of benches: what was cut off goes on, what was measured with something else does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.cli import _bench_adaptive, _bench_screen
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench.journal import keep_row, open_journal, served_head
from tests.ports import free_ports

HEAD = {"plan": "ab", "drafter": "cd", "flags": ["--x", "1"]}


def rows(path: Path, head: dict[str, Any] = HEAD) -> list[int]:
    return open_journal(path, head, lambda row: int(row["n"]))


def test_an_unfinished_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "journal.jsonl"
    assert rows(path) == []
    keep_row(path, {"n": 1})
    whole = path.read_text()
    path.write_text(whole + '{"n": 2')
    assert rows(path) == [1]
    assert path.read_text() == whole
    path.write_text("")  # killed before anything was written
    assert rows(path) == []
    assert json.loads(path.read_text()) == HEAD


@pytest.mark.parametrize("text", ["what\n", "[1]\n", "3", '{"plan": "ab"', "\n"])
def test_another_file_is_no_journal_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(text)
    with pytest.raises(DSparkError, match="is no journal of this command"):
        rows(path)
    assert path.read_text() == text
    with pytest.raises(DSparkError, match="cannot use the journal"):
        rows(tmp_path)


def test_what_differs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    rows(path)
    with pytest.raises(DSparkError, match=r"measured with another drafter, flags: its rows"):
        rows(path, {**HEAD, "drafter": "ef", "flags": ["--x", "2"]})
    with pytest.raises(DSparkError, match="measured with another device:"):
        rows(path, {**HEAD, "device": "a CPU"})


def served(folder: Path, weights: bytes = b"weights", gamma: int = 2) -> Path:
    """A target or drafter as far as a journal looks at it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"block_size": gamma}))
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def test_models_are_identified_by_their_weights(tmp_path: Path) -> None:
    target, drafter = served(tmp_path / "target"), served(tmp_path / "drafter")
    head = served_head(target, drafter, "a CPU")
    assert head.keys() == {"target", "drafter", "gamma", "calibration", "device", "commit"}
    other = served_head(target, served(tmp_path / "other", b"others", 3), "a CPU")
    assert {key for key in head if head[key] != other[key]} == {"drafter", "gamma"}
    (drafter / "sts.json").write_text("{}")
    assert {**served_head(target, drafter, "a CPU"), "calibration": ""} == head


Command = Callable[..., None]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a bench's command with nothing measured: what it says of its journal, "" if it goes on.

    A second call of the same bench resumes the first.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sglang_dspark.loadtest.bench.journal.commit", lambda: "c0ffee")
    target = served(tmp_path / "target")
    served(tmp_path / "mine")
    served(tmp_path / "other", b"others")
    for module in (_bench_adaptive, _bench_screen):
        monkeypatch.setattr(module, "_publish", lambda *_: None)
        monkeypatch.setattr(
            module, "served_models", lambda _, __, drafter, device: (target, Path(drafter), device)
        )
    monkeypatch.setattr(_bench_adaptive, "_measure", lambda *_: None)
    monkeypatch.setattr(_bench_screen, "_compared", lambda *_: [])
    monkeypatch.setattr(_bench_screen, "_show", lambda *_: None)

    def run(command: Command, **options: Any) -> str:
        journal = tmp_path / ("a.jsonl" if command is _bench_adaptive.adaptive else "screen")
        common = {"out": tmp_path / "r.json", "resume": journal, "port": free_ports(3)}
        try:
            command(**{**common, "drafter": "mine", "device": "cpu", **options})
        except DSparkError as error:
            return str(error)
        return ""

    return run


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"drafter": "other"}, "another drafter:"),
        ({"concurrency": "1,9"}, "another plan, arms:"),
    ],
)
def test_adaptive_resumes_its_own_alone(
    bench: Callable[..., str], changed: dict[str, Any], said: str
) -> None:
    assert bench(_bench_adaptive.adaptive, quick=True) == ""
    found = bench(_bench_adaptive.adaptive, **{"quick": True, **changed})
    assert (said in found, bool(found)) == (True, bool(said))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"near_tie": 1e-2}, ""),
        ({"drafter": "other"}, "another drafter:"),
        ({"pool_tokens": 4096}, "another flags:"),
        ({"chunk": 64}, "another flags:"),
        ({"config": Path("ours.yaml")}, "another config:"),
        ({"config": Path("none.yaml")}, "cannot read the server's configuration none.yaml"),
        ({"seed": 1}, "another plan:"),
    ],
)
def test_a_screen_resumes_its_own_alone(
    bench: Callable[..., str], tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    (tmp_path / "ours.yaml").write_text("schedule: {threshold: 0.3}\n")
    assert bench(_bench_screen.screen, requests=1) == ""
    found = bench(_bench_screen.screen, **{"requests": 1, **changed})
    assert (said in found, bool(found)) == (True, bool(said))
