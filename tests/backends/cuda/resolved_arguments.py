"""Resolve the arguments of a DSPARK server as SGLang does, on a faked GPU with our patches.

Run as a program: folders of a target and a drafter, and a JSON list of cases, each with
`capability` [major, minor], `memory` in GiB and `arguments` of ServerArgs. One line of JSON a case:
what was resolved, what this package logged, and the value of SGLang's mode variable afterwards.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import torch

from sglang_dspark.serving.mode import VARIABLE
from sglang_dspark.serving.startup import PLUGIN_NAME
from tests.backends.cuda.on_faked_device import fake_device

READ = (
    "attention_backend",
    "speculative_draft_attention_backend",
    "page_size",
    "max_running_requests",
    "warmups",
    "dtype",
)


class Lines(logging.Handler):
    """Keeps what this package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def put_in_place() -> None:
    """Our plugin as a server loads it, which proves that each seam took; not our CPU platform."""
    os.environ["SGLANG_PLUGINS"] = PLUGIN_NAME
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_dspark.patches import registry

    assert registry.installed, "the plugin did nothing"


def facts(major: int) -> dict[str, bool]:
    """Return SGLang's platform facts of a GPU of this generation, FlashInfer installed."""
    return {
        "is_cuda": True,
        "has_flashinfer": True,
        "is_sm90": major == 9,
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm100": major == 10,
        "is_sm120": major == 12,
        "is_blackwell": major in (10, 11, 12),
    }


def resolved(target: str, drafter: str, case: dict[str, Any], lines: Lines) -> dict[str, Any]:
    """One case, its environment undone behind it."""
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import ServerArgs

    major, minor = case["capability"]
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    memory_hook.get_device_memory_capacity = lambda device: case["memory"] * 1024
    kept = dict(os.environ)
    os.environ.update(case.get("environment", {}))
    lines.said.clear()
    try:
        with runtime_context.override_platform(**facts(major)):
            args = ServerArgs(
                model_path=target,
                speculative_algorithm="DSPARK",
                speculative_draft_model_path=drafter,
                device="cuda",
                **case["arguments"],
            )
            args.resolve_once()
            view = resolved_view(args)
            said = {name: getattr(view, name) for name in READ}
            said["decode_sizes"] = view.cuda_graph_config.decode.bs
            said["largest_size"] = view.cuda_graph_config.decode.max_bs
            said["draft_dtype"] = str(draft_config(args, drafter).dtype)
            return {**said, "said": list(lines.said), "mode": os.environ.get(VARIABLE, "")}
    finally:
        os.environ.clear()
        os.environ.update(kept)


def draft_config(args: Any, drafter: str) -> Any:
    """SGLang's `ModelConfig` of the drafter, as its draft worker makes it."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(args, model_path=drafter, is_draft_model=True)


def main(target: str, drafter: str, cases: str) -> None:
    """Print what comes of each case."""
    os.environ.pop(VARIABLE, None)
    fake_device()
    put_in_place()
    lines = Lines()
    ours = logging.getLogger("sglang_dspark")
    ours.addHandler(lines)
    ours.setLevel(logging.INFO)
    for case in json.loads(cases):
        print(json.dumps(resolved(target, drafter, case, lines)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
