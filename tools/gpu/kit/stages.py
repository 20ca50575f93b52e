"""The stages of the GPU kit, most valuable first: what a short loan of a device should show."""

from __future__ import annotations

from dataclasses import dataclass

from tools.gpu.packing.arrival import SGLANG

KERNELS = ("kernels", "sglang_dspark/benchmarks", "sglang_dspark/verify", "tools/gpu/kit")
TRAINING = ("configs/train", "sglang_dspark", "tools/gpu")
GOES_ON = 75  # EX_TEMPFAIL
SERVING = ("kernels", "patches", "loadtest", "configs/serve", "sglang_dspark", "tools/gpu/kit")


@dataclass(frozen=True)
class Stage:
    """module: run as `python -m MODULE ARGUMENTS`. It prints JSON objects to stdout, one a line,
    the device's name in the first: those of the form {"row": ...} are collected in a list, the
    others are put together. limit_s: after so long it is ended. about: in a few words. needs: the
    parcels without which it cannot run. code: folders whose files decide what it finds. least_s:
    of a stage that fits itself into the time that is left: so much it needs; None: all of limit_s.
    archives: whether logs and kernel caches come back behind it (`archive.py`).

    A stage is told of its time and of a folder for files in $KIT_SECONDS and $KIT_FILES. One that
    ends with status `GOES_ON` has more to do, and goes on in the next call."""

    name: str
    module: str
    limit_s: int
    about: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    code: tuple[str, ...] = KERNELS
    least_s: int | None = None
    archives: bool = False


def _training(kind: str) -> Stage:
    module, about = "tools.gpu.kit.training", "the longest run that fits the call, bf16"
    needs = (SGLANG, "smollm")
    return Stage(f"train-{kind}", module, 570, about, (kind,), needs, TRAINING, least_s=150)


def _operator(name: str, limit_s: int, about: str) -> Stage:
    return Stage(name, "tools.gpu.kit.operator", limit_s, about, (name,))


STAGES = (
    Stage("device", "tools.gpu.kit.device", 60, "versions, memory, measured ceilings"),
    Stage("parity", "tools.gpu.kit.parity", 400, "every kernel against its reference"),
    Stage(
        "first",
        "tools.gpu.kit.first",
        560,
        "a target of Qwen3-4B's shape served in every way: right tokens, speed, steps, traces; "
        "a target that attends",
        needs=(SGLANG,),
        code=SERVING,
        least_s=240,
        archives=True,
    ),
    _operator("markov", 120, "the sequential head's steps beside SGLang's"),
    _operator("admission", 60, "admission beside torch's sort and SGLang's"),
    _operator("greedy", 60, "greedy acceptance beside SGLang's"),
    _operator("accept", 120, "sampled acceptance beside SGLang's"),
    _operator(
        "commit", 60, "accepted rows packed, projected and written beside SGLang's whole windows"
    ),
    Stage("experts", "tools.gpu.kit.experts", 400, "expert products and layers beside their peers"),
    Stage(
        "fsdp",
        "tools.gpu.kit.fsdp",
        120,
        "training by FSDP2 in one process, step by step beside training without",
        needs=(SGLANG,),
        code=TRAINING,
    ),
    Stage(
        "answers",
        "tools.gpu.kit.answers",
        300,
        "the demo's model answers prompts, to train on",
        needs=(SGLANG, "smollm"),
        code=TRAINING,
        least_s=90,
    ),
    *(_training(kind) for kind in ("dspark", "eagle3", "dflash")),
)
