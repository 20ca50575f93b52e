"""A live server with faults at hand, and what must hold before, during and after each."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from sglang_dspark.serving.fallbacks import Fallback
from tests.integration.serving import Served

TOKENS, LONG = 64, 240
PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(3 + 4 * i)] for i in range(12)]
LIMIT_S = 30.0  # nothing hangs longer
SITE = Path(__file__).parent / "site"
SLOTS, POOL = 16, 2048  # requests; tokens of the KV pool
FLAGS = (
    *("--max-running-requests", str(SLOTS), "--enable-metrics"),
    *("--max-total-tokens", str(POOL), "--schedule-conservativeness", "0.05"),
)
# SGLang's own checks of its pools: in every step, and page by page; a leak ends the server
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault, as docs/faults.md shows it.

    happens: in words. named: the counter or the line that names it. recovered_s: from the fault's
    end, or from the fault itself where it has none, to the first right answer. lost: requests
    without a whole answer, of so many that were in work.
    """

    fault: str
    happens: str
    named: str
    recovered_s: float
    lost: int
    of: int

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


@dataclass
class Live:
    """A server whose processes look for armed faults in `folder`; expected: plain answers."""

    served: Served
    folder: Path
    expected: list[list[int]]
    expected_long: list[list[int]]

    def arm(self, fault: str, **settings: Any) -> None:
        """From now on; `times` (1) is how often."""
        temporary = self.folder / f"{fault}.new"
        temporary.write_text(json.dumps(settings))
        temporary.rename(self.folder / f"{fault}.json")

    def disarm(self, fault: str) -> None:
        """It no longer happens."""
        (self.folder / f"{fault}.json").unlink(missing_ok=True)

    def happened(self, fault: str) -> bool:
        """Return whether the fault has happened as often as armed."""
        return not (self.folder / f"{fault}.json").exists()

    def entered(self, stage: str) -> None:
        """Wait until the armed stage has begun to wait."""
        await_that(lambda: (self.folder / f"{stage}.entered").exists(), f"no {stage}")
        (self.folder / f"{stage}.entered").unlink()

    def ask(self, at: int, tokens: int = TOKENS, **fields: Any) -> list[int]:
        """Greedy tokens of prompt number `at`."""
        sampling = {"ignore_eos": True}
        found = self.served.generate(PROMPTS[at], tokens, sampling_params=sampling, **fields)
        return list(found["output_ids"])

    def lossless(self, users: int = 4) -> None:
        """Every prompt is answered as by plain decoding."""
        self.served.pool.use(self.served)
        answers = self.served.each(lambda at: {"ids": self.ask(at)}, range(len(PROMPTS)), users)
        assert [each["ids"] for each in answers] == self.expected

    def recovered(self) -> float:
        """Seconds until the next request is answered as by plain decoding."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < LIMIT_S:
            try:
                if self.ask(1) == self.expected[1]:
                    return time.monotonic() - began
            except (AssertionError, OSError):
                time.sleep(0.05)
        raise AssertionError(f"no right answer within {waited:.0f} s")

    def count(self, name: str, **labels: str) -> float:
        """A counter or gauge of `/metrics`, summed over series with these labels; 0: not there."""
        text = self.served.request("GET", "/metrics").text
        rows = re.findall(rf"^{re.escape(name)}(?:\{{(.*?)\}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(n) for has, n in rows if all(each in has for each in wanted))

    def fallbacks(self, fallback: Fallback) -> int:
        """Return the count of this fallback."""
        return int(self.count("sglang:dspark_fallbacks_total", reason=fallback.value))

    def log_count(self, text: str) -> int:
        """Return how often the log contains the text."""
        return self.served.log.count(text)

    def at_rest(self) -> None:
        """Emptied, the server holds no token and no request, and it can generate.

        SGLang checks at every idle moment that free and cached pages are all there are, and ends
        itself when they are not.
        """
        self.served.flush_cache()
        await_that(lambda: self._held() == (0, 0, 0), f"held: {self._held()}")
        assert self.served.healthy()
        assert "leak" not in self.served.log.lower()

    def running(self) -> int:
        """Requests that are decoded just now."""
        return self._held()[1]

    def _held(self) -> tuple[int, int, int]:
        (load,) = self.served.request("GET", "/v1/loads").json()["loads"]
        return load["num_used_tokens"], load["num_running_reqs"], load["num_waiting_reqs"]

    def costs(self) -> list[float]:
        """Seconds that the engine predicts of a step of 1, 2, 4 and 8 requests."""
        told = self.folder / "costs-told.json"
        told.unlink(missing_ok=True)
        self.arm("costs")
        self.ask(0, 8)
        await_that(told.exists, "no costs were written")
        return list(json.loads(told.read_text()))

    def scheduler(self) -> psutil.Process:
        """The process that decodes."""
        first = psutil.Process(self.served.process.pid)
        named = {each.pid: " ".join(each.cmdline()) for each in first.children(recursive=True)}
        (pid,) = [pid for pid, name in named.items() if name.startswith("sglang::scheduler")]
        return psutil.Process(pid)


@contextmanager
def logged_once(
    live: Live, fallback: Fallback, line: str, *, counted: int | None = None
) -> Iterator[None]:
    """The block makes the server fall back: counted (so often, if given), and logged once."""
    before = live.fallbacks(fallback)
    yield
    await_that(lambda: live.fallbacks(fallback) > before, f"{fallback.value} is not counted")
    if counted is not None:
        assert live.fallbacks(fallback) - before == counted
    assert live.served.log.count(line) == 1, line


def await_that(holds: Any, otherwise: str, limit_s: float = LIMIT_S) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def unpoisoned(before: Sequence[float], after: Sequence[float]) -> None:
    """Check that predicted step times moved by less than 4x; a busy machine may slow some."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    assert all(0.25 < ratio < 4 for ratio in ratios), f"predicted step times moved by {ratios}"
