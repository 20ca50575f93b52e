"""Measure several servers on one device in turn, and compare them in pairs.

One server runs at a time and the others are frozen, so a comparison is of the same minute on the
same card. The made-up target's answers follow from a table (`models.py`), so they are checked. One
greedy token that differs from the table fails the stage, and so does a round of sampled answers
with fewer of the table's tokens than its distribution allows.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import paired_ratio
from sglang_dspark.loadtest.bench.paired import Plan, fresh_round
from sglang_dspark.loadtest.client.load import Round
from sglang_dspark.loadtest.servers.server import ServerProcess
from tools.gpu.kit.device import say
from tools.gpu.kit.sampled import post
from tools.gpu.kit.servers import COUNTERS_S, admitted, figures, right

SCHEDULED = "dspark"
ROUND_S = 60.0  # a server that hangs must not use up the call
WARM_TOKENS = 24
# Qwen3's generation_config, which SGLang applies to requests without their own settings.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "T=1": {"temperature": 1.0},
    "Qwen3 defaults": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}
# Without FlashInfer, which cannot be sent, these requests end the arm's server (SGLang 0.5.23).
NEEDS_FLASHINFER = {
    "mtp1": ("T=1", "Qwen3 defaults"),
    "upstream-dspark-static": ("Qwen3 defaults",),  # by top-p
}
# At these temperatures the table's token has a probability of at least 0.9993 in the 4B shape
# (logit 20, the others' deviation 1.25), and less in the tiny shape.
LEAST_RIGHT = {"cuda": 0.99, "cpu": 0.5}


@dataclass(frozen=True)
class Cell:
    """One load: users at once, and the name of their sampling settings."""

    users: int
    sampling: str


class Comparison:
    """Rounds of the servers that are up. `passed`: whether every answer was right so far."""

    def __init__(self, up: dict[str, ServerProcess], plan: Plan, follows: Any, device: str) -> None:
        """Start without rounds. up: frozen servers by arm. follows: [V], the token after each."""
        self.up, self.passed = up, True
        self._plan, self._follows, self._least = plan, follows, LEAST_RIGHT[device]
        self._speeds: dict[str, dict[Cell, list[float]]] = {}
        self._lacks_flashinfer = device == "cuda" and find_spec("flashinfer") is None
        self._refused: list[dict[str, str]] = []
        self._warm: set[tuple[str, Cell]] = set()

    def restart(self) -> None:
        """Forget earlier rounds: a server was replaced, and pairs must have the same servers."""
        self._speeds, self._warm = {}, set()

    def measure(self, cells: Sequence[Cell], repeat: int) -> Iterator[tuple[str, DSparkError]]:
        """Run every cell on every server; yield each lost server, after removal from `up`."""
        for number, cell in enumerate(cells):
            names = list(self.up)
            turn = (repeat + number) % max(len(names), 1)
            for name in [*names[turn:], *names[:turn]]:
                if self._refuses(name, cell):
                    continue
                try:
                    row = self._one(name, cell)
                except DSparkError as error:
                    del self.up[name]
                    self.passed = False
                    yield name, error
                    continue
                say(row={"repeat": repeat, "server": name, "sampling": cell.sampling, **row})
                self._judge(name, cell, row)
                found = self._speeds.setdefault(name, {}).setdefault(cell, [])
                found.append(row["whole_tokens_per_s"])

    def _refuses(self, name: str, cell: Cell) -> bool:
        """Return whether such requests would end the arm's server; print a row once."""
        if not self._lacks_flashinfer or cell.sampling not in NEEDS_FLASHINFER.get(name, ()):
            return False
        about = {"server": name, "sampling": cell.sampling}
        if about not in self._refused:
            self._refused.append(about)
            say(row={**about, "failed": "SGLang ends at such a request without FlashInfer"})
        return True

    def _one(self, name: str, cell: Cell) -> dict[str, Any]:
        """Run one round on a server that is frozen before and after."""
        server = self.up[name]
        server.resume()
        try:
            self._warm_up(name, cell)
            before = admitted(server)
            round_ = asyncio.run(self._round(server, cell))
            if name == SCHEDULED:
                time.sleep(COUNTERS_S)
            drafts = admitted(server) - before
        finally:
            server.pause()
        return {**figures(round_, drafts), **right(round_, self._plan, self._follows)}

    def _warm_up(self, name: str, cell: Cell) -> None:
        """Send the cell's first requests once, unmeasured, so that their kernels are compiled."""
        if (name, cell) in self._warm:
            return
        self._warm.add((name, cell))
        settings = {"temperature": 0.0, "max_new_tokens": WARM_TOKENS, "ignore_eos": True}
        body = {
            "input_ids": [list(each) for each in self._plan.batch(cell.users)[: cell.users]],
            "sampling_params": {**settings, **SETTINGS[cell.sampling]},
        }
        post(f"{self.up[name].spec.url}/generate", body)

    async def _round(self, server: ServerProcess, cell: Cell) -> Round:
        try:
            async with asyncio.timeout(ROUND_S):
                return await fresh_round(
                    server.spec.url, self._plan, cell.users, SETTINGS[cell.sampling]
                )
        except TimeoutError:
            reason = f"{cell.users} users were not answered within {ROUND_S:.0f} s"
            raise DSparkError(f"{server.spec.name}: {reason}") from None

    def _judge(self, name: str, cell: Cell, row: Mapping[str, Any]) -> None:
        agreed, total = row["right"]
        least = total if cell.sampling == "greedy" else self._least * total
        if agreed < least:
            wrong = f"{total - agreed} of {total} tokens are not the table's"
            where = f"{name}, {cell.users} users, {cell.sampling}"
            print(f"rounds: {where}: {wrong}", file=sys.stderr, flush=True)
            self.passed = False

    def ratios(self) -> list[dict[str, Any]]:
        """Return ratios of the scheduled server's tokens/s to each other one's, paired by round."""
        found = []
        for cell, ours in self._speeds.get(SCHEDULED, {}).items():
            for name, of_cells in self._speeds.items():
                theirs = of_cells.get(cell, [])
                pairs = min(len(ours), len(theirs))
                if name == SCHEDULED or not pairs:
                    continue
                # An arm that started later has no first rounds.
                ratio = paired_ratio(ours[-pairs:], theirs[-pairs:])
                about = {"users": cell.users, "sampling": cell.sampling, "over": name}
                found.append(
                    {**about, "ratio": ratio.mid, "interval": ratio.bounds, "trials": ratio.trials}
                )
        return found
