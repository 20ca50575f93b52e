"""Recognise drafters that run once a token by their config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EAGLE3, MTP = "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"  # architectures
ALGORITHMS = {EAGLE3: "EAGLE3", MTP: "EAGLE"}  # SGLang's own, which verify every draft
_USUAL_GAMMA = 5


def is_chain(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes such a drafter."""
    return any(raw.get("architectures") == [name] for name in ALGORITHMS)


def chain_gamma(raw: Mapping[str, Any]) -> int:
    """Return the drafts per step if no flag sets them: the trained number, or a usual one."""
    return int(raw.get("gamma") or _USUAL_GAMMA)
