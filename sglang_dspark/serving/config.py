"""Define `DSparkConfig`: every setting of this package, its default, and its value's origin.

The file is YAML or JSON and is named by the environment variable `SGLANG_DSPARK_CONFIG`; the
server flag `--dspark-config FILE` (patches/step/config_flag.py) sets that variable, so that the
spawned processes read the same file. No field has to be set. Imports no sglang.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sglang_dspark.common.files import brief, fault, load_yaml
from sglang_dspark.errors import DSparkError

CONFIG_VARIABLE = "SGLANG_DSPARK_CONFIG"


class CpuConfig(BaseModel):
    """Settings of the CPU platform; without effect where an accelerator serves."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="compute threads of a rank; null chooses by the cores we may use",
    )
    matrix_kernel: bool = Field(
        default=True,
        description="our matrix kernel for the few rows of a decode or verify step",
    )
    weights: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        default="auto",
        description="how the weights of products are kept: a decode step reads all of them, fewer "
        "bytes in less time. auto: bfloat16 where the checkpoint's are bfloat16 numbers, so that "
        "nothing is lost, else float32. int8: with a float32 scale for each 64 columns. Rounded "
        "once, at the start",
    )
    activations: Literal["auto", "narrow", "wide"] = Field(
        default="auto",
        description="what rows are rounded to where they meet packed weights; sums stay float32. "
        "auto: to bfloat16 beside bfloat16 weights, where the processor multiplies these itself "
        "(AVX512-BF16, else rows stay float32), and to sixteen bits beside int8. narrow: beside "
        "int8 to eight bits (AVX512-VNNI, else sixteen), which costs more accuracy than the "
        "weights' own rounding. wide: not at all beside bfloat16, to sixteen bits beside int8",
    )
    overlap: bool = Field(
        default=False,
        description="SGLang's overlap scheduling: on a CPU nothing overlaps, and results come a "
        "step late",
    )

    @model_validator(mode="after")
    def _packed_needs_the_kernel(self) -> Self:
        if self.weights in ("bfloat16", "int8") and not self.matrix_kernel:
            raise ValueError(f"weights {self.weights} needs matrix_kernel")
        return self


class ScheduleConfig(BaseModel):
    """Scheduling: how many drafts a step verifies, and by which rule (sglang_dspark/schedule)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    mode: Literal["auto", "static", "off"] = Field(
        default="auto",
        description="auto: our scheduler; static: every draft is verified; off: SGLang decides "
        "(GPU alone)",
    )
    algorithm: Literal["search", "early-stop"] = Field(
        default="search",
        description="mode auto: how many drafts a step verifies. search: the best number of all, "
        "by confidences of the step before; early-stop: the paper's Algorithm 1, by those of the "
        "step itself, up to the first draft that does not pay",
    )
    profile_seconds: float = Field(
        default=15.0,
        ge=1.0,
        le=600.0,
        description="most time that measuring step times may take at the first start",
    )
    fairness_floor: int = Field(
        default=0,
        ge=0,
        le=255,
        description="drafts that every request gets verified in a step that drafts, if it has them",
    )
    speed_target: float | None = Field(
        default=None,
        gt=0.0,
        le=1e6,
        description="tokens/s that every request should get: one that is behind counts for more; a "
        "request names its own in sampling_params.custom_params.dspark_speed",
    )
    threshold: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="mode auto: verify drafts while their confidence exceeds this, at any load, "
        "instead of scheduling by step times; for comparison",
    )
    min_acceptance: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="mode auto: drafting is switched off, at all loads, while the share of first "
        "drafts that are accepted is below this beyond doubt. It is tried again seldom, and after "
        "an update of weights. null: never off; the guard still decides for each load",
    )
    step_log: str | None = Field(
        default=None,
        min_length=1,
        description="mode auto: a file that every finished step is appended to as a line of JSON: "
        "its requests, tokens, drafts, predicted and measured seconds",
    )

    @model_validator(mode="after")
    def _choices_agree(self) -> Self:
        if self.algorithm != "search" and (self.mode != "auto" or self.threshold is not None):
            raise ValueError(f"algorithm {self.algorithm} needs mode auto and no threshold")
        if self.min_acceptance is not None and self.mode != "auto":
            raise ValueError("min_acceptance needs mode auto")
        if self.threshold is None:
            return self
        if self.mode != "auto" or self.fairness_floor or self.speed_target:
            raise ValueError("threshold needs mode auto, no fairness_floor and no speed_target")
        return self

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """Accept a bare `off`, which YAML reads as False."""
        return "off" if value is False else value


class VerifyConfig(BaseModel):
    """Acceptance of drafts (sglang_dspark/verify)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    rule: Literal["block", "token"] = Field(
        default="block",
        description="how the drafts of a sampled request without a seed are judged. block: the "
        "window as a whole, which keeps more of them; token: one by one. The distribution of "
        "answers is the same. On a GPU this is for the steps that our accept rule judges "
        "(docs/gpu.md). SGLang's rule judges one by one; of requests without top-k, top-p and "
        "min-p it judges unless the file itself says block",
    )
    window_kernel: bool = Field(
        default=True,
        description="our attention kernel for verify windows where SGLang's Triton backend serves "
        "on a GPU (docs/gpu.md); false leaves them to SGLang's extend kernel",
    )


class RequestsConfig(BaseModel):
    """Limits of one request (upstream_fixes/request_limits.py): more gets status 400."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    answers: int = Field(default=128, ge=1, description="answers to a prompt (`n`)")
    logprobs: int = Field(
        default=1000, ge=0, description="log-probabilities at a position (`top_logprobs_num`)"
    )


class DSparkConfig(BaseModel):
    """The whole configuration; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    cpu: CpuConfig = Field(CpuConfig(), description="the CPU platform")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="what is verified in a step")
    verify: VerifyConfig = Field(VerifyConfig(), description="how drafts are accepted")
    requests: RequestsConfig = Field(RequestsConfig(), description="what one request may ask for")
    upstream_fixes: bool = Field(
        default=True,
        description="fix faults of SGLang that have nothing to do with speculation "
        "(patches/upstream_fixes); false installs none of these patches, so that the requests "
        "limits do not hold either",
    )


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and the origin of each of its values.

    path: the file read, or None when every value is a default.
    origins: dotted field name -> `default` or `file PATH`, one entry a leaf field.
    """

    config: DSparkConfig
    path: Path | None
    origins: dict[str, str]


def load_config(path: Path | None = None) -> LoadedConfig:
    """Load the configuration of `path`, else of the file in `SGLANG_DSPARK_CONFIG`, else defaults.

    The file is read once a process and path. Raises `DSparkError` when it is missing, is not a
    mapping, or has an unknown field or a value of the wrong type or range.
    """
    if path is None:
        named = os.environ.get(CONFIG_VARIABLE, "").strip()
        path = Path(named) if named else None
    return _load(None if path is None else Path(os.path.expanduser(path)).absolute())


def current_config() -> DSparkConfig:
    """Return the configuration in force in this process."""
    return load_config().config


def use_config_file(path: Path) -> LoadedConfig:
    """Read `path` and make it the file of this process and of those that it starts."""
    loaded = load_config(path)
    os.environ[CONFIG_VARIABLE] = str(loaded.path)
    return loaded


@lru_cache(maxsize=8)
def _load(path: Path | None) -> LoadedConfig:
    values = _read_mapping(path) if path is not None else {}
    try:
        config = DSparkConfig.model_validate(values)
    except ValidationError as error:
        raise DSparkError(f"configuration {path}: {_first_fault(error)}") from error
    return LoadedConfig(config=config, path=path, origins=_origins(config, values, path))


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read the top-level mapping of a YAML file (JSON is a subset); {} for an empty file."""
    try:
        values = load_yaml(path)
    except OSError as error:
        raise DSparkError(
            f"configuration {path} cannot be read ({fault(error)}); "
            f"check --dspark-config and {CONFIG_VARIABLE}"
        ) from error
    except ValueError as error:
        raise DSparkError(f"configuration {path} is neither YAML nor JSON: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise DSparkError(
            f"configuration {path} must be a mapping of field names, not a {type(values).__name__}"
        )
    return values


def _first_fault(error: ValidationError) -> str:
    """Describe the first fault; for an unknown field, list the allowed ones."""
    first = error.errors()[0]
    names = [brief(part, 40) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(sorted(_fields_at(names[:-1])))
        return f"unknown field {'.'.join(names)}; known here: {allowed}"
    return f"field {'.'.join(names)}: {brief(first['msg'])} (got {brief(repr(first['input']), 60)})"


def _fields_at(names: list[str]) -> list[str]:
    """Return the field names of the model at the dotted path `names`."""
    model: BaseModel = DSparkConfig()
    for name in names:
        model = getattr(model, name)
    return list(type(model).model_fields)


def _origins(model: BaseModel, values: Any, path: Path | None, prefix: str = "") -> dict[str, str]:
    """Map leaf fields to their origin; `values`: the file's content at this level."""
    given = values if isinstance(values, dict) else {}
    origins: dict[str, str] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            origins |= _origins(value, given.get(name), path, f"{prefix}{name}.")
        else:
            origins[f"{prefix}{name}"] = f"file {path}" if name in given else "default"
    return origins
