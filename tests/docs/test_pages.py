"""Test that what the pages name exists: commands, options, settings, metrics, flags, messages."""

from __future__ import annotations

import argparse
import re
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from sglang_dspark.cli.main import app
from tests.docs.pages import (
    DOCS,
    FOR_OTHERS,
    FOR_USERS,
    GUIDES,
    PAGES,
    ROOT,
    fenced,
    messages,
    sizes,
    spans,
    upstream,
)
from tools.docs.metrics import metrics
from tools.docs.settings import DOCUMENTS, field_paths

SERVERS = (["sglang", "serve"], ["python", "-m", "sglang.launch_server"])
MOST_RUNNING_WORDS, MOST_WORDS = 800, 1650
OTHER_FLAGS = {"--help", "--slow"}  # the latter of our pytest


@cache
def dspark() -> click.Command:
    return typer.main.get_command(app)


@cache
def server_flags() -> frozenset[str]:
    from sglang.srt.server_args import ServerArgs

    from sglang_dspark.patches.step.config_flag import add_config_flag

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "--dspark-config" not in parser._option_string_actions:  # no plugin loaded here
        add_config_flag(None, parser)
    return frozenset(parser._option_string_actions)


@cache
def dspark_flags() -> frozenset[str]:
    def below(command: Any) -> set[str]:
        own = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
        return own.union(*(below(each) for each in getattr(command, "commands", {}).values()))

    return frozenset(below(dspark()))


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def descend(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `words`, without `dspark`, lead to, and its arguments."""
    command: Any = dspark()
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def name_of(page: Path) -> str:
    return page.name if page.parent == DOCS else page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_blocks_parse(page: Path) -> None:
    for words in fenced(page):
        if words[0] == "dspark":
            command, arguments = descend(words[1:])
            command.make_context(" ".join(words), list(arguments))  # parses, runs nothing
        for head in SERVERS:
            if words[: len(head)] == head:
                named = {word.partition("=")[0] for word in words if word.startswith("--")}
                assert named <= server_flags(), words
        if words[0] == "make":
            assert words[1] in targets(), words


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=name_of)
def test_commands_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        words = span.split()
        if words[0] == "make":
            assert words[1] in targets(), span
        if words[0] != "dspark" or len(words) == 1:
            continue
        command, arguments = descend(words[1:])
        assert command is not dspark(), f"no such command: {span}"
        known = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
        named = {word.partition("=")[0].rstrip(",") for word in arguments if word.startswith("--")}
        assert named <= known | OTHER_FLAGS, span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_the_text_exist(page: Path) -> None:
    known = dspark_flags() | server_flags() | OTHER_FLAGS
    for span in spans(page):
        words = span.split()
        if words[0].startswith("--") and words[0] != "--":
            flag = words[0].partition("=")[0]
            assert flag in known, span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_in_the_text_exist(page: Path) -> None:
    known = set().union(*map(field_paths, DOCUMENTS))
    sections = {path.partition(".")[0] for path in known if "." in path}
    for span in spans(page):
        found = re.match(r"([a-z_]+)\.([a-z_0-9.]+)(:|$)", span)
        if found and found[1] in sections and not span.endswith((".md", ".py", ".json", ".yaml")):
            assert f"{found[1]}.{found[2]}" in known, span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_in_the_text_exist(page: Path) -> None:
    ours = {metric.name for metric in metrics()}
    theirs = upstream("observability/metrics_collector.py")
    for span in spans(page):
        for name in re.findall(r"sglang:[a-z_]+\*?", span):
            bare = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert name == "sglang:dspark_*" or bare in ours or f'"{name}"' in theirs, span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_in_the_text_are_read(page: Path) -> None:
    source = "\n".join((*messages(), upstream("environ.py"), upstream("utils/common.py")))
    for span in spans(page):
        for name in re.findall(r"\b(?:SGLANG|DSPARK)_[A-Z_]+\b", span):
            assert name in source, span


@pytest.mark.parametrize("name", FOR_USERS)
def test_a_page_for_users_stays_short(name: str) -> None:
    """Two screens of text: say more in another page, or in a reviewers' page."""
    running, all_words = sizes(DOCS / f"{name}.md")
    assert running <= MOST_RUNNING_WORDS
    assert all_words <= MOST_WORDS


@pytest.mark.parametrize("name", [*FOR_USERS[1:], *FOR_OTHERS])
def test_a_page_opens_with_its_readers(name: str) -> None:
    opening = (DOCS / f"{name}.md").read_text().split("\n\n")[1]
    assert opening.startswith("For "), opening


@pytest.mark.parametrize("guide", GUIDES, ids=name_of)
def test_files_that_a_guide_names_exist(guide: Path) -> None:
    """Below its own folder, the package's, or the repository's."""
    folders = (guide.parent, ROOT / "sglang_dspark", ROOT)
    named = [s for s in spans(guide) if re.fullmatch(r"[\w./-]+(\.py|\.md|/)", s)]
    named += re.findall(r"\btests/[\w/]+(?:\.py)?", guide.read_text())
    assert [s for s in named if not any((d / s).exists() for d in folders)] == []


@cache
def sources() -> frozenset[str]:
    """Every tail of the path of a source file: `accept.py`, `step/accept.py` …"""
    tails = set()
    for folder in ("sglang_dspark", "kernels", "patches", "loadtest", "tests", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT).parts
            tails |= {"/".join(parts[at:]) for at in range(len(parts))}
    return frozenset(tails)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    """Except SGLang's, and those that the reader writes."""
    named = [s for s in spans(page) if re.fullmatch(r"[a-z][\w./-]*\.py", s)]
    assert [s for s in named if s not in sources() and "srt/" not in s and "NAME" not in s] == []


def test_the_architecture_has_a_line_for_each_package() -> None:
    listed = re.findall(r"^\| `(\w+)/` \|", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    packages = {init.parent.name for init in (ROOT / "sglang_dspark").glob("*/__init__.py")}
    assert sorted(listed) == sorted(packages)


def test_quoted_messages_are_the_codes() -> None:
    """First columns of the tables of troubleshooting.md, lines of the log in operations.md."""
    known = messages()
    quoted = [
        span
        for name in ("troubleshooting.md", "operations.md")
        for line in (DOCS / name).read_text().splitlines()
        for span in re.findall(r"^\| `([^`]+)` \|", line)
        if " " in span and "…" in span
    ]
    assert len(quoted) > 30
    for span in quoted:
        parts = [re.escape(part.strip()) for part in span.split("…")]
        pattern = re.compile(r".*?".join(part for part in parts if part))
        assert any(pattern.search(text) for text in known), span
