"""Set up a sweep from its configuration: arms, models, servers' commands, and `run.json`."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import parse_json, reading
from sglang_dspark.common.hashes import file_sha256
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.results import commit
from sglang_dspark.loadtest.servers.arms import Arm, find_arms
from sglang_dspark.loadtest.servers.cores import assign_cores
from sglang_dspark.loadtest.servers.fleet import Fleet, Place
from sglang_dspark.loadtest.servers.workload import drafter_gamma
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.loadtest.sweep.run_dir import ArmRecord, Pilot, RunInfo, Table
from sglang_dspark.models.drafters import find_drafter
from sglang_dspark.models.identity import target_sha256
from sglang_dspark.ports import require_free_port

_PACKAGES = ("sglang-dspark", "sglang", "torch", "transformers", "locust")
_DRAFTS = "--speculative-num-draft-tokens="
_PLACES = (
    "--model-path",
    "--port",
    "--speculative-draft-model-path",
    "--speculative-token-map",
)
_COST_TABLE = re.compile(r"(?:read from|kept in) (\S+\.json)")


def choose_arms(config: SweepConfig) -> list[Arm]:
    """Return the sweep's arms. Raises DSparkError for an unknown one, listing the known ones."""
    return find_arms(config.arms, config.arms_folder)


def require_ports(config: SweepConfig, arms: Sequence[Arm]) -> None:
    """Raise DSparkError unless every server to be launched finds its port free."""
    for number, arm in enumerate(arms):
        if arm.name not in config.urls:
            require_free_port("127.0.0.1", config.port + number)


def drafter_folders(config: SweepConfig, arms: Sequence[Arm]) -> dict[str, Path]:
    """Find the folders of the arms' drafters, by kind (`models.drafters.find_drafter`)."""
    used = {arm.drafter for arm in arms if arm.drafter is not None and arm.name not in config.urls}
    return {
        kind: find_drafter(config.drafters[kind]) for kind in sorted(used & set(config.drafters))
    }


def gamma_of(arm: Arm, drafters: Mapping[str, Path]) -> int:
    """Return the drafts that an arm proposes a step; 0 without speculation."""
    if arm.drafter is None:
        return 0
    for argument in arm.arguments:
        if argument.startswith(_DRAFTS):
            return int(argument.removeprefix(_DRAFTS)) - 1
    if arm.drafter not in drafters:
        return 0  # served by URL: its gamma is not known here
    return drafter_gamma(drafters[arm.drafter])


def profiled_arms(arms: Sequence[Arm]) -> frozenset[str]:
    """Return the arms whose servers time their own steps as they start: those that schedule."""
    return frozenset(arm.name for arm in arms if _schedules(arm))


def place_arms(
    config: SweepConfig,
    arms: Sequence[Arm],
    target: Path,
    drafters: Mapping[str, Path],
    device: str,
    run: Path,
) -> list[Place]:
    """Place each arm's server. Raises DSparkError when its drafter or device is missing."""
    found = []
    for number, arm in enumerate(arms):
        if arm.name in config.urls:
            found.append(Place(arm, config.urls[arm.name].rstrip("/"), None))
            continue
        spec = arm.server(
            target, drafters, config.port + number, device, run / "arms", config.server_flags
        )
        spec = spec.launched_by(config.launcher)
        found.append(Place(arm, spec.url, spec))
    return found


def new_run(config: SweepConfig, arms: list[ArmRecord], device: str) -> RunInfo:
    """Create the first `run.json`. device: in words."""
    return RunInfo(
        name=config.name,
        config=_plain(config),
        argv=["dspark", *(portable(word) for word in sys.argv[1:])],
        commit=commit(),
        versions=_versions(),
        device=device,
        hardware=_hardware(),
        arms=arms,
        cores=assign_cores(config.cores),
        pilot=None,
        plan=[],
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def open_run(run: Path, fresh: RunInfo) -> RunInfo:
    """Return the sweep in that folder, to continue it, or write `fresh` there and return it.

    Raises DSparkError if the folder holds another sweep: its cells could not be compared.
    """
    if not (run / run_dir.RUN_FILE).exists():
        run_dir.write(run / run_dir.RUN_FILE, fresh)
        return fresh
    before = run_dir.read_run(run)
    named, now = _origin(before), _origin(fresh)
    other = sorted(key for key in named.keys() | now.keys() if named.get(key) != now.get(key))
    if other:
        raise DSparkError(
            f"{run} holds a sweep with another {', '.join(other)}; its cells cannot be mixed with "
            "new ones: name another --out"
        )
    return before


def arm_records(
    places: Sequence[Place], drafters: Mapping[str, Path], fleet: Fleet | None = None
) -> list[ArmRecord]:
    """Describe the arms; with a fleet, also the files and measurements of their servers."""
    records = []
    for place in places:
        arm = place.arm
        folder = drafters.get(arm.drafter or "") if place.spec is not None else None
        name = arm.name
        records.append(
            ArmRecord(
                name=name,
                about=arm.about,
                gamma=gamma_of(arm, drafters),
                command=portable(
                    place.spec.shell_line() if place.spec else " ".join([place.url, *arm.arguments])
                ),
                config=arm.config,
                environment=arm.environment,
                drafter=None if folder is None else portable(str(folder)),
                drafter_sha256=None if folder is None else target_sha256(folder),
                tables={} if fleet is None else _tables(arm, folder, fleet.log_path(name)),
                ready_s=None if fleet is None else fleet.ready_after.get(name),
            )
        )
    return records


def finished(info: RunInfo) -> RunInfo:
    """Return the info with its end time."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return info.model_copy(update={"ended": info.ended or now})


def planned(info: RunInfo, pilot: Pilot, plan: Sequence[str]) -> RunInfo:
    """Return the info with the pilot's figures, and all cells that follow from them."""
    return info.model_copy(update={"pilot": pilot, "plan": list(plan)})


def portable(text: str) -> str:
    """Replace this machine's folders in a text: the working directory by `.`, home by `~`."""
    here, home = os.getcwd(), str(Path.home())
    text = text.replace(f"{here}/", "").replace(here, ".")
    return text if home in ("/", "") else text.replace(home, "~")


def _origin(info: RunInfo) -> dict[str, Any]:
    """Collect the settings that cells must share to be compared; JSON-ready."""
    found = {**info.config, "commit": info.commit, "device": info.device}
    found |= {f"version of {name}": version for name, version in info.versions.items()}
    for arm in info.model_dump(mode="json")["arms"]:
        fields = {"command": _portable_words(arm["command"])}
        fields |= {field: arm[field] for field in ("config", "environment", "drafter_sha256")}
        found |= {f"{field} of arm {arm['name']}": value for field, value in fields.items()}
    return found


def _portable_words(command: str) -> list[str]:
    """Return an arm's command without port, folders and variables, which may change per start."""
    _, launched, rest = command.partition("python -m ")
    words = shlex.split(rest) if launched else command.split()
    return [
        word
        for before, word in pairwise(("", *words))
        if before not in _PLACES and not word.startswith(_PLACES)
    ]


def _schedules(arm: Arm) -> bool:
    mode = arm.config.get("schedule", {}).get("mode", "auto")
    return mode == "auto" and any("DSPARK" in argument for argument in arm.arguments)


def _tables(arm: Arm, drafter: Path | None, log: Path) -> dict[str, Table]:
    """Read the cost table that the server's log names, and the calibration of its drafter."""
    tables: dict[str, Table] = {}
    text = log.read_text(errors="replace") if log.is_file() else ""
    named = _COST_TABLE.findall(text)
    if named and Path(named[-1]).is_file():
        tables["costs"] = _table(Path(named[-1]))
    if drafter is not None and _schedules(arm) and (drafter / "sts.json").is_file():
        tables["sts"] = _table(drafter / "sts.json")
    return tables


def _table(path: Path) -> Table:
    with reading(path, "table of this package", "delete it and start again"):
        content = parse_json(portable(path.read_text(encoding="utf-8")))
    return Table(path=portable(str(path)), sha256=file_sha256(path), content=content)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _hardware() -> dict[str, str]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": str(os.cpu_count()),
        "memory": f"{pages / 2**30:.0f} GiB",
    }


def _plain(config: SweepConfig) -> dict[str, Any]:
    values = json.loads(portable(json.dumps(config.model_dump(mode="json"))))
    assert isinstance(values, dict)
    return values
