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
    known = [*FORMATS, *filter(importlib.util.find_spec, PACKAGES)]
    if obj.load_format not in (None, *known):  # None is the server's own format
        fault = f"load_format {brief(repr(obj.load_format))} is not one of {', '.join(known)}"
        return False, fault, 0
    served, found = self.model_config.hf_config.architectures, _architectures(obj.model_path)
    if found and served and found != served:
        fault = (
            f"{obj.model_path} has architectures {brief(found, 60)} in config.json, the served "
            f"target {brief(served, 60)}; only the target's weights can be updated, a new drafter "
            "needs a restart"
        )
        return False, fault, 0
    return await original(self, obj, request)


def _architectures(folder: str) -> Any:
    """Return a model's architectures; None without a readable config.json, as for a Hub id."""
    try:
        return load_json(Path(folder, "config.json")).get("architectures")
    except (OSError, ValueError, AttributeError):
        return None
