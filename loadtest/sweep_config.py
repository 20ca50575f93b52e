"""What `dspark sweep` is told: arms, loads, prompts, service level, time. One YAML file.

`smoke:` holds fields that `--smoke` puts in place of the others. Unknown fields are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sglang_dspark.errors import DSparkError
from sglang_dspark.files import fault, load_yaml, wrong_fields
from sglang_dspark.loadtest.bodies import PATHS, Api
from sglang_dspark.loadtest.schedule import Lengths, parse_arrivals
from sglang_dspark.loadtest.sla import Sla

Positive = Annotated[float, Field(gt=0)]
Users = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OpenLoop(_Section):
    """Arrivals that do not wait for answers.

    load: rates as shares of the throughput that the baseline arm reached in the pilot, so that one
    file fits every machine; arrivals: fixed ones as `schedule.parse_arrivals` reads them (traces,
    bursts, ramps), measured beside. cv: of gamma's gaps.
    """

    kind: Literal["poisson", "gamma"] = "poisson"
    load: list[Positive] = []
    cv: Positive = 2.0
    arrivals: list[dict[str, Any]] = []

    @field_validator("arrivals")
    @classmethod
    def _known(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for each in value:
            _or_value_error(parse_arrivals, each)
        return value


class SlaLimits(_Section):
    """Limits of one service level: tokens/s/user, and seconds to the first token."""

    speed_p50: float | None = None
    speed_p10: float | None = None
    ttft_p95: float | None = None

    def sla(self) -> Sla:
        """The level to judge by. Raises DSparkError for a level that makes no sense."""
        return Sla(self.speed_p50, self.speed_p10, self.ttft_p95)


class Comparison(_Section):
    """`over` against `under`: what the verdict is about."""

    over: str
    under: str


class SweepConfig(_Section):
    """A sweep.

    arms: names in `arms_folder` (relative to the sweep's file), or YAML files; urls: arms that run
    already, by name; drafters: by kind, folders or names of shipped ones; target: a folder or
    `demo`; server_flags: of every arm; launcher: the module that starts a server; port: the first.
    servers: `together` keeps all of them up and freezes those that are not measured, `in-turn`
    starts each anew in every trial (one GPU). baseline: sizes the cells and is what others are
    compared with. seconds: load of a cell when served by the baseline. trials are added up to
    `most_trials` until the interval at matched throughput is no wider than `tight` of its middle;
    search: loads that the SLA search may add to each arm. retries: of a cell that was void because
    the client was late.
    """

    name: str = "sweep"
    arms: list[str] = Field(min_length=1)
    arms_folder: Path = Path("../serve")
    urls: dict[str, str] = {}
    baseline: str = "plain"
    compare: Comparison | None = None
    target: str = "demo"
    drafters: dict[str, str] = {}
    device: str = ""
    server_flags: list[str] = []
    launcher: str = "sglang.launch_server"
    port: int = Field(30000, ge=1, le=65535)
    servers: Literal["together", "in-turn"] = "together"
    ready_s: Positive = 600.0
    api: Api = "completions"
    mix: str = "math,code,chat"
    answer_tokens: Lengths = Lengths(low=48, high=80)
    temperature: float = Field(0.0, ge=0)
    ignore_eos: bool = False
    concurrency: list[Users] = Field(min_length=1)
    open: OpenLoop = OpenLoop()
    trials: int = Field(3, ge=1)
    seconds: Positive = 10.0
    warm_up: bool = True
    tight: Positive = 0.1
    most_trials: int = Field(0, ge=0)
    slas: list[SlaLimits] = []
    search: int = Field(0, ge=0)
    retries: int = Field(1, ge=0)
    seed: int = 0
    cores: Literal["auto", "shared", "split"] = "auto"
    sample_s: Positive = 2.0

    @field_validator("concurrency")
    @classmethod
    def _ascending(cls, value: list[int]) -> list[int]:
        if sorted(set(value)) != value:
            raise ValueError(f"write each number of users once, ascending, not {value}")
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
        if missing := sorted(mentioned - names):
            raise ValueError(f"{', '.join(missing)} is not among the arms {', '.join(self.arms)}")
        if self.api not in PATHS:
            raise ValueError(f"no interface {self.api!r}")
        return self

    @property
    def names(self) -> list[str]:
        """Names of the arms in the order of the file."""
        return [Path(arm).stem for arm in self.arms]


def load_sweep(path: Path, smoke: bool = False) -> SweepConfig:
    """Read a sweep; its name is the file's. smoke: put the fields of `smoke:` in place.

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
    folder = path.parent / config.arms_folder  # an absolute one stays what it is
    return config.model_copy(update={"arms_folder": folder})


def _or_value_error(function: Callable[..., object], *arguments: object) -> None:
    """Pydantic gathers ValueErrors and names their field."""
    try:
        function(*arguments)
    except DSparkError as error:
        raise ValueError(str(error)) from None
