"""Read and write `sts.json`: fitted temperatures, and the data that they were fitted to.

The file is a superset of the one that SGLang reads by
--speculative-dspark-confidence-sts-path (srt/speculative/dspark_components/dspark_sts.py:
`temperatures`, `dataset`, `num_samples`, `ece_before`, `ece_after`; unknown fields are ignored), so
stock SGLang takes it as it is and applies the default table to every request. `tables` holds one
table a sampling regime, because acceptance has another distribution in greedy decoding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import brief, integer, load_json, number, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.calibration import Calibration

FORMAT = "sglang-dspark sts 1"
FILE_NAME = "sts.json"
GREEDY, SAMPLED = "greedy", "sampled"
REGIMES = (GREEDY, SAMPLED)
# Our fits stay in 0.1 .. 10 and within 100 logits (`calibration.GRID_LOW`, `SHIFT_LIMIT` over the
# least slope); ten times that, for tables of other fitters, is still a calibration.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0
MOST_SHIFT = 1000.0
MOST_SPREAD = 9.0  # a variance; beyond it most requests would be at `request_shift.LIMIT`
MOST_COUNT = 1 << 53


def regime(temperature: float) -> str:
    """The sampling regime of a request: `greedy` at temperature 0, else `sampled`."""
    return GREEDY if temperature == 0 else SAMPLED


@dataclass(frozen=True)
class StsTable:
    """One regime's temperatures [gamma] and where they come from.

    sampling: temperature, top_k, top_p, min_p of the requests. prompts: how many. steps: verify
    steps. counts: labels by position, after censoring. ece_before, ece_after: of the cumulative
    product by position, on what was fitted. shift, position_shifts, shifted_temperatures: our
    extension `sts+shift` (`calibration.fit_shifts`), to be used together; request_spread: how far
    requests stray from it (`request_shift`), 0 when unknown. Stock SGLang reads none of them.
    held_out: ECE and AUC on prompts that were not fitted.
    """

    temperatures: tuple[float, ...]
    sampling: Mapping[str, Any]
    dataset: str
    prompts: int
    steps: int
    counts: tuple[int, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    shift: float
    shifted_temperatures: tuple[float, ...]
    held_out: Mapping[str, Any]
    position_shifts: tuple[float, ...] = ()
    request_spread: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("no temperatures")
        for temperature in (*self.temperatures, *self.shifted_temperatures):
            if not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
                raise ValueError(
                    f"a temperature of {temperature:g}, not from {LEAST_TEMPERATURE:g} to "
                    f"{MOST_TEMPERATURE:g}"
                )
        for shift in (self.shift, *self.position_shifts):
            number(shift, -MOST_SHIFT, MOST_SHIFT)
        number(self.request_spread, 0.0, MOST_SPREAD)
        if len(self.position_shifts) not in (0, len(self.temperatures)):
            raise ValueError("as many position shifts as temperatures are needed, or none")
        if len(self.shifted_temperatures) != len(self.temperatures):
            raise ValueError("as many shifted temperatures as temperatures are needed")

    @property
    def plain(self) -> Calibration:
        """STS as in the paper."""
        return Calibration(self.temperatures)

    @property
    def shifted(self) -> Calibration:
        """`sts+shift` for requests of which nothing is known."""
        return Calibration(self.shifted_temperatures, self.shift, self.position_shifts)

    @property
    def followed(self) -> Calibration:
        """`sts+shift` with requests followed, if the table has the spread between them."""
        return replace(self.shifted, spread=self.request_spread)

    def shortened(self, gamma: int) -> StsTable:
        """The table of the first `gamma` positions.

        A position's temperature is fitted with those before it fixed and later ones
        unseen (`calibration.fit`), so a fit of fewer positions would have found the same ones.
        `sts+shift` keeps each position's own parameters.
        """
        names = ("temperatures", "counts", "ece_before", "ece_after", "shifted_temperatures")
        cut = {name: getattr(self, name)[:gamma] for name in (*names, "position_shifts")}
        return replace(self, **cut)


@dataclass(frozen=True)
class StsFile:
    """All tables of one drafter for one target.

    drafter_sha256, target_sha256: over the weight files; empty in a table of stock SGLang, which
    records no origin. fit_prompts: digests of the prompts used for fitting, so that an evaluation
    can leave them out. versions: of the packages that made it. date: UTC, ISO 8601.
    """

    tables: Mapping[str, StsTable]
    drafter_sha256: str
    target_sha256: str
    fit_prompts: tuple[str, ...]
    versions: Mapping[str, str]
    date: str

    def __post_init__(self) -> None:
        unknown = set(self.tables) - set(REGIMES)
        if unknown or not self.tables:
            raise ValueError(f"expected tables among {', '.join(REGIMES)}, found {list(unknown)}")
        if len({len(table.temperatures) for table in self.tables.values()}) > 1:
            raise ValueError("the tables are for different gamma")

    @property
    def gamma(self) -> int:
        """Drafts a step that the tables are for."""
        return len(next(iter(self.tables.values())).temperatures)

    @property
    def default(self) -> str:
        """The regime that stock SGLang applies to all: `sampled` if fitted, as most traffic is."""
        return SAMPLED if SAMPLED in self.tables else GREEDY

    def table(self, temperature: float) -> StsTable:
        """Table for requests of that sampling temperature; the other regime's if it has none."""
        wanted = regime(temperature)
        return self.tables[wanted if wanted in self.tables else self.default]


def write_sts(path: Path, sts: StsFile) -> None:
    """Write `path` atomically. Raises DSparkError when the place cannot be written."""
    table = sts.tables[sts.default]
    document = {
        "format": FORMAT,
        "temperatures": table.temperatures,
        "dataset": f"{table.dataset}; {sts.default}",
        "num_samples": table.steps,
        "ece_before": _numbers(table.ece_before),
        "ece_after": _numbers(table.ece_after),
        "default": sts.default,
        "tables": {name: _table_json(each) for name, each in sts.tables.items()},
        "drafter_sha256": sts.drafter_sha256,
        "target_sha256": sts.target_sha256,
        "fit_prompts": sts.fit_prompts,
        "versions": dict(sts.versions),
        "date": sts.date,
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    replace_text(path, text + "\n", "the calibration")


def read_sts(path: Path, *, drafter_sha256: str | None = None, gamma: int | None = None) -> StsFile:
    """Read a table file, ours or one of stock SGLang (whose one table serves both regimes).

    drafter_sha256: of the drafter it shall serve; a table fitted to another is refused. gamma:
    drafts that it runs with; a table for more is cut to the first ones, one for fewer is refused.
    Raises DSparkError for those and for a file that is no such table.
    """
    with reading(path, "calibration table", "make one with `dspark calibrate`"):
        raw = load_json(path)
        sts = _ours(raw) if raw.get("format") == FORMAT else _stock(raw)
    if gamma is not None and sts.gamma < gamma:
        raise DSparkError(
            f"{path} was fitted for gamma {sts.gamma}, the drafter runs with {gamma}: fit it "
            "again with `dspark calibrate`"
        )
    known = sts.drafter_sha256
    if drafter_sha256 is not None and known and known != drafter_sha256:
        raise DSparkError(
            f"{path} was fitted to another drafter (SHA-256 {brief(known, 12)}, this one has "
            f"{brief(drafter_sha256, 12)}): fit it again with `dspark calibrate`"
        )
    if gamma is None or gamma == sts.gamma:
        return sts
    return replace(sts, tables={n: table.shortened(gamma) for n, table in sts.tables.items()})


def _ours(raw: Mapping[str, Any]) -> StsFile:
    return StsFile(
        tables={name: _table(table) for name, table in raw["tables"].items()},
        drafter_sha256=str(raw["drafter_sha256"]),
        target_sha256=str(raw["target_sha256"]),
        fit_prompts=tuple(raw["fit_prompts"]),
        versions=dict(raw["versions"]),
        date=str(raw["date"]),
    )


def _stock(raw: Mapping[str, Any]) -> StsFile:
    temperatures = _tuple(raw["temperatures"])
    unknown = (math.nan,) * len(temperatures)
    table = StsTable(
        temperatures=temperatures,
        sampling={},
        dataset=str(raw.get("dataset", "")),
        prompts=0,
        steps=_count(raw.get("num_samples", 0)),
        counts=(),
        ece_before=_tuple(raw.get("ece_before", [])) or unknown,
        ece_after=_tuple(raw.get("ece_after", [])) or unknown,
        shift=0.0,
        shifted_temperatures=temperatures,
        held_out={},
    )
    return StsFile({name: table for name in REGIMES}, "", "", (), {}, "")


def _table(raw: Mapping[str, Any]) -> StsTable:
    return StsTable(
        temperatures=_tuple(raw["temperatures"]),
        sampling=dict(raw["sampling"]),
        dataset=str(raw["dataset"]),
        prompts=_count(raw["prompts"]),
        steps=_count(raw["steps"]),
        counts=tuple(_count(n) for n in raw["counts"]),
        ece_before=_tuple(raw["ece_before"]),
        ece_after=_tuple(raw["ece_after"]),
        shift=_finite(raw["shift"]),
        shifted_temperatures=_tuple(raw["shifted_temperatures"]),
        held_out=dict(raw["held_out"]),
        position_shifts=tuple(_finite(s) for s in raw.get("position_shifts", ())),
        request_spread=_finite(raw.get("request_spread", 0.0)),
    )


def _table_json(table: StsTable) -> dict[str, Any]:
    values = asdict(table)
    values["ece_before"] = _numbers(table.ece_before)
    values["ece_after"] = _numbers(table.ece_after)
    return values


def _tuple(values: Sequence[object]) -> tuple[float, ...]:
    """Numbers as read; a negative one is unknown (and, as a temperature, refused like NaN)."""
    found = [_finite(value) for value in values]
    return tuple(math.nan if value < 0 else value for value in found)


def _finite(value: object) -> float:
    """Any number of a file; what it may be is the table's business."""
    return number(value, -math.inf, math.inf)


def _count(value: object) -> int:
    return integer(value, 0, MOST_COUNT)


def _numbers(values: Sequence[float]) -> list[float]:
    """For JSON, which has no NaN, and for stock SGLang, which wants numbers: -1 is unknown."""
    return [-1.0 if math.isnan(value) else value for value in values]
