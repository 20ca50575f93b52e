"""Resolve the pair of models that a command serves, and check it before a server starts.

The server makes the same checks (serving/checkpoint.py), but minutes later.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dspark.cli._workload import drafter_dir, target_dir
from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import require_sglang

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.drafter.target_fit import Target

ServedTargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        help="Target: a folder, or a Hugging Face id as OWNER/NAME[@REVISION]; `demo`, the demo "
        "target, is built if needed.",
    ),
]
ServedDrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter",
        help="Drafter: a folder, a Hugging Face id as OWNER/NAME[@REVISION], or `shipped`.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu or cuda. Default: cuda where there is such a GPU.")
]


def served_models(
    console: Console, target: str, drafter: str, device: str
) -> tuple[Path, Path, str]:
    """Return the folders of target and drafter, and the device, `cpu` or `cuda`.

    Raises DSparkError without SGLang, for a device that is not here, a model that cannot be
    fetched, and a drafter that SGLang's DSPARK does not serve on this target.
    """
    from sglang_dspark.serving.checkpoint import validate_drafter

    require_sglang()
    where = device_here(device)
    draft = drafter_dir(drafter)
    folder = target_dir(target, console)
    validate_drafter(draft, target_facts(folder))
    return folder, draft, where


def note_unless_served(console: Console, drafter: Path, target: Path) -> None:
    """Print why a server would reject a DSpark drafter that the reference engine reads.

    Only config.json is checked.
    """
    from sglang_dspark.families.registry import drafter_kind
    from sglang_dspark.serving.checkpoint import validate_drafter

    if drafter_kind(drafter) != "dspark":
        return
    try:
        validate_drafter(drafter, target_facts(target), weights=False)
    except DSparkError as error:
        console.print(
            f"a server would refuse it: {error}",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def device_here(device: str) -> str:
    """Return `cpu` or `cuda`; "" selects the one here. Raises DSparkError for others, no GPU."""
    if device not in ("", "cpu", "cuda"):
        raise DSparkError(f"device {device!r} is neither cpu nor cuda; leave it out to use what is")
    if device == "cpu":  # without loading torch, which takes seconds
        return device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise DSparkError("device cuda: torch finds no GPU; use cpu, or see `dspark doctor`")
    return "cpu"


def target_facts(folder: Path) -> Target:
    """Read the facts of a target's config.json that a drafter must fit.

    A multimodal model's facts are those of its text part. Raises DSparkError if the file cannot
    be read or lacks a field.
    """
    from sglang_dspark.common.files import integer, load_json, reading
    from sglang_dspark.drafter.target_fit import Target

    file = folder / "config.json"
    with reading(file, "model's configuration", "fetch the model again, or name another target"):
        raw = load_json(file, finite=False)
        text = raw.get("text_config") or raw
        names = ("hidden_size", "vocab_size", "num_hidden_layers")
        hidden, vocab, layers = (integer(text[name], 1, 1 << 40) for name in names)
        architecture = str((raw.get("architectures") or [""])[0])
        return Target(str(folder), hidden, vocab, layers, architecture)
