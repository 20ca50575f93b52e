"""Define the records of open loops: phases of a burst, and loads held within limits."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from sglang_dspark.loadtest.client.schedule import PhaseName
from sglang_dspark.loadtest.sweep.hold import HoldKind


class Part(BaseModel):
    """A part of one of the files (`run_dir.py`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Phase(Part):
    """The requests of a cell that were due before, in or after a burst. Latencies are seconds from
    when they were due; p99 of few requests is the slowest."""

    name: PhaseName
    requests: int
    ok: int
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p99: float | None
    e2e_p99: float | None


class Within(Part):
    """The requests of a cell at a steady arrival rate that kept the limits of `hold`.

    ttft, tpot: shares of all requests, failed ones missing both; requests: number that kept both;
    tokens_per_s: of those alone (goodput); held: at least 95% kept each.
    """

    ttft: float
    tpot: float
    requests: int
    tokens_per_s: float
    held: bool


class BurstArm(Part):
    """One arm under a burst: requests over all trials, latencies as medians over the trials."""

    arm: str
    trials: int
    phases: list[Phase]


class BurstSummary(Part):
    """A burst. level: mean rate of the whole load, requests/s."""

    level: float
    arms: list[BurstArm]


class HoldArm(Part):
    """The highest arrival rate (requests/s) at which an arm held the limits.

    kind: as of `hold.Bracket`; missed: the lowest rate that did not; goodput: tokens/s of the
    requests within the limits, at `rate`; probes: rates that were measured; said: it as a sentence.
    """

    arm: str
    kind: HoldKind
    rate: float | None
    missed: float | None
    goodput: float | None
    tokens_per_s: float | None
    probes: int
    said: str


class HoldSummary(Part):
    """Limits in ms, and each arm under them."""

    p95_ttft_ms: float | None
    p95_tpot_ms: float | None
    arms: list[HoldArm]
