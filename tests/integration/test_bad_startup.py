"""Bad drafters, bad arguments, a changed SGLang: one clear line, status not 0, no process left.

Each case goes through the real command line. Which faults a drafter can have is shown in all its
variants by tests/serving/test_checkpoint.py; here is one of each kind.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sglang_dspark.loadtest.servers.server import ServerSpec
from tests.integration.serving import (
    CPU_FLAGS,
    DSPARK_FLAGS,
    HOST,
    Ended,
    run_to_the_end,
)
from tests.integration.tiny_models import GAMMA, TinyPair
from tests.ports import free_ports

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bad-startup")]

TIME_LIMIT_S = 240.0  # some 15 s on a quiet machine, most of it the import of SGLang
Breakage = Callable[[Path], None]


def launch(
    pair: TinyPair,
    drafter: Path,
    *arguments: str,
    port: int | None = None,
    **environment: str,
) -> Ended:
    """Run the server's command line on the tiny target until it ends by itself."""
    spec = ServerSpec(
        "bad",
        pair.target,
        port or free_ports(),
        (*CPU_FLAGS, *DSPARK_FLAGS, str(drafter), *arguments),
        HOST,
    )
    return run_to_the_end(spec, {**os.environ, **environment}, TIME_LIMIT_S)


def refused(ended: Ended, *says: str) -> None:
    """Status not 0, exactly one line of ours that says what is expected, no traceback, no child."""
    assert ended.status != 0
    assert len(ended.ours) == 1, ended.stderr[-3000:]
    for text in says:
        assert text in ended.ours[0]
    assert "Traceback" not in ended.stderr, ended.stderr[-3000:]
    assert ended.leftovers == []


def edit_config(**changes: Any) -> Breakage:
    def change(drafter: Path) -> None:
        file = drafter / "config.json"
        values = json.loads(file.read_text())
        for name, value in changes.items():
            nested = values["dflash_config"]
            (nested if name in nested else values)[name] = value
        file.write_text(json.dumps(values))

    return change


def drop_weight(name: str) -> Breakage:
    def change(drafter: Path) -> None:
        file = drafter / "model.safetensors"
        tensors = load_file(file)
        del tensors[name]
        save_file(tensors, file, {"format": "pt"})

    return change


def truncate(drafter: Path) -> None:
    file = drafter / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def remove_config(drafter: Path) -> None:
    (drafter / "config.json").unlink()


BROKEN_DRAFTERS: dict[str, tuple[Breakage, tuple[str, ...]]] = {
    "hidden size": (edit_config(hidden_size=96), ("hidden_size is 96", "has 64")),
    "vocabulary": (edit_config(vocab_size=512), ("vocab_size is 512", "has 260")),
    "depth of the target": (edit_config(num_target_layers=30), ("num_target_layers is 30",)),
    "layer out of range": (edit_config(target_layer_ids=[0, 7]), ("target_layer_ids [7]",)),
    "mask token": (edit_config(mask_token_id=260), ("mask_token_id 260",)),
    "architecture": (
        edit_config(architectures=["LlamaForCausalLMEagle3"]),
        ("LlamaForCausalLMEagle3", "no DSpark drafter"),
    ),
    "confidence head": (
        drop_weight("confidence_head.proj.weight"),
        ("lacks the weight confidence_head.proj.weight",),
    ),
    "truncated weights": (truncate, ("truncated or corrupt",)),
    "no config": (remove_config, ("has no config.json",)),
}
# The rules of all of them are held without a server in tests/serving/test_checkpoint.py.
QUICK = ("hidden size",)


@pytest.fixture(scope="module")
def broken_starts(
    request: pytest.FixtureRequest, tiny: TinyPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Ended]]]:
    """The selected cases of the test below, started ahead: most of their time is one core's."""

    def start(name: str) -> Ended:
        drafter = tmp_path_factory.mktemp("broken") / "drafter"
        shutil.copytree(tiny.drafter, drafter)
        BROKEN_DRAFTERS[name][0](drafter)
        return launch(tiny, drafter)

    selected = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.originalname == test_a_drafter_that_does_not_fit.__name__
        and not item.get_closest_marker("skip")
    ]
    with ThreadPoolExecutor(max_workers=2) as threads:
        yield {name: threads.submit(start, name) for name in selected}


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BROKEN_DRAFTERS],
)
def test_a_drafter_that_does_not_fit(broken_starts: dict[str, Future[Ended]], name: str) -> None:
    refused(broken_starts[name].result(), *BROKEN_DRAFTERS[name][1])


# Verdicts of these arguments are tested without a start in tests/cli/test_doctor_serve.py.
@pytest.mark.slow
def test_gamma_over_the_trained_block(tiny: TinyPair) -> None:
    ended = launch(tiny, tiny.drafter, "--speculative-dspark-block-size", str(GAMMA + 1))
    refused(ended, f"blocks of {GAMMA} tokens, but gamma {GAMMA + 1}")


@pytest.mark.slow
def test_draft_tokens_for_another_gamma(tiny: TinyPair) -> None:
    ended = launch(tiny, tiny.drafter, "--speculative-num-draft-tokens", str(GAMMA - 1))
    refused(ended, f"must be {GAMMA + 1}, not {GAMMA - 1}", "--speculative-dspark-block-size")


@pytest.mark.slow
def test_a_drafter_that_is_not_there(tiny: TinyPair, tmp_path: Path) -> None:
    refused(launch(tiny, tmp_path / "gone"), "does not exist", "--speculative-draft-model-path")


@pytest.mark.slow
def test_a_drafter_that_the_hub_does_not_give(tiny: TinyPair) -> None:
    ended = launch(tiny, Path("nowhere/no-such-drafter"), HF_HUB_OFFLINE="1")
    refused(ended, "nowhere/no-such-drafter is no directory here", "cannot be fetched from the Hub")


def test_a_port_in_use(tiny: TinyPair) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = launch(tiny, tiny.drafter, port=port)
    refused(ended, f"cannot listen on {HOST}:{port}", "--port")


@pytest.mark.slow
def test_an_unknown_field_in_the_configuration(tiny: TinyPair, tmp_path: Path) -> None:
    config = tmp_path / "dspark.yaml"
    config.write_text("cpu:\n  thread: 2\n")
    says = ("unknown field cpu.thread", str(config))
    refused(launch(tiny, tiny.drafter, "--dspark-config", str(config)), *says)
    refused(launch(tiny, tiny.drafter, SGLANG_DSPARK_CONFIG=str(config)), *says)


@pytest.mark.slow
def test_a_mode_that_is_sglangs_alone(tiny: TinyPair, tmp_path: Path) -> None:
    config = tmp_path / "dspark.yaml"
    config.write_text("schedule: {mode: off}\n")
    says = ("schedule.mode is off", "use schedule.mode auto or static")
    refused(launch(tiny, tiny.drafter, "--dspark-config", str(config)), *says)


# A third-party plugin, which changes SGLang in the processes named. SGLang imports all plugins
# before it calls the first, so in any order this happens before ours.
RIVAL = """
import sys

def caller_is(name):
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False

def register():
    pass

ALWAYS
if WHERE:
    import sglang
    from sglang.srt import server_args
    WHAT
"""
NEW_VERSION = 'sglang.__version__ = "0.5.99"'
NEW_SIGNATURE = "server_args.prepare_server_args = lambda argv, strict: None"
FORGET = """
    from sglang.srt.plugins.hook_registry import HookRegistry
    apply_hooks = HookRegistry.apply_hooks
    def forgetful():
        HookRegistry._hooks.pop("sglang.srt.server_args.prepare_server_args", None)
        apply_hooks()
    HookRegistry.apply_hooks = forgetful
"""


# A process with another thread spawns its children, which import all plugins again.
A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


def rival_plugin(folder: Path, where: str, what: str, always: str = "") -> str:
    """A PYTHONPATH that holds the plugin; installed in a folder of its own."""
    info = folder / "a_rival-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-rival\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\na_rival = a_rival:register\n")
    text = RIVAL.replace("WHERE", where).replace("WHAT", what).replace("ALWAYS", always)
    (folder / "a_rival.py").write_text(text)
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        pytest.param(
            NEW_VERSION,
            ("sglang 0.5.99 is not supported", "install sglang==0.5.23"),
            marks=pytest.mark.slow,
            id="version",
        ),
        pytest.param(
            NEW_SIGNATURE,
            ("prepare_server_args should be (argv) but is (argv, strict)",),
            id="signature",
        ),
        pytest.param(
            FORGET,
            ("hook on sglang.srt.server_args.prepare_server_args did not take",),
            marks=pytest.mark.slow,
            id="not applied",
        ),
    ],
)
def test_a_changed_sglang_stops_the_first_process(
    tiny: TinyPair, tmp_path: Path, what: str, says: tuple[str, ...]
) -> None:
    path = rival_plugin(tmp_path, "True", what)
    ended = launch(tiny, tiny.drafter, PYTHONPATH=path)
    refused(ended, *says, "DSPARK_DISABLE=1")


@pytest.mark.parametrize(
    "function",
    ["run_scheduler_process", pytest.param("run_detokenizer_process", marks=pytest.mark.slow)],
)
def test_a_changed_sglang_in_a_child_stops_the_whole_server(
    tiny: TinyPair, tmp_path: Path, function: str
) -> None:
    path = rival_plugin(tmp_path, f"caller_is({function!r})", NEW_SIGNATURE, A_THREAD)
    ended = launch(tiny, tiny.drafter, PYTHONPATH=path)
    refused(ended, "prepare_server_args should be (argv) but is (argv, strict)")
