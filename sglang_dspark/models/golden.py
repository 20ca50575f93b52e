"""Build models for golden acceptance: of a real shape, with drafts right as often as a file says.

The industry publishes throughput at a given acceptance. The file names a shape and how often a
draft is right; `simulated.py` builds target and drafters into the user's cache. Every pass costs
the same as the real model's. The text is meaningless, and acceptance is not measured: results
say "simulated acceptance".
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sglang_dspark.common.files import load_yaml, reading, wrong_fields
from sglang_dspark.errors import DSparkError
from sglang_dspark.models.built import built
from sglang_dspark.paths import cache_root
from sglang_dspark.shipped import config_file

SHAPES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "tiny")  # of `simulated.py`, which imports torch
KINDS = ("dspark", "mtp")  # of drafters that are built


class Golden(BaseModel):
    """A file of `configs/golden/`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    shape: str = Field(description=f"of the target: {', '.join(SHAPES)}")
    doubtful: float = Field(gt=0, lt=1, description="share of tokens behind which drafts err more")
    right: float = Field(gt=0, lt=1, description="share of right drafts behind these")
    otherwise: float = Field(gt=0, lt=1, description="share of right drafts behind the others")
    draft_vocab: int | None = Field(
        None, ge=16, description="tokens that can be drafted and that answers consist of; null: all"
    )
    source: str = Field(min_length=1, description="where these shares come from")

    @field_validator("shape")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in SHAPES:
            raise ValueError(f"no shape {value!r}; there are {', '.join(SHAPES)}")
        return value


@dataclass(frozen=True)
class GoldenModels:
    """Folders of the target and of its drafters by kind, those of `KINDS`."""

    target: Path
    drafters: dict[str, Path]


def load_golden(given: Path) -> Golden:
    """Load a file, or the shipped one of that name. Raises DSparkError naming file and field."""
    path = config_file("golden", given)
    with reading(path, "file of golden acceptance", "see configs/golden/"):
        values = load_yaml(path)
        try:
            return Golden.model_validate(values)
        except ValidationError as error:
            raise DSparkError(f"{path}: {wrong_fields(error, Golden)}") from None


def ensure_golden(golden: Golden, device: str) -> GoldenModels:
    """Return the models in the user's cache; build them if missing. device: `cpu` or `cuda`."""
    from sglang_dspark.models import simulated

    shape, words = simulated.SHAPES[golden.shape], golden.draft_vocab or 0
    most = shape.vocab - len(simulated.SPECIALS)
    if words > most or words % 16:  # matrix products read weights in groups of 16 rows
        raise DSparkError(
            f"golden acceptance: draft_vocab {words} must be a multiple of 16 and at most {most}, "
            f"the words of {golden.shape}"
        )
    made_by = Path(simulated.__file__).read_bytes() + repr((golden, device)).encode()
    name = f"golden-{golden.shape}-{hashlib.sha256(made_by).hexdigest()[:12]}"
    path = cache_root() / "sglang-dspark" / "models" / name
    if not path.is_dir():
        acceptance = simulated.Acceptance(golden.doubtful, golden.right, golden.otherwise)
        with built(path) as out:
            simulated.write_models(out, shape, acceptance, device, golden.draft_vocab)
    return GoldenModels(path / "target", {kind: path / kind for kind in KINDS})
