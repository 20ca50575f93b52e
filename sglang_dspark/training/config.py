"""One YAML file describes a training run: data, drafter shape, objective, schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    ValidationError,
    model_validator,
)

from sglang_dspark.errors import DSparkError
from sglang_dspark.files import fault, load_yaml, wrong_fields


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Frozen):
    """Where prompts come from and how the target answers them."""

    target: Path
    prompts: tuple[Path, ...] = ()
    self_prompts: Path | None = None
    self_prompt_count: int = Field(2000, ge=1, description="prompts that the target writes itself")
    store: Path
    cache: bool = Field(True, description="keep states on disk; false: computed in each step")
    strict: bool = Field(False, description="a broken prompt line stops instead of being skipped")
    answers: Literal["target", "given"] = Field(
        "target",
        description="who answers chat data: the target (paper, 5.1), or given: the row's own "
        "assistant where it has one",
    )
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.6)
    max_prompt_tokens: int = Field(256, ge=8)
    max_new_tokens: int = Field(224, ge=8, description="of each answer")
    max_tokens: int = Field(1024, ge=16, description="of a conversation of several turns")
    rows: int = Field(96, ge=1, description="requests in flight")
    half_products: bool = Field(
        False, description="bfloat16 products; CPUs with AVX512-BF16 or AMX"
    )
    threads: int = Field(2, ge=1)
    seed: int = 0
    shares: dict[str, float] = Field(
        default_factory=lambda: {"math": 1.0, "code": 1.0, "chat": 1.0},
        description="how often each domain is drawn, relative to the others",
    )


class _Shape(_Frozen):
    """What every kind of drafter has; everything else follows from the target's config."""

    gamma: int = Field(5, ge=1)
    layers: int = Field(1, ge=1)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    draft_vocab: int | None = Field(
        8192, ge=1, description="tokens the draft can propose; null: all"
    )
    init_from_target: bool = True


class _WithHeads(_Shape):
    """What drafters with a parallel backbone, a sequential and a confidence head have in common
    (paper, 3.1, 3.2.1)."""

    layers: int = Field(3, ge=1)
    markov_rank: int = Field(64, ge=1)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence_head: bool = True
    mask_token_id: int = Field(ge=0)
    start_from: Path | None = Field(
        None, description="drafter directory of the same shape to go on from, e.g. with more data"
    )


class DSparkShape(_WithHeads):
    """Dense layers on the plain residual."""

    kind: Literal["dspark"] = "dspark"


class MoEShape(_WithHeads):
    """Layers with experts, on several residual streams, over a window of the context."""

    kind: Literal["moe"]
    experts: int = Field(8, ge=1, description="routed experts of a layer")
    experts_per_token: int = Field(2, ge=1)
    shared_experts: int = Field(1, ge=0, description="experts that every token goes through")
    expert_width: int | None = Field(
        None, ge=1, description="null: a token's experts are together as wide as the target's MLP"
    )
    router_scores: Literal["sigmoid", "softmax"] = "sigmoid"
    balance_rate: float = Field(1e-3, ge=0, description="step of the routers' biases; 0: none")
    residual_streams: int = Field(4, ge=1, description="mHC; 1: the plain residual")
    window: int | None = Field(128, ge=1, description="context tokens a block sees; null: all")


class DFlashShape(_Shape):
    """Parallel backbone alone: block diffusion without a sequential head."""

    kind: Literal["dflash"]
    layers: int = Field(5, ge=1)
    mask_token_id: int = Field(ge=0)


class Eagle3Shape(_Shape):
    """One autoregressive layer over fused features, trained with its own outputs as inputs."""

    kind: Literal["eagle3"]


class MTPShape(_Shape):
    """One layer chained over its own hidden state, as DeepSeek's multi-token prediction."""

    kind: Literal["mtp"]


def _kind(raw: Any) -> str:
    return raw.get("kind", "dspark") if isinstance(raw, dict) else getattr(raw, "kind", "")


DrafterShape = Annotated[
    Annotated[DSparkShape, Tag("dspark")]
    | Annotated[MoEShape, Tag("moe")]
    | Annotated[DFlashShape, Tag("dflash")]
    | Annotated[Eagle3Shape, Tag("eagle3")]
    | Annotated[MTPShape, Tag("mtp")],
    Discriminator(_kind),
]


class ObjectiveConfig(_Frozen):
    """Weights of the three losses (paper, eqs. 8-12), the paper's by default."""

    ce: float = 0.1
    tv: float = Field(
        0.9,
        description="of L_tv = sum_v |p_t - p_d| (eq. 10): 0.45 is 0.9 times the total variation",
    )
    confidence: float = 1.0


class ScheduleConfig(_Frozen):
    """Optimiser and how long to train."""

    steps: int = Field(10000, ge=1)
    sequences_per_step: int = Field(4, ge=1)
    anchors_per_sequence: int = Field(24, ge=1)
    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    warmup_steps: int = Field(200, ge=0)
    clip: float = Field(1.0, gt=0)
    ema: float = Field(0.999, ge=0, lt=1, description="decay of the averaged weights; 0: none")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    half_products: bool = Field(False, description="bfloat16 products; always on a GPU")
    threads: int = Field(2, ge=1)
    seed: int = 0
    log_every: int = 50
    checkpoint_every: int = 500
    held_out_every: int = Field(50, ge=2, description="every n-th sequence is never trained on")
    validate_every: int = Field(500, ge=1)
    validation_sequences: int = Field(48, ge=0)


class CalibrationConfig(_Frozen):
    """What the drafter's confidence is calibrated on after training (paper, 3.2.1)."""

    prompts: tuple[str, ...] = Field((), description="as --prompts of `dspark calibrate`")
    held_out: tuple[str, ...] = Field((), description="as --held-out of `dspark calibrate`")
    limit: int | None = Field(None, ge=1, description="prompts per domain")
    max_new_tokens: int = Field(96, ge=8)


class ServingConfig(_Frozen):
    """Whether and how the trained drafter is tried in a server on 127.0.0.1, DSpark drafters only.

    The server is stopped again; the run says how to start it.
    """

    check: bool = Field(False, description="serve it and compare greedy answers")
    port: int = Field(0, ge=0, le=65535, description="0: any free one")
    per_domain: int = Field(2, ge=1, description="demo prompts of each domain")
    max_new_tokens: int = Field(64, ge=8)


class RunConfig(_Frozen):
    """The whole file."""

    run_dir: Path
    tensorboard: StrictBool | Path = Field(
        False, description="curves for TensorBoard: true, in the run_dir, or a folder"
    )
    data: DataConfig
    drafter: DrafterShape
    objective: ObjectiveConfig = ObjectiveConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    serving: ServingConfig = ServingConfig()

    @property
    def curves(self) -> Path | None:
        """Folder of the curves for TensorBoard, None without."""
        if isinstance(self.tensorboard, Path):
            return self.tensorboard
        return self.run_dir / "tensorboard" if self.tensorboard else None

    @model_validator(mode="after")
    def _served_kind(self) -> RunConfig:
        if self.serving.check and self.drafter.kind not in ("dspark", "moe"):
            raise ValueError(
                f"serving.check is for DSpark drafters, drafter.kind is {self.drafter.kind}"
            )
        return self


def load_config(path: Path) -> RunConfig:
    """Read and check a YAML file; DSparkError names the field that is wrong."""
    if not path.is_file():
        raise DSparkError(f"no training config at {path}")
    try:
        return RunConfig.model_validate(load_yaml(path))
    except ValidationError as error:
        raise DSparkError(f"{path}: {wrong_fields(error)}") from None
    except (OSError, ValueError) as error:
        raise DSparkError(f"{path} is not YAML: {fault(error)}") from None
