"""Start the scheduled server by the first settings that work, from the default down.

A failed start would leave a loan of the device without figures. So each failure is a row with its
reason and the end of its log, and the next rung turns off one more possible cause.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import load_yaml
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from tools.gpu.kit.device import say

CONFIG = "SGLANG_DSPARK_CONFIG"
READY_S = 250.0  # the first start on a machine compiles kernels, captures graphs and measures them
AGAIN_S = 150.0  # for later starts most of them are compiled
LOG_LINES = 40


@dataclass(frozen=True)
class Rung:
    """Settings of a start. arguments, environment: added; schedule, verify: our configuration's."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    verify: Mapping[str, Any] = field(default_factory=dict)


RUNGS = (
    Rung("as it comes"),
    Rung(
        "no prefill graphs, verify: {window_kernel: false}",
        ("--disable-prefill-cuda-graph",),
        verify={"window_kernel": False},
    ),
    Rung("--disable-overlap-schedule", ("--disable-overlap-schedule",)),
    Rung("--disable-cuda-graph", ("--disable-cuda-graph",)),
    Rung("schedule: {mode: static}", schedule={"mode": "static"}),
    Rung("DSPARK_DISABLE=1", environment={"DSPARK_DISABLE": "1"}),
)


class Ladder:
    """Starts of one server; `rung` is the one that serves, or the next to try."""

    def __init__(
        self, spec: ServerSpec, logs: Path, left: Callable[[], float], reserve_s: float = 0.0
    ) -> None:
        """Keep the server's command; the step log is in `logs`. A start ends when only `reserve_s`
        seconds are `left()`."""
        self._spec, self._logs, self._left, self._reserve_s = spec, logs, left, reserve_s
        self._place = 0
        self._server: ServerProcess | None = None
        self.step_log = logs / "steps.jsonl"

    @property
    def rung(self) -> str:
        """Return the name of the rung, "" below the last one."""
        return RUNGS[self._place].name if self._place < len(RUNGS) else ""

    @property
    def is_default(self) -> bool:
        """Return whether no start has failed."""
        return self._place == 0

    def begin(self) -> None:
        """Launch the server with the settings of the current rung, without waiting."""
        rung, folder = RUNGS[self._place], self._logs / f"rung-{self._place}"
        if rung.name != "DSPARK_DISABLE=1":
            schedule = {**rung.schedule, "step_log": str(self.step_log)}
            self._spec = configured(
                self._spec, {"schedule": schedule, "verify": rung.verify}, folder
            )
        spec = replace(
            self._spec,
            arguments=(*self._spec.arguments, *rung.arguments),
            environment={**self._spec.environment, **rung.environment},
        )
        self._server = ServerProcess(spec, folder).start()

    def ready(self) -> ServerProcess | None:
        """Wait for the launched server, then for each further rung's; return None if all failed."""
        while self._place < len(RUNGS):
            if self._server is None:
                self.begin()
            server = self._server
            assert server is not None, "begin() launches or raises"
            limit = READY_S if self._place == 0 else AGAIN_S
            limit = min(limit, self._left() - self._reserve_s)
            if limit <= 0:
                say(row={"ladder": self.rung, "failed": "no time is left for this start"})
                self.stop()
                return None
            try:
                seconds = server.wait_ready(limit)
            except DSparkError as error:
                self.fail(error)
            else:
                say(row={"ladder": self.rung, "ready_s": round(seconds, 1)})
                return server
        return None

    def fail(self, error: DSparkError) -> None:
        """Print the row of a server that did not start, or died, and step one rung down."""
        assert self._server is not None, "a server was launched"
        log = self._server.log_tail(LOG_LINES)
        say(row={"ladder": self.rung, "failed": str(error), "log": log})
        self.stop()
        self._place += 1

    def stop(self) -> None:
        """End the launched server."""
        if self._server is not None:
            self._server.stop()
        self._server = None


def configured(
    spec: ServerSpec, settings: Mapping[str, Mapping[str, Any]], folder: Path
) -> ServerSpec:
    """Return the server with these settings, by section, merged into the current configuration."""
    named = os.environ.get(CONFIG)
    config = dict(load_yaml(Path(named))) if named else {}
    for section, values in settings.items():
        if values:
            config[section] = {**config.get(section, {}), **values}
    path = folder.absolute() / "dspark.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return replace(spec, environment={**spec.environment, CONFIG: str(path)})
