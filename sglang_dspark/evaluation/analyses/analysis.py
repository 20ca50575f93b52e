"""Define the parts of a drafter analysis, and the JSON form that all results share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import TypeAdapter

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from sglang_dspark.evaluation.analyses.cells import Table


@dataclass(frozen=True)
class Result:
    """Facts in every analysis: the target, and its decoding settings (`Trace.settings`)."""

    analysis: ClassVar[str]  # its name in commands and files
    target: str
    settings: Mapping[str, Any]

    @property
    def sampled(self) -> bool:
        """Return whether answers were sampled; teacher forcing at temperature 1 samples nothing."""
        return self.settings["temperature"] > 0 and not self.settings.get("teacher_forced", False)

    def remarks(self) -> list[str]:
        """Return the parts of the figure's title after target and decoding."""
        return []

    def to_json(self) -> dict[str, Any]:
        """Return the `metrics` of a result file."""
        return {"analysis": self.analysis, **as_json(self)}


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Analysis(Generic[R]):
    """One analysis: its result and how it is shown.

    caption: of the figure. page_tables: the numbers behind the figure. table: terminal output.
    summary: its part of drafters.json.
    """

    result: type[R]
    caption: str
    draw: Callable[[R], Figure]
    page_tables: Callable[[R], list[Table]]
    table: Callable[[R], list[RenderableType]] | None = None
    summary: Callable[[R], dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        """Return the name in commands and result files."""
        return self.result.analysis

    def read(self, metrics: Mapping[str, Any]) -> R:
        """Read the result from a result file's `metrics`. Raises ValueError for other content."""
        return TypeAdapter(self.result).validate_python(metrics)


def as_json(value: Any) -> Any:
    """Convert a value to JSON: NaN to null; omit a field that is None, if that is its default."""
    if is_dataclass(value):
        every = ((field, getattr(value, field.name)) for field in fields(value))
        return {f.name: as_json(v) for f, v in every if v is not None or f.default is not None}
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
