"""Read the YAML file of `dspark sweep`: arms, loads, prompts, service level, time.

`smoke:` holds fields that replace the others under `--smoke`. Unknown fields are errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sglang_dspark.common.files import fault, load_yaml, wrong_fields
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.bodies import PATHS, Api
from sglang_dspark.loadtest.client.schedule import Lengths, parse_arrivals
from sglang_dspark.loadtest.client.traces import TraceFormat
from sglang_dspark.loadtest.servers.arms import ServerFlags
from sglang_dspark.loadtest.sweep.sla import Sla

SIMULATED = "simulated acceptance"
Positive = Annotated[float, Field(gt=0)]
Users = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TraceReplay(_Section):
    """A recorded load in a published format: its times and lengths, prompts of the mix's text."""

    file: Path = Field(description="relative to the sweep's file")
    format: TraceFormat = Field(
        description="mooncake: JSON lines with `hash_ids`, prefixes are shared as recorded; "
        "burstgpt: CSV"
    )
    speed: Positive = Field(1.0, description="2: twice as fast as it was recorded")
    first: int | None = Field(None, ge=1, description="the first so many requests; null: all")
    longest: int | None = Field(
        None,
        ge=1,
        description="requests of more tokens, prompt and answer together, are skipped",
    )


class Burst(_Section):
    """A burst of arrivals between two spells of a steady load."""

    load: Positive = Field(0.5, description="rate outside of the burst, a share as in `open.load`")
    factor: float = Field(10.0, gt=1, description="times as many arrivals in the burst")
    before_s: Positive = Field(10.0, description="seconds before the burst")
    burst_s: Positive = Field(2.0, description="seconds of the burst")
    after_s: Positive = Field(10.0, description="seconds after it, in which queues empty")


class OpenLoop(_Section):
    """Arrivals that do not wait for answers."""

    kind: Literal["poisson", "gamma"] = Field("poisson", description="gaps between arrivals")
    load: list[Positive] = Field(
        [],
        description="rates as shares of the throughput that the baseline arm reached in the pilot, "
        "so that one file fits every machine",
    )
    cv: Positive = Field(2.0, description="coefficient of variation of gamma's gaps")
    arrivals: list[dict[str, Any]] = Field(
        [],
        description="fixed arrivals, each a mapping: `kind: trace` with path, speed, requests; "
        "`bursts` with size, every_s, count; `ramp` with from_rate, to_rate, seconds; `surge` with "
        "rate, factor, before_s, burst_s, after_s",
    )
    burst: Burst | None = Field(
        None, description="a burst: latencies at p99 before, in and after it"
    )
    trace: TraceReplay | None = Field(None, description="a recorded load to send as it came")

    @field_validator("arrivals")
    @classmethod
    def _known(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for each in value:
            _or_value_error(parse_arrivals, each)
        return value


class SlaLimits(_Section):
    """Limits of one service level."""

    speed_p50: float | None = Field(None, description="floor of the median user, tokens/s")
    speed_p10: float | None = Field(None, description="floor of the slowest tenth, tokens/s")
    ttft_p95: float | None = Field(None, description="ceiling of the time to first token, s")

    def sla(self) -> Sla:
        """Return the level to judge by. Raises DSparkError for an invalid level."""
        return Sla(self.speed_p50, self.speed_p10, self.ttft_p95)


class Hold(_Section):
    """Limits of latency at p95, and the search for the highest arrival rate that keeps them."""

    p95_ttft_ms: Positive | None = Field(
        None, description="to the first token, from when it was due"
    )
    p95_tpot_ms: Positive | None = Field(None, description="mean time of a token after the first")
    probes: int = Field(8, ge=2, description="rates that are measured of each arm at most")
    seconds: Positive = Field(
        20.0,
        description="of a probe at the least; longer where a load above capacity by `narrow` would "
        "not break the limit of the first token by then",
    )
    requests: int = Field(24, ge=1, description="of a probe at the least")
    narrow: Positive = Field(
        0.1, description="ends when the rate that missed is so little above the one that held"
    )

    @property
    def probe_seconds(self) -> float:
        """Return the length of a probe, s: load `narrow` above capacity must break the TTFT limit.

        Load above capacity by a share s makes the queue s seconds longer in each second.
        """
        return max(self.seconds, (self.p95_ttft_ms or 0.0) / 1e3 / self.narrow)

    @model_validator(mode="after")
    def _some_limit(self) -> Hold:
        if self.p95_ttft_ms is None and self.p95_tpot_ms is None:
            raise ValueError("give p95_ttft_ms, p95_tpot_ms or both")
        return self


class Comparison(_Section):
    """`over` against `under`: what the verdict is about."""

    over: str = Field(description="arm that should be ahead")
    under: str = Field(description="arm that it is compared with")


class SweepConfig(_Section):
    """A sweep: arms, loads, prompts, service levels, time."""

    name: str = Field("sweep", description="the file's name, unless given")
    arms: list[str] = Field(
        min_length=1, description="names of files in `arms_folder`, or YAML files"
    )
    arms_folder: Path = Field(Path("../serve"), description="relative to the sweep's file")
    urls: dict[str, str] = Field({}, description="arms that run already: name and address")
    models: dict[str, str] = Field(
        {},
        description="arms of `urls` that another vendor's server runs, and the model's name there; "
        "they get OpenAI's own fields alone, and keep their prefix cache",
    )
    baseline: str = Field(
        "plain", description="arm that sizes the cells and that others are compared with"
    )
    compare: Comparison | None = Field(None, description="the two arms of the verdict")
    target: str = Field("demo", description="a folder, or `demo`")
    deeper: float | None = Field(
        None,
        gt=1,
        description="times the target's cost: layers are added that compute everything and change "
        "no answer, which shows with the same drafter what a larger target would",
    )
    golden: str | None = Field(
        None,
        description="simulated acceptance: target and drafters of random weights, of the shape and "
        "acceptance in this file, or the shipped one of that name in `configs/golden/`; instead of "
        "`target` and `drafters`",
    )
    drafters: dict[str, str] = Field(
        {}, description="by the kind that arms ask for: folders, or names of shipped ones"
    )
    device: str = Field("", description="`cpu` or `cuda`; empty: what there is")
    server_flags: ServerFlags = Field([], description="flags of every arm's server")
    launcher: str = Field("sglang.launch_server", description="module that starts a server")
    port: int = Field(30000, ge=1, le=65535, description="the first; each arm takes the next")
    servers: Literal["together", "in-turn"] = Field(
        "together",
        description="together: all stay up, those that are not measured are frozen; in-turn: each "
        "is started anew in every trial (one GPU)",
    )
    ready_s: Positive = Field(600.0, description="most seconds that a server may take to start")
    api: Api = Field("completions", description="the interface that requests go to")
    mix: str = Field(
        "math,code,chat",
        description="parts, joined by commas: these, `code@300` (behind 300 words of other "
        "prompts), `multi-turn`, `words`, JSONL files; the report has acceptance by part",
    )
    repeats: Literal["note", "refuse", "wanted"] = Field(
        "note",
        description="cells that send a whole prompt twice, which caches make easy: note says so in "
        "summary and report, refuse ends the sweep before them, wanted says nothing",
    )
    answer_tokens: Lengths = Field(Lengths(low=48, high=80), description="length of answers")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    ignore_eos: bool = Field(False, description="answers go on to their full length")
    concurrency: list[Users] = Field(
        min_length=1, description="users of each closed loop, ascending"
    )
    open: OpenLoop = Field(OpenLoop(), description="open loops, measured beside")
    trials: int = Field(3, ge=1, description="of every cell; below three no interval")
    seconds: Positive = Field(10.0, description="load of a cell when served by the baseline")
    warm_up: bool = Field(
        True, description="after each start of a server, a cell that is not counted"
    )
    tight: Positive = Field(
        0.1, description="trials are added until the interval is this narrow, by its middle"
    )
    most_trials: int = Field(0, ge=0, description="most trials then; 0: none are added")
    slas: list[SlaLimits] = Field([], description="service levels to find the capacity at")
    search: int = Field(0, ge=0, description="loads that this search may add to each arm")
    hold: Hold | None = Field(
        None, description="find each arm's highest arrival rate within limits of latency"
    )
    retries: int = Field(1, ge=0, description="of a cell that was void: the client was late")
    seed: int = Field(0, description="of arrivals, prompts and lengths, the same for all arms")
    cores: Literal["auto", "shared", "split"] = Field(
        "auto", description="whether servers and client have cores of their own"
    )
    sample_s: Positive = Field(2.0, description="seconds between samples of a server's counters")

    @field_validator("concurrency")
    @classmethod
    def _ascending(cls, value: list[int]) -> list[int]:
        if sorted(set(value)) != value:
            raise ValueError(f"write each number of users once, ascending, not {value}")
        return value

    @field_validator("urls")
    @classmethod
    def _without_credentials(cls, value: dict[str, str]) -> dict[str, str]:
        for each in value.values():
            _or_value_error(require_no_credentials, each)
        return value

    @field_validator("slas")
    @classmethod
    def _sensible(cls, value: list[SlaLimits]) -> list[SlaLimits]:
        for each in value:
            _or_value_error(each.sla)
        return value

    @model_validator(mode="after")
    def _arms_are_there(self) -> SweepConfig:
        names = {Path(arm).stem for arm in self.arms}
        mentioned = {self.baseline, *self.urls}
        if self.compare is not None:
            mentioned |= {self.compare.over, self.compare.under}
        if foreign := sorted(self.models.keys() - self.urls):
            raise ValueError(f"models names {', '.join(foreign)}, which urls lacks")
        if self.models and self.api == "generate":
            raise ValueError("other vendors' servers have no /generate; use api: chat")
        if missing := sorted(mentioned - names):
            raise ValueError(f"{', '.join(missing)} is not among the arms {', '.join(self.arms)}")
        if self.api not in PATHS:
            raise ValueError(f"no interface {self.api!r}")
        if (self.deeper is not None or self.golden is not None) and self.urls:
            raise ValueError("deeper and golden change what is launched; leave urls out")
        if self.golden is not None and (self.deeper, self.target, self.drafters) != (
            None,
            "demo",
            {},
        ):
            raise ValueError("golden brings its models; leave target, drafters and deeper out")
        if self.open.trace is not None and self.api == "chat":
            raise ValueError(
                "open.trace sends token ids, which chat does not take; use api: completions"
            )
        return self

    @property
    def label(self) -> str:
        """Return the label of every picture and table of this sweep; "" if all is measured."""
        return "" if self.golden is None else SIMULATED

    @property
    def names(self) -> list[str]:
        """Return the names of the arms in the order of the file."""
        return [Path(arm).stem for arm in self.arms]


def require_no_credentials(url: str) -> None:
    """Raise DSparkError for an address with a user's name or password, without repeating it."""
    if re.match(r"([^/?#]*//)?[^/?#]*@", url):
        raise DSparkError(
            "an address of a server holds a user or password: leave it out, a run's folder and "
            "results keep addresses; a key cannot be given, so name a server that wants none"
        )


def load_sweep(path: Path, smoke: bool = False) -> SweepConfig:
    """Read a sweep; its name is the file's. smoke: apply the fields of `smoke:`.

    Raises DSparkError naming file and field.
    """
    try:
        values = load_yaml(path)
    except OSError as error:
        raise DSparkError(f"cannot read the sweep {path}: {fault(error)}") from None
    except ValueError as error:
        raise DSparkError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise DSparkError(f"{path} must be a mapping of a sweep's fields")
    quick = values.pop("smoke", {})
    if smoke:
        if not isinstance(quick, dict) or not quick:
            raise DSparkError(f"{path} has no `smoke:` section; leave --smoke out")
        values |= quick
    try:
        config = SweepConfig.model_validate({"name": path.stem, **values})
    except ValidationError as error:
        raise DSparkError(f"{path}: {wrong_fields(error, SweepConfig)}") from None
    folder = path.parent / config.arms_folder  # an absolute one stays unchanged
    return config.model_copy(
        update={"arms_folder": folder, "open": _placed(config.open, path.parent)}
    )


def _placed(loop: OpenLoop, folder: Path) -> OpenLoop:
    """Return the loop with its trace's file resolved against `folder`."""
    if loop.trace is None:
        return loop
    trace = loop.trace.model_copy(update={"file": folder / loop.trace.file})
    return loop.model_copy(update={"trace": trace})


def _or_value_error(function: Callable[..., object], *arguments: object) -> None:
    """Call a function; raise DSparkError as ValueError, which pydantic reports by field."""
    try:
        function(*arguments)
    except DSparkError as error:
        raise ValueError(str(error)) from None
