"""The options that the measuring commands share: which, with which defaults, and where they go."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sglang_dspark.cli._workload import (
    SAMPLING,
    TOP_K_ALL,
    DraftersOption,
    WorkloadOptions,
    takes_workload,
)
from sglang_dspark.cli.main import app

FIELDS = {
    "target": "demo",
    "prompts": None,
    "limit": None,
    "max_new_tokens": 96,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": TOP_K_ALL,
    "min_p": 0.0,
    "batch": 8,
    "seed": 0,
}
USUAL = {name: value for name, value in FIELDS.items() if name not in SAMPLING}
GREEDY = {name: USUAL[name] for name in USUAL if name not in ("temperature", "seed")}
COMMANDS = {  # those of the shared options that a command has, with their defaults
    "eval": FIELDS,
    "eval record": FIELDS,
    **dict.fromkeys([f"eval {name}" for name in ("tau", "positions", "depth", "length")], USUAL),
    **dict.fromkeys(
        [f"eval {name}" for name in ("thresholds", "reliability", "traffic", "roc")], USUAL
    ),
    "eval limits": GREEDY,
    "eval overhead": {k: v for k, v in GREEDY.items() if k != "limit"} | {"max_new_tokens": 64},
    "calibrate": USUAL | {"temperature": None, "batch": 32},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_offer_the_shared_options(name: str) -> None:
    command: Any = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]
    found = {each.name: each.default for each in command.params if each.name in FIELDS}
    assert found == COMMANDS[name]


def _run(*arguments: str, without: tuple[str, ...] = SAMPLING, **defaults: Any) -> Any:
    """Run a command with these shared options; return its arguments, or its exit code."""
    given: dict[str, Any] = {}
    small = typer.Typer()

    @small.command()
    @takes_workload(without=without, **defaults)
    def command(drafter: DraftersOption, options: WorkloadOptions, note: str = "none") -> None:
        given.update(drafter=drafter, options=options, note=note)

    outcome = CliRunner().invoke(small, ["--drafter", "d", *arguments])
    return given or outcome.exit_code


def test_what_is_said_arrives_and_the_rest_keeps_its_default() -> None:
    said = ("--temperature", "0.5", "--prompts", "a", "--prompts", "b", "--note", "n")
    expected = WorkloadOptions(temperature=0.5, prompts=["a", "b"])
    assert _run(*said) == {"drafter": ["d"], "options": expected, "note": "n"}
    other = _run("--top-p", "0.9", without=("seed",), batch=32)["options"]
    assert other == WorkloadOptions(top_p=0.9, batch=32)
    assert _run("--top-p", "0.9") == 2, "a command refuses an option that it does not have"


def test_options_are_what_the_engine_decodes_with() -> None:
    options = WorkloadOptions(
        max_new_tokens=7, temperature=0.5, top_p=0.25, top_k=5, min_p=0.125, batch=2, seed=11
    )
    found = options.decoding(gamma=4)
    assert (found.max_new_tokens, found.temperature, found.batch, found.seed) == (7, 0.5, 2, 11)
    assert (found.top_p, found.top_k, found.min_p, found.gamma) == (0.25, 5, 0.125, 4)
