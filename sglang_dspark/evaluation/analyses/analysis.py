"""Parts of an analysis of drafters, and the JSON form that all results share."""

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
    """Facts in every analysis: the target, and how it decoded (`Trace.settings`)."""

    analysis: ClassVar[str]  # its name in commands and files
    target: str
    settings: Mapping[str, Any]

    @property
    def sampled(self) -> bool:
        """Return whether answers were sampled; teacher forcing samples none at temperature 1."""
        return self.settings["temperature"] > 0 and not self.settings.get("teacher_forced", False)

    def remarks(self) -> list[str]:
        """Text of the figure's title besides target and decoding."""
        return []

    def to_json(self) -> dict[str, Any]:
        """The `metrics` of a result file."""
        return {"analysis": self.analysis, **as_json(self)}


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Analysis(Generic[R]):
    """One analysis: what it finds and how that is shown.

    caption: of the figure. page_tables: the numbers behind the figure. table: what the terminal
    shows. summary: what drafters.json takes of it.
    """

    result: type[R]
    caption: str
    draw: Callable[[R], Figure]
    page_tables: Callable[[R], list[Table]]
    table: Callable[[R], list[RenderableType]] | None = None
    summary: Callable[[R], dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        """As commands and result files call it."""
        return self.result.analysis

    def read(self, metrics: Mapping[str, Any]) -> R:
        """The result in the `metrics` of a result file. Raises ValueError when it is none."""
        return TypeAdapter(self.result).validate_python(metrics)


def as_json(value: Any) -> Any:
    """A value as JSON has it: null for NaN; a field that is None by default and None is absent."""
    if is_dataclass(value):
        every = ((field, getattr(value, field.name)) for field in fields(value))
        return {f.name: as_json(v) for f, v in every if v is not None or f.default is not None}
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
