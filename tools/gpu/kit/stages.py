"""The stages of the GPU kit, most valuable first: what a short loan of a device should show."""

from __future__ import annotations

from dataclasses import dataclass

from tools.gpu.packing.arrival import SGLANG

KERNELS = ("kernels", "sglang_dspark/benchmarks", "sglang_dspark/verify", "tools/gpu/kit")
SERVING = ("kernels", "patches", "loadtest", "configs/serve", "sglang_dspark", "tools/gpu/kit")


@dataclass(frozen=True)
class Stage:
    """module: run as `python -m MODULE ARGUMENTS`. It prints JSON objects to stdout, one a line,
    the device's name in the first: those of the form {"row": ...} are collected in a list, the
    others are put together. limit_s: after so long it is ended. about: in a few words. needs: the
    parcels without which it cannot run. code: folders whose files decide what it finds."""

    name: str
    module: str
    limit_s: int
    about: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    code: tuple[str, ...] = KERNELS


def _servers(arm: str, about: str) -> Stage:
    module = "tools.gpu.kit.servers"
    return Stage(f"servers-{arm}", module, 330, about, (arm,), (SGLANG,), SERVING)


def _operator(name: str, limit_s: int, about: str) -> Stage:
    return Stage(name, "tools.gpu.kit.operator", limit_s, about, (name,))


STAGES = (
    Stage("device", "tools.gpu.kit.device", 60, "versions, memory, measured ceilings"),
    Stage("parity", "tools.gpu.kit.parity", 240, "every kernel against its reference"),
    _servers("plain", "a target of Qwen3-4B's shape without drafts"),
    _servers("dspark", "the same, drafts scheduled by confidence"),
    _servers("dspark-fixed-gamma", "the same, every draft verified"),
    _servers("mtp1", "the same with MTP, one draft a step"),
    Stage(
        "smollm",
        "tools.gpu.kit.smollm",
        420,
        "the demo's model: text and speed of DSPARK beside plain",
        needs=(SGLANG, "smollm"),
        code=(*SERVING, "drafters"),
    ),
    _operator("markov", 120, "the sequential head's steps beside SGLang's"),
    _operator("admission", 60, "admission beside torch's sort and SGLang's"),
    _operator("greedy", 60, "greedy acceptance beside SGLang's"),
    _operator("accept", 120, "sampled acceptance beside SGLang's"),
    _operator("commit", 60, "packing before projecting beside projecting whole windows"),
    Stage("experts", "tools.gpu.kit.experts", 400, "expert products and layers beside their peers"),
)
