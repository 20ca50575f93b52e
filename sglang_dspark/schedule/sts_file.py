"""Read and write `sts.json`: fitted temperatures, and the data that they were fitted to.

The file is a superset of the one that SGLang reads by --speculative-dspark-confidence-sts-path
(srt/speculative/dspark_components/dspark_sts.py: `temperatures`, `dataset`, `num_samples`,
`ece_before`, `ece_after`; unknown fields are ignored). So stock SGLang reads it unchanged and
applies the default table to every request. `tables` holds one table for each sampling regime,
because acceptance has another distribution in greedy decoding.
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
# least slope). Tables of other fitters may have ten times that.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0
MOST_SHIFT = 1000.0
MOST_SPREAD = 9.0  # a variance; beyond it most requests would be at `request_shift.LIMIT`
MOST_COUNT = 1 << 53


def regime(temperature: float) -> str:
    """Return the sampling regime of a request: `greedy` at temperature 0, else `sampled`."""
    return GREEDY if temperature == 0 else SAMPLED


@dataclass(frozen=True)
class StsTable:
    """One regime's temperatures [gamma] and their origin.

    sampling: temperature, top_k, top_p, min_p of the requests. prompts: how many. steps: verify
    steps. counts: labels by position, after censoring. ece_before, ece_after: of the cumulative
    product by position, on the fitted data. shift, position_shifts, shifted_temperatures: our
    extension `sts+shift` (`calibration.fit_shifts`), to be used together; request_spread: variance
    of the requests' own shifts (`request_shift`), 0 if unknown. Stock SGLang reads none of them.
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
        """Return the calibration of the paper, STS."""
        return Calibration(self.temperatures)

    @property
    def shifted(self) -> Calibration:
        """Return `sts+shift` for requests without history."""
        return Calibration(self.shifted_temperatures, self.shift, self.position_shifts)

    @property
    def followed(self) -> Calibration:
        """Return `sts+shift` with requests' own shifts, if the table has their spread."""
        return replace(self.shifted, spread=self.request_spread)

    def shortened(self, gamma: int) -> StsTable:
        """Return the table of the first `gamma` positions.

        A position's temperature is fitted with those before it fixed and later ones unseen
        (`calibration.fit`), so a fit of fewer positions would give the same ones. `sts+shift` keeps
        each position's own parameters.
        """
        names = ("temperatures", "counts", "ece_before", "ece_after", "shifted_temperatures")
        cut = {name: getattr(self, name)[:gamma] for name in (*names, "position_shifts")}
        return replace(self, **cut)


@dataclass(frozen=True)
class StsFile:
    """All tables of one drafter for one target.

    drafter_sha256, target_sha256: over the weight files; empty in a table of stock SGLang, which
    records no origin. fit_prompts: digests of the prompts used for fitting, so that an evaluation
    can exclude them. versions: of the packages that made it. date: UTC, ISO 8601.
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
        """Return the drafts per step that the tables are for."""
        return len(next(iter(self.tables.values())).temperatures)

    @property
    def default(self) -> str:
        """Return the regime that stock SGLang applies to all: `sampled` (most traffic), if any."""
        return SAMPLED if SAMPLED in self.tables else GREEDY

    def table(self, temperature: float) -> StsTable:
        """Return the table for a sampling temperature; the other regime's if its own is missing."""
        wanted = regime(temperature)
        return self.tables[wanted if wanted in self.tables else self.default]


def write_sts(path: Path, sts: StsFile) -> None:
    """Write `path` atomically. Raises DSparkError if it cannot be written."""
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

    drafter_sha256: of the drafter in use; a table fitted to another is rejected. gamma: drafts per
    step in use; a longer table is cut to the first ones, a shorter one is rejected. Raises
    DSparkError for those and for a file that is not such a table.
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
    """Parse numbers; a negative one means unknown and becomes NaN (rejected as a temperature)."""
    found = [_finite(value) for value in values]
    return tuple(math.nan if value < 0 else value for value in found)


def _finite(value: object) -> float:
    """Parse any number of a file; `StsTable` checks its range."""
    return number(value, -math.inf, math.inf)


def _count(value: object) -> int:
    return integer(value, 0, MOST_COUNT)


def _numbers(values: Sequence[float]) -> list[float]:
    """Replace NaN by -1, unknown: JSON has no NaN, and stock SGLang requires numbers."""
    return [-1.0 if math.isnan(value) else value for value in values]
