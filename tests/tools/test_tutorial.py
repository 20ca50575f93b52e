"""The training tutorial: its commands parse, files are made before they are read, and the runner
that copies them out of the page stops at the first that fails. The whole page: `make tutorial`."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.training.config import load_config
from sglang_dspark.training.prompts import read_prompts
from tests.ports import free_ports
from tests.signals import heed_signals

ROOT = Path(__file__).resolve().parents[2]


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tutorial", ROOT / "tools/tutorial/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tutorial = _runner()
PAGE = tutorial.PAGE.read_text(encoding="utf-8")
STEPS = tutorial.steps(PAGE)


def commands(step: Any) -> Iterator[list[str]]:
    """The commands of a block as words, without what their here-documents hold."""
    text = re.sub(r"<<'END'\n.*?\nEND$", "", step.text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^export \w+=\$\((.*)\)$", r"\1", text, flags=re.MULTILINE)
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line
        try:
            words = shlex.split(pending)
        except ValueError:  # a quoted text of several lines
            pending += "\n"
            continue
        pending = ""
        if words:
            yield words


COMMANDS = [words for step in STEPS for words in commands(step)]


def _parsed(words: list[str]) -> dict[str, Any]:
    """The options of a `dspark` command, as its parser takes them."""
    command, name, rest = typer.main.get_command(app), words[0], words[1:]
    while not rest[0].startswith("-") and hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(command.make_context(name, rest), rest)
        if not rest:
            break
    return command.make_context(name, rest).params


def test_the_page_has_its_commands() -> None:
    programs = [words[0] for words in COMMANDS]
    assert programs.count("dspark") == 6
    assert {"python", "sglang", "curl", "cat", "mkdir", "dspark"} == set(programs)
    assert [step.server for step in STEPS].count(True) == 2
    done = subprocess.run(["bash", "-n"], input=tutorial.script(STEPS), text=True, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "dspark"], ids=" ".join)
def test_a_dspark_command_parses(words: list[str]) -> None:
    options = _parsed(words)
    for option, value in pairwise(words):
        if option.startswith("--") and option != "--json":
            assert str(options[option[2:].replace("-", "_")]) == value
    with pytest.raises(Exception, match="No such option"):
        _parsed([*words, "--no-such-option"])


def test_the_server_commands_parse() -> None:
    from sglang.srt.server_args import ServerArgs

    servers = [c for step in STEPS if step.server for c in commands(step)]
    assert [c[:3] for c in servers] == [
        ["python", "-m", "sglang.launch_server"],
        ["sglang", "serve", "--model-path"],
    ]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = [parser.parse_args(c[c.index("--model-path") :]) for c in servers]
    assert options[0] == options[1]
    assert options[0].speculative_algorithm == "DSPARK"
    assert f":{options[0].port}/" in tutorial.health_url(STEPS)


def test_files_are_made_before_they_are_read(tmp_path: Path) -> None:
    """Every path of the page below `mine/`, and those of its configuration."""
    made: set[str] = set()
    for step in STEPS:
        told = list(commands(step))
        if all(words[0] in ("mkdir", "cat") for words in told):
            subprocess.run(["bash", "-euc", step.text], cwd=tmp_path, check=True, timeout=60)
        for words in told:
            paths = {w for w in words if w.startswith("mine")}
            new = {w for before, w in pairwise(words) if before in (">", "-p", "--json")}
            missing = {p for p in paths - new if p not in made and not (tmp_path / p).is_file()}
            assert not missing, f"line {step.line}: {missing}"
            made |= new | _made_by(words, tmp_path)
    assert {"mine/run/drafter", "mine/responses", "mine/self-prompts.jsonl"} <= made


def _made_by(words: list[str], folder: Path) -> set[str]:
    """Return the files that a stage of training writes, by its configuration."""
    if words[:2] != ["dspark", "train"]:
        return set()
    cfg = load_config(folder / words[words.index("--config") + 1])
    stages = {
        "prompts": {str(cfg.data.self_prompts)},
        "data": {str(cfg.data.store)},
        "drafter": {str(cfg.run_dir / "drafter")},
    }
    return stages[words[2]]


def test_the_pages_prompts_and_configuration_are_read(tmp_path: Path) -> None:
    for step in STEPS[:3]:
        if "cat >" in step.text:
            subprocess.run(["bash", "-euc", step.text], cwd=tmp_path, check=True, timeout=60)
    rows = read_prompts(tmp_path / "mine/prompts.jsonl")
    assert len(rows) == 8
    assert sum(row.answer is not None for row in rows) == 2
    cfg = load_config(tmp_path / "mine/train.yaml")
    assert [str(path) for path in cfg.data.prompts] == ["mine/prompts.jsonl"]
    assert str(cfg.data.target) == "demo"


def test_what_the_page_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links
    assert not [link for link in links if not (tutorial.PAGE.parent / link).exists()]


SERVER = "python -c 'import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={port})'"


def _page(port: int, last: str) -> str:
    ask = f"curl -sf http://127.0.0.1:{port}/health_generate"
    blocks = [
        ("", "X=word; printf up > health_generate"),
        (" server", SERVER.format(port=port)),
        ("", ask),
        (" server", SERVER.format(port=port)),
        ("", f"{ask}; echo $X\n{last}"),
    ]
    return "# Steps\n" + "".join(f"```sh{info}\n{text}\n```\n" for info, text in blocks)


def _serving(port: int) -> bool:
    url = f"http://127.0.0.1:{port}/"
    return subprocess.run(["curl", "-sf", url], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("last", ["true", "false\necho after"])
def test_the_runner_keeps_servers_beside_the_steps_and_stops_at_a_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], last: str
) -> None:
    port = free_ports()
    found = tutorial.steps(_page(port, last))
    if last == "true":
        assert len(tutorial.run(found, tmp_path)) == 5
    else:
        with pytest.raises(DSparkError, match="line 14 of the page, 'Steps': its command failed"):
            tutorial.run(found, tmp_path)
    out = capfd.readouterr().out
    assert out.count("\nup\n== Steps") == 1
    assert "\nupword\n" in out
    assert "\nafter\n" not in out.split("--\n")[-1]
    assert not _serving(port)


def test_the_runner_says_when_a_server_ends_early_or_its_port_is_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_ports()
    page = _page(port, "true").replace("import http.server", "import no_such_module")
    with pytest.raises(DSparkError, match="line 5 of the page"):
        tutorial.run(tutorial.steps(page), tmp_path)
    assert "ModuleNotFoundError" in capfd.readouterr().out
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(DSparkError, match=f"127.0.0.1:{port}"):
            tutorial.run(tutorial.steps(page), tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_runner_leaves_no_step_and_no_server(
    tmp_path: Path, number: signal.Signals
) -> None:
    port = free_ports()
    page = tmp_path / "page.md"
    page.write_text(_page(port, "echo $$ > pid; sleep 600"))
    code = (
        "import importlib.util, pathlib, sys; "
        f"spec = importlib.util.spec_from_file_location('tutorial', {str(tutorial.__file__)!r}); "
        "t = importlib.util.module_from_spec(spec); sys.modules['tutorial'] = t; "
        f"spec.loader.exec_module(t); t.PAGE = pathlib.Path({str(page)!r}); t.main()"
    )
    folder = tmp_path / "kept"
    runner = subprocess.Popen(
        [sys.executable, "-c", code, "--keep", str(folder)],
        stdout=subprocess.DEVNULL,
        preexec_fn=heed_signals,
    )
    try:
        _wait(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip())
        shell = int((folder / "pid").read_text())
        runner.send_signal(number)
        assert runner.wait(120) == 128 + number
        _wait(lambda: not Path(f"/proc/{shell}").exists())
        assert not _serving(port)
    finally:
        runner.kill()


def _wait(done: Callable[[], object]) -> None:
    """Until `done`, two minutes at most."""
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)
