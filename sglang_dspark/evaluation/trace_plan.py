"""Read the plan of the traces behind published results and of their drafters: one YAML file.

`dspark eval traces` makes them. Within a set the engine decodes the prompts once, and every drafter
drafts on its answers (`redraft`), so that all drafters are compared on the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_dspark.common.files import load_yaml, reading, wrong_fields
from sglang_dspark.errors import DSparkError


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlannedDrafter(_Frozen):
    """A drafter that traces are recorded of."""

    path: Path = Field(description="directory of the drafter")
    gamma: int | None = Field(None, ge=1, description="drafts a step; null: as trained")
    made_by: str = Field("", description="the command that makes it, said where it is not here")

    @property
    def is_here(self) -> bool:
        """Return whether the directory holds a drafter."""
        return (self.path / "config.json").is_file()

    @property
    def argument(self) -> str:
        """Return the value of `--drafter`, without a label."""
        return str(self.path) if self.gamma is None else f"{self.path}@{self.gamma}"


class Answers(_Frozen):
    """The engine's own trace."""

    file: str = Field(min_length=1, description="in the plan's folder")
    by: str = Field(description="the drafter that the engine decodes with")


class TraceSet(_Frozen):
    """One comparison."""

    answers: Answers = Field(description="the decoding that all drafters draft on")
    traces: dict[str, str] = Field(
        min_length=1, description="file name without `.json`, and the drafter of each"
    )
    prompts: tuple[str, ...] = Field(
        (), description="as `--prompts`; the package's own without any"
    )
    limit: int | None = Field(None, ge=1, description="prompts of each domain; null: all")
    max_new_tokens: int = Field(96, ge=1, description="of an answer")
    temperature: float = Field(0.0, ge=0, description="of the answers; 0 is greedy")
    batch: int = Field(16, ge=1, description="requests in flight")
    seed: int = Field(0, description="of the engine's random numbers")

    @property
    def absent_prompts(self) -> list[str]:
        """List the prompt files that do not exist."""
        names = [each.partition("=")[2] or each for each in self.prompts]
        return [name for name in names if not Path(name).is_file()]


class TracePlan(_Frozen):
    """The whole file."""

    folder: Path = Field(description="where the traces are written")
    target: str = Field("demo", description="a directory, or `demo`")
    drafters: dict[str, PlannedDrafter] = Field(description="by the names that the sets use")
    sets: dict[str, TraceSet] = Field(min_length=1, description="the comparisons, by name")

    @model_validator(mode="after")
    def _named(self) -> TracePlan:
        for name, each in self.sets.items():
            unknown = {each.answers.by, *each.traces.values()} - self.drafters.keys()
            if unknown:
                raise ValueError(f"set {name} names no drafter of the file: {sorted(unknown)}")
        return self

    def chosen(self, only: str | None) -> Mapping[str, TraceSet]:
        """Return all sets, or the one named. Raises DSparkError for another name."""
        if only is None:
            return self.sets
        if only not in self.sets:
            raise DSparkError(f"no set {only!r} in the plan: it has {', '.join(self.sets)}")
        return {only: self.sets[only]}


def load_plan(path: Path) -> TracePlan:
    """Read and check a plan. Raises DSparkError that names the file and the wrong field."""
    with reading(path, "plan of traces", "write one like configs/eval/traces.yaml"):
        try:
            return TracePlan.model_validate(load_yaml(path))
        except ValidationError as error:
            raise DSparkError(f"{path}: {wrong_fields(error, TracePlan)}") from None
