"""Diagnose an installation for `dspark doctor`: device, patches, configuration, models.

installation.py checks the packages; the patches report themselves (patches/seam_report.py).
`problems` prevent a server's start; `notes` are other findings.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import SUPPORTED_SGLANG
from sglang_dspark.serving import installation, startup, upstream, upstream_calls, upstream_check

ENTRY_POINTS = {
    "sglang.srt.plugins": startup.PLUGIN_NAME,
    "sglang.srt.platforms": startup.PLATFORM_NAME,
}


@dataclass(frozen=True)
class SeamReport:
    """A seam's report; `state` is installed, inert, mismatch or not installed."""

    name: str
    target: str
    kind: str
    device: str
    expected: str
    found: str
    signature_ok: bool
    state: str
    why: str
    issue: str = ""
    drop_when: str = ""


@dataclass
class Diagnosis:
    """All findings; `fit` is whether a DSPARK server can start here.

    advice: how to repeat this kind of installation, if it has a fault.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    install: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    entry_points: dict[str, bool] = field(default_factory=dict)
    upstream: dict[str, int] = field(default_factory=dict)
    seams: list[SeamReport] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: str = ""

    @property
    def fit(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return plain values, `fit` and `sglang_supported` first."""
        supported = self.versions.get("sglang") == SUPPORTED_SGLANG
        return {"fit": self.fit, "sglang_supported": supported, **asdict(self)}


Look = Callable[[Diagnosis], None]


def diagnose(look_at_device: Look, look_at_seams: Look) -> Diagnosis:
    """Run each check once; costs some seconds, since SGLang is imported.

    look_at_device: adds the state of our kernels here. look_at_seams: adds the state of each patch
    of SGLang, if that can be imported.
    """
    found = Diagnosis()
    importable = _installation(found)
    look_at_config(found)
    if importable:
        _look_at_names(found)
        found.problems += [f"{line}; {startup.WHAT_TO_DO}" for line in upstream_calls.mismatches()]
        found.notes += upstream_check.changed_bodies()
        _look_where_possible(found, _device, look_at_device, look_at_seams)
        _look_at_names(found)  # now most modules are loaded and can be read
    _target(found)
    if importable:
        _drafter(found)
    reason = startup.switched_off()
    if reason is not None:
        found.problems.append(f"sglang-dspark is switched off: {reason}")
    return found


def _installation(found: Diagnosis) -> bool:
    """Check packages, entry points and kind; return whether torch and SGLang can be imported."""
    found.versions, broken = installation.versions()
    faults = installation.import_faults(found.versions)
    broken += faults + _entry_points(found)
    importable = not faults and None not in (found.versions["sglang"], found.versions["torch"])
    if importable:
        found.install, found.problems = installation.kind()
        if found.install["kind"] == "cpu":
            missing, found.notes = installation.compare_with_lock(found.install)
            broken += missing
    found.problems = broken + found.problems
    found.advice = installation.advice() if broken else ""
    return importable


def _entry_points(found: Diagnosis) -> list[str]:
    """Check SGLang's two entry points for this package; return their faults."""
    wrong = []
    for group, name in ENTRY_POINTS.items():
        present = any(
            point.name == name and point.value.startswith("sglang_dspark.")
            for point in metadata.entry_points(group=group)
        )
        found.entry_points[f"{group}: {name}"] = present
        if not present:
            wrong.append(f"entry point {name} of group {group} is not in the installed package")
    return wrong


def _look_at_names(found: Diagnosis) -> None:
    """Add the names that we use and SGLang lacks."""
    found.upstream = upstream_check.counts()
    lines = [f"{line}; {startup.WHAT_TO_DO}" for line in upstream_check.missing()]
    found.problems += [line for line in lines if line not in found.problems]


def _look_where_possible(found: Diagnosis, *looks: Callable[[Diagnosis], None]) -> None:
    """Run each look. While SGLang lacks names, which are reported, a look that fails is skipped."""
    for look in looks:
        try:
            look(found)
        except Exception:
            if not upstream_check.missing():
                raise


def look_at_config(found: Diagnosis) -> None:
    """Add the effective configuration with the origin of each value, or the file's fault."""
    from sglang_dspark.serving.config import load_config

    try:
        loaded = load_config()
    except DSparkError as error:
        found.problems.append(str(error))
        return
    values = {
        name: {"value": _dotted(loaded.config, name), "origin": origin}
        for name, origin in loaded.origins.items()
    }
    found.config = {"path": str(loaded.path) if loaded.path else None, "values": values}


def _dotted(model: Any, name: str) -> Any:
    for part in name.split("."):
        model = getattr(model, part)
    return model


def _device(found: Diagnosis) -> None:
    import torch

    kind = type(upstream.current_platform)
    active = startup.cpu_platform_active()
    found.device = {
        "platform": f"{kind.__module__}.{kind.__qualname__}",
        "cpu_platform_active": active,
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    if active and found.device["cpu_capability"] in ("DEFAULT", "NO AVX"):
        found.notes.append("this CPU has no AVX2: serving will be slow")


def _target(found: Diagnosis) -> None:
    from sglang_dspark.models.demo import damage, demo_target_path

    path = demo_target_path()
    fault = damage(path) if path.is_dir() else "not built yet"
    found.target = {"path": str(path), "state": "ready" if fault is None else fault}
    if fault is not None:
        found.notes.append(f"demo target: {fault}; build it with `dspark models demo`")


def _drafter(found: Diagnosis) -> None:
    from sglang_dspark.drafter.checkpoint import stored_bytes
    from sglang_dspark.drafter.fields import raw_config
    from sglang_dspark.drafter.target_fit import Target
    from sglang_dspark.models.drafters import shipped_drafter_path
    from sglang_dspark.serving.checkpoint import validate_drafter

    try:
        path = shipped_drafter_path()
    except DSparkError as error:
        found.drafter = {"path": None, "state": "absent"}
        found.notes.append(str(error))
        return
    found.drafter = {"path": str(path), "state": "valid"}
    try:
        if found.target["state"] == "ready":
            place = found.target["path"]
            sizes = raw_config(Path(place))
            layers = sizes["num_hidden_layers"]
        else:  # no target to compare with: the drafter must at least be consistent
            place = "it names"
            sizes = raw_config(path)
            layers = sizes["num_target_layers"]
        fits = Target(
            place, sizes["hidden_size"], sizes["vocab_size"], layers, sizes["architectures"][0]
        )
        validate_drafter(path, fits)
        found.drafter["megabytes"] = {
            kind: round(size / 1e6, 1) for kind, size in stored_bytes(path).items()
        }
    except DSparkError as error:
        found.drafter["state"] = "invalid"
        found.problems.append(str(error))
