"""Report expert backends for `dspark doctor`: each format's backend, and why not the others.

Chosen as by a server on this device for a layer like the demo drafter's, in captured passes on a
GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_dspark.backends.moe import expert_backends
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.backends import ExpertWorkload
from sglang_dspark.experts.dispatch import choose
from sglang_dspark.experts.times import TimesTable, cache_path, folder, load
from sglang_dspark.quantisation.formats import FORMATS


def experts_here() -> tuple[str, list[str]]:
    """Report each format's backend, a layer's bytes and the times measured here; and list faults
    of saved times."""
    said: dict[str, list[str]] = {}  # text -> its formats
    measured, broken = [], []
    for name in FORMATS:
        workload = _workload(name)
        key = expert_backends.key_of(workload)
        path, times = cache_path(key), None
        if path.is_file():
            try:
                times = load(path, key)
                measured.append(str(times))
            except DSparkError as error:
                broken.append(str(error))
        said.setdefault(_chosen(workload, times), []).append(name)
    parts = [f"{', '.join(names)} {text}" for text, names in said.items()]
    kept = " | ".join(measured) or "none of this layer shape yet"
    parts += [_sizes(), f"measured times in {folder()}: {kept}"]
    return "; ".join(parts), broken


def _sizes() -> str:
    """Report the memory of a layer's routed experts; CPU kernels restore codes to float32."""
    layer = _workload(next(iter(FORMATS)))
    weights = 3 * layer.experts * layer.inner * layer.width
    sizes = [f"{f.name} {weights * f.bits_per_weight / 8e6:.1f} MB" for f in FORMATS.values()]
    restored = f" and {weights * 4 / 1e6:.1f} MB restored" if layer.device == "cpu" else ""
    return f"a layer's experts take {', '.join(sizes)}{restored}"


def _workload(name: str) -> ExpertWorkload:
    if not torch.cuda.is_available():
        return ExpertWorkload("cpu", name)
    capability = torch.cuda.get_device_capability()
    return ExpertWorkload("cuda", name, dtype=torch.bfloat16, graph=True, capability=capability)


def _chosen(workload: ExpertWorkload, times: TimesTable | None) -> str:
    """Report the backend and why not each other one; each reason appears once."""
    near, unfit = (times.near(workload.tokens), times.unfit) if times else (None, None)
    outside = ""
    try:
        choice = choose(workload, near, unfit)
    except DSparkError:
        if not workload.graph:
            raise
        choice, outside = choose(replace(workload, graph=False), near, unfit), ", outside graphs"
    reasons: dict[str, list[str]] = {}
    for name, why in choice.passed_over.items():
        reasons.setdefault(why, []).append(name)
    others = "; ".join(f"not {', '.join(names)}: {why}" for why, names in reasons.items())
    return f"by {choice.backend}{outside} ({choice.reason}; {others})"
