"""The stages of the GPU kit, most valuable first, for a short loan of a device."""

from __future__ import annotations

from dataclasses import dataclass

from tools.gpu.packing.arrival import SGLANG

KERNELS = ("kernels", "sglang_dspark/benchmarks", "sglang_dspark/verify", "tools/gpu/kit")
TRAINING = ("configs/train", "sglang_dspark", "tools/gpu")
GOES_ON = 75  # EX_TEMPFAIL
SERVING = ("kernels", "patches", "loadtest", "configs/serve", "sglang_dspark", "tools/gpu/kit")


@dataclass(frozen=True)
class Stage:
    """A stage of the kit.

    module: run as `python -m MODULE`. It prints JSON objects to stdout, one a line, the device's
    name in the first: those of the form {"row": ...} are collected in a list, the others are
    merged. limit_s: it is killed after this time. about: a short description. needs: parcels that
    it requires. code: folders whose files determine its result. least_s: shortest time of a stage
    that fits itself into the time left; None: it needs limit_s. archives: pack logs and kernel
    caches after it (`archive.py`).

    A stage reads its time and its folder for files from $KIT_SECONDS and $KIT_FILES. Status
    `GOES_ON` means that it continues in the next call."""

    name: str
    module: str
    limit_s: int
    about: str
    needs: tuple[str, ...] = ()
    code: tuple[str, ...] = KERNELS
    least_s: int | None = None
    archives: bool = False


STAGES = (
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
    Stage(
        "operators",
        "tools.gpu.kit.operators",
        100,
        "changed kernels against their references; the step's operators in CUDA graphs",
        least_s=45,
    ),
    Stage(
        "experts",
        "tools.gpu.kit.experts",
        120,
        "an expert layer and its products beside their peers",
        least_s=60,
    ),
    Stage("device", "tools.gpu.kit.device", 60, "versions, memory, measured ceilings"),
    Stage(
        "train",
        "tools.gpu.kit.training",
        560,
        "answers by a plain server, then a DSpark drafter trained on them, bf16",
        needs=(SGLANG, "smollm"),
        code=TRAINING,
        least_s=200,
    ),
)
