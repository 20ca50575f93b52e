"""Refuse weight updates from disk whose format or model cannot be loaded.

Upstream (sglang/srt/managers/tokenizer_manager.py) sends the request on to the schedulers.
There an unknown `load_format` raises, which ends the server. Weights of another architecture have
other names: the target's loader skips them and reports success.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import brief, load_json
from sglang_dspark.patches.seam import Seams

SEAMS = Seams()
Answer = tuple[bool, str, int]  # success, message, number of paused requests
# The formats of upstream's DefaultModelLoader, the only loader that an update may use.
FORMATS = ("auto", "safetensors", "pt", "npcache", "mistral")
PACKAGES = ("fastsafetensors", "instanttensor")  # formats that need the package of their name


@SEAMS.around(
    "weight-request-check",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
    why="upstream ends for an unknown load_format, and reports success for another model",
    issue="sgl-project/sglang#2322",
    drop_when="upstream refuses an unknown load_format and weights of another model",
)
async def update_from_disk(
    original: Callable[..., Awaitable[Answer]], self: Any, obj: Any, request: Any = None
) -> Answer:
    """Answer 400 if refused (AROUND hook of `TokenizerManager.update_weights_from_disk`)."""
    architectures = list(getattr(self.model_config.hf_config, "architectures", None) or ())
    fault = format_fault(obj.load_format) or model_fault(Path(obj.model_path), architectures)
    return (False, fault, 0) if fault else await original(self, obj, request)


def format_fault(load_format: str | None) -> str | None:
    """Return the fault of a format for updates, or None. None is the server's own format."""
    known = [*FORMATS, *filter(importlib.util.find_spec, PACKAGES)]
    if load_format is None or load_format in known:
        return None
    return f"load_format {brief(repr(load_format))} is not one of {', '.join(known)}"


def model_fault(folder: Path, architectures: list[str]) -> str | None:
    """Return the fault of weights that are not the target's; None if they may be.

    folder: with `config.json`; without a readable one, as for a Hub id, upstream decides.
    architectures: of the served target.
    """
    try:
        found = load_json(folder / "config.json").get("architectures")
    except (OSError, ValueError, AttributeError):
        return None
    if not found or not architectures or found == architectures:
        return None
    return (
        f"{folder} has architectures {brief(found, 60)} in config.json, the served target "
        f"{brief(architectures, 60)}; only the target's weights can be updated, a new drafter "
        "needs a restart"
    )
