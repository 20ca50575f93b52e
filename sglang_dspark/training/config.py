"""Read the YAML file of a training run: data, drafter shape, objective, schedule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import (
    Discriminator,
    Field,
    StrictBool,
    Tag,
    ValidationError,
    model_validator,
)

from sglang_dspark.common.files import load_yaml, parse_yaml, reading, wrong_fields
from sglang_dspark.common.machine import has_bfloat16_products
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.dspark import FAMILY as DSPARK
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.registry import RECIPES
from sglang_dspark.families.shape import BaseShape, FrozenModel


class DataConfig(FrozenModel):
    """Prompts, and how the target answers them."""

    target: Path = Field(description="directory of the target, Hugging Face files")
    prompts: tuple[Path, ...] = Field((), description="files of user prompts or chat rows")
    self_prompts: Path | None = Field(
        None, description="JSONL file for prompts that the target writes itself; null: none"
    )
    self_prompt_count: int = Field(2000, ge=1, description="prompts that the target writes itself")
    store: Path = Field(description="folder for the answers, and the states if they are kept")
    cache: bool = Field(True, description="keep states on disk; false: computed in each step")
    strict: bool = Field(False, description="a broken prompt row stops instead of being skipped")
    answers: Literal["target", "given"] = Field(
        "target",
        description="who answers chat data: the target (paper, 5.1), or given: the row's own "
        "assistant where it has one",
    )
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (0.0, 0.0, 0.6), min_length=1, description="of the answers, in turns; 0 is greedy"
    )
    max_prompt_tokens: int = Field(256, ge=8, description="longer prompts are skipped")
    max_new_tokens: int = Field(224, ge=8, description="of each answer")
    max_tokens: int = Field(1024, ge=16, description="of a conversation of several turns")
    rows: int = Field(96, ge=1, description="requests in flight")
    half_products: bool = Field(
        False, description="bfloat16 products; ignored on CPUs without AVX512-BF16 and AMX"
    )
    threads: int = Field(
        2, ge=1, description="compute threads; on a CPU, processes of one thread answer"
    )
    seed: int = Field(0, description="of the order of prompts and of sampled answers")
    shares: dict[str, float] = Field(
        {"math": 1.0, "code": 1.0, "chat": 1.0},
        description="how often each domain is drawn, relative to the others",
    )


def _kind(raw: Any) -> str:
    return raw.get("kind", "dspark") if isinstance(raw, dict) else getattr(raw, "kind", "")


if TYPE_CHECKING:
    DrafterShape = BaseShape
else:  # one of the registered recipes' options, chosen by `kind`
    DrafterShape = Annotated[
        reduce(or_, (Annotated[each.shape, Tag(kind)] for kind, each in RECIPES.items())),
        Discriminator(_kind),
    ]


class ScheduleConfig(FrozenModel):
    """Optimiser and how long to train."""

    steps: int = Field(10000, ge=1, description="training steps")
    sequences_per_step: int = Field(4, ge=1, description="answers in a step")
    anchors_per_sequence: int = Field(24, ge=1, description="blocks drafted in each of them")
    learning_rate: float = Field(6e-4, description="at its highest, after the warm-up")
    weight_decay: float = Field(0.0, description="AdamW's")
    warmup_steps: int = Field(200, ge=0, description="steps until the learning rate is reached")
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    ema: float = Field(0.999, ge=0, lt=1, description="decay of the averaged weights; 0: none")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if any")
    half_products: bool = Field(False, description="bfloat16 products; always on a GPU")
    threads: int = Field(2, ge=1, description="compute threads on a CPU")
    seed: int = Field(0, description="of weights, sequences and anchors")
    log_every: int = Field(50, ge=1, description="steps between lines of the log")
    checkpoint_every: int = Field(500, ge=1, description="steps between states to resume from")
    held_out_every: int = Field(50, ge=2, description="every n-th sequence is never trained on")
    validate_every: int = Field(500, ge=1, description="steps between validations")
    validation_sequences: int = Field(48, ge=0, description="held-out answers of a validation")


class CalibrationConfig(FrozenModel):
    """Calibration of the drafter's confidence after training (paper, 3.2.1)."""

    prompts: tuple[str, ...] = Field((), description="as --prompts of `dspark calibrate`")
    held_out: tuple[str, ...] = Field((), description="as --held-out of `dspark calibrate`")
    limit: int | None = Field(None, ge=1, description="prompts per domain")
    max_new_tokens: int = Field(96, ge=8, description="of an answer")


class ServingConfig(FrozenModel):
    """A trial of the trained drafter in a server on 127.0.0.1, DSpark drafters only.

    The server is stopped again; the run says how to start it.
    """

    check: bool = Field(False, description="serve it and compare greedy answers")
    port: int = Field(0, ge=0, le=65535, description="0: any free one")
    per_domain: int = Field(2, ge=1, description="demo prompts of each domain")
    max_new_tokens: int = Field(64, ge=8, description="of an answer")


class RunConfig(FrozenModel):
    """The whole file."""

    run_dir: Path = Field(description="folder for states, the log and the drafter")
    tensorboard: StrictBool | Path = Field(
        False, description="curves for TensorBoard: true, in the run_dir, or a folder"
    )
    data: DataConfig = Field(description="prompts and answers")
    drafter: DrafterShape = Field(description="what is trained")
    objective: ObjectiveConfig = Field(ObjectiveConfig(), description="weights of the losses")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="optimiser and length")
    calibration: CalibrationConfig = Field(CalibrationConfig(), description="after training")
    serving: ServingConfig = Field(ServingConfig(), description="a trial in a server, at the end")

    @property
    def curves(self) -> Path | None:
        """Return the folder of the curves for TensorBoard, or None."""
        if isinstance(self.tensorboard, Path):
            return self.tensorboard
        return self.run_dir / "tensorboard" if self.tensorboard else None

    @model_validator(mode="after")
    def _served_kind(self) -> RunConfig:
        if self.serving.check and self.drafter.kind not in {each.kind for each in DSPARK.recipes}:
            raise ValueError(
                f"serving.check is for DSpark drafters, drafter.kind is {self.drafter.kind}"
            )
        return self


def load_config(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Read and check a YAML file. Raises DSparkError that names a wrong field.

    changes: `schedule.steps=500` each, fields to set instead of the file's, values as in YAML.
    """
    with reading(path, "training config", "write one like configs/train/tiny.yaml"):
        fields = load_yaml(path)
        for change in changes:
            _set_field(fields, change)
        try:
            return RunConfig.model_validate(fields)
        except ValidationError as error:
            raise DSparkError(f"{path}: {wrong_fields(error, RunConfig)}") from None


def _set_field(fields: Any, change: str) -> None:
    name, equals, text = change.partition("=")
    *groups, last = name.strip().split(".")
    if not equals or not last:
        raise DSparkError(f"--set {change}: write FIELD=VALUE, as schedule.steps=500")
    for group in groups:
        fields = fields.setdefault(group, {}) if isinstance(fields, dict) else None
    if not isinstance(fields, dict):
        where = ".".join(groups) or "the file"
        raise DSparkError(f"--set {change}: {where} has no fields in this config")
    try:
        fields[last] = parse_yaml(text)
    except ValueError as error:
        raise DSparkError(f"--set {change}: {error}") from None


SLOW_HALVES = (
    "half_products is ignored: this CPU has neither AVX512-BF16 nor AMX, and emulated bfloat16 "
    "products take tens of times as long as float32"
)


def without_slow_halves(cfg: RunConfig) -> RunConfig:
    """Return the config without `half_products` if neither a GPU nor this CPU supports them.

    Returns the same object if nothing changes; otherwise callers print `SLOW_HALVES`.
    """
    asked = cfg.data.half_products or cfg.schedule.half_products
    if not asked or torch.cuda.is_available() or has_bfloat16_products():
        return cfg
    whole = {"half_products": False}
    return cfg.model_copy(
        update={
            "data": cfg.data.model_copy(update=whole),
            "schedule": cfg.schedule.model_copy(update=whole),
        }
    )
