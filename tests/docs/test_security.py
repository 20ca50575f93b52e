"""SECURITY.md: every guarantee names tests that there are, every flag exists."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import pytest

from sglang_dspark.loadtest.servers.server import ServerSpec
from tests.docs.pages import ROOT, spans
from tests.docs.test_pages import server_flags

PAGE = ROOT / "SECURITY.md"
ROWS = re.findall(r"^\| (\S.*) \| (`tests/.*`) \|$", PAGE.read_text(), re.MULTILINE)


def test_there_are_guarantees() -> None:
    assert len(ROWS) == PAGE.read_text().count("\n| ") - 1  # the head
    assert len(ROWS) >= 8


@pytest.mark.parametrize(("claim", "shown"), ROWS, ids=[claim[:30] for claim, _ in ROWS])
def test_a_guarantee_names_its_tests(claim: str, shown: str) -> None:
    for name in re.findall(r"`([^`]+)`", shown):
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name


def test_flags_exist() -> None:
    named = {span for span in spans(PAGE) if span.startswith("--")}
    assert len(named) > 6
    assert named <= server_flags()


def test_servers_listen_on_loopback_by_default() -> None:
    """SGLang's own, and those that we start."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert parser.get_default("host") == "127.0.0.1"
    command = ServerSpec("any", Path("model"), 30000).command()
    assert command[command.index("--host") + 1] == "127.0.0.1"
