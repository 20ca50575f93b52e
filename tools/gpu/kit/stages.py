"""The stages of the GPU kit, most valuable first: what a short loan of a device should show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """module: run as `python -m MODULE`. It prints JSON objects to stdout, one a line, the device's
    name in the first: those of the form {"row": ...} are collected in a list, the others are put
    together. limit_s: after so long it is ended. about: in a few words."""

    name: str
    module: str
    limit_s: int
    about: str


STAGES = (
    Stage("device", "tools.gpu.kit.device", 60, "versions, memory, measured ceilings"),
    Stage("parity", "tools.gpu.kit.parity", 240, "every kernel against its reference"),
    Stage("admission", "tools.gpu.kit.admission", 60, "admission beside torch's sort"),
    Stage("accept", "tools.gpu.kit.accept", 120, "sampled acceptance beside SGLang's"),
    Stage("experts", "tools.gpu.kit.experts", 400, "expert products and layers beside their peers"),
)
