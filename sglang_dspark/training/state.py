"""Save and load the state of a run: one safetensors file, written by the leading process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor

from sglang_dspark.common.files import brief, parse_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.training.config import DrafterShape, RunConfig
from sglang_dspark.training.distributed import World
from sglang_dspark.training.files import read_metadata, write_tensors
from sglang_dspark.training.optimiser import Optimiser
from sglang_dspark.training.sampler import Sampler
from sglang_dspark.training.store import StoreReader

# Without a format: written when objective.tv weighed half of the paper's L1 norm.
_FORMAT = "2"


def state_file(cfg: RunConfig) -> Path:
    """Return the file of a run's state."""
    return cfg.run_dir / "state.safetensors"


def save_state(
    cfg: RunConfig, step: int, optimiser: Optimiser, sampler: Sampler, world: World
) -> None:
    """Write all that is needed to continue exactly; all processes must call it."""
    state: dict[str, Tensor] = {f"sampler.{k}": v for k, v in sampler.state().items()}
    for name, tensor in optimiser.state():
        if world.leads:
            state[name] = tensor.cpu()
    if world.leads:
        meta = {"format": _FORMAT, "step": str(step), "config": cfg.model_dump_json()}
        told = sampler.reader.meta
        meta |= {name: told[name] for name in ("target_sha256",) if name in told}
        write_tensors(state_file(cfg), state, meta)


def check_state(cfg: RunConfig, reader: StoreReader) -> int | None:
    """Return the steps done by the run directory's state, or None if there is no state.

    reader: of answers of the run's target. Raises DSparkError if the state is of another drafter,
    target, objective or split of the answers, or cannot be read.
    """
    file = state_file(cfg)
    if not file.exists():
        return None
    meta = read_metadata(file)
    with reading(file, "state of a run", "choose a new run_dir"):
        then, step = parse_json(meta["config"]), int(meta["step"])
        shape = TypeAdapter(DrafterShape).validate_python(then["drafter"])
        averaged = bool(then["schedule"]["ema"])
        trained = _objective(meta, then)
    if shape != cfg.drafter:
        raise DSparkError(
            f"{file} belongs to a drafter of another shape{_differing(shape, cfg.drafter)}; choose "
            "a new run_dir"
        )
    if averaged != bool(cfg.schedule.ema):
        raise DSparkError(f"{file} was made with schedule.ema {then['schedule']['ema']}; keep it")
    _require_same(file, "target_sha256", meta, reader.meta)
    for name in ("held_out_every", "seed"):  # with others it would train on held-out answers
        _require_same(file, name, then["schedule"], dict(cfg.schedule))
    if trained != cfg.objective:
        was, now = _weights(trained), _weights(cfg.objective)
        raise DSparkError(
            f"{file} was trained with objective {was} (in today's weights), the config says {now}: "
            "set the former to go on, or choose a new run_dir"
        )
    return step


def _differing(then: DrafterShape, now: DrafterShape) -> str:
    """List the fields in which two shapes of a kind differ, in brackets."""
    if then.kind != now.kind:
        return f" (kind {then.kind}, here {now.kind})"
    pairs = [(name, was, getattr(now, name)) for name, was in then]
    return f" ({', '.join(f'{name} {a}, here {b}' for name, a, b in pairs if a != b)})"


def _require_same(file: Path, name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise DSparkError if a field differs; files of earlier versions may lack it."""
    if name in then and name in now and then[name] != now[name]:
        raise DSparkError(
            f"{file} was trained with {name} {brief(then[name])}, here it is {brief(now[name])}: "
            "go on with the former, or choose a new run_dir"
        )


def _objective(meta: dict[str, str], config: dict[str, Any]) -> ObjectiveConfig:
    """Return the objective a state was trained with, in today's weights."""
    found = ObjectiveConfig.model_validate(config["objective"])
    if "format" in meta:
        return found
    return found.model_copy(update={"tv": found.tv / 2})


def _weights(objective: ObjectiveConfig) -> str:
    return ", ".join(f"{name} {value}" for name, value in objective)


def load_state(cfg: RunConfig, step: int, optimiser: Optimiser, sampler: Sampler) -> None:
    """Continue from the run directory's state, which `check_state` found after `step` steps."""
    state = load_file(str(state_file(cfg)))
    try:
        optimiser.restore(state, step)
    except (RuntimeError, KeyError) as error:
        cause = str(error).splitlines()[0]
        raise DSparkError(
            f"{state_file(cfg)} does not fit this drafter ({cause}): it is of another version; "
            "choose a new run_dir"
        ) from None
    sampler.restore({k: state[f"sampler.{k}"] for k in ("order", "generator")})
