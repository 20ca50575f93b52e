"""`dspark quantize`: quantise the expert weights of a drafter to FP8, MXFP4 or NVFP4.

The result loads like the drafter. A server keeps codes and scales; on a CPU its kernels
multiply float32 values, which are restored from them.
`quantised.json` in the same directory records its source and the errors of the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from torch import Tensor

RECORD = "quantised.json"


def quantize(
    drafter: Annotated[
        str, typer.Argument(help="Drafter with experts: a folder, or its Hugging Face id.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    format_name: Annotated[
        str, typer.Option("--format", help="fp8, mxfp4, nvfp4 or bf16.")
    ] = "fp8",
) -> None:
    """Quantise the experts of a drafter."""
    from sglang_dspark.drafter.checkpoint import check_drafter, write_checkpoint
    from sglang_dspark.drafter.weight_files import load_tensors
    from sglang_dspark.models.drafters import find_drafter
    from sglang_dspark.quantisation import checkpoint
    from sglang_dspark.quantisation.formats import FORMATS
    from sglang_dspark.training.files import write_json

    if format_name not in FORMATS:
        raise DSparkError(f"--format {format_name} is none of {', '.join(FORMATS)}")
    source = find_drafter(drafter)
    files = check_drafter(source)
    raw, config = files.raw, files.config
    if config.expert_format != checkpoint.UNQUANTISED:
        raise DSparkError(
            f"{source} has {config.expert_format} experts already; quantise the drafter it was "
            "made from"
        )
    if not config.num_experts:
        raise DSparkError(f"{source} is a dense drafter; only experts are quantised")
    if out.resolve() == source.resolve():
        raise DSparkError(f"--out {out} is the drafter itself; name another directory")
    tensors = load_tensors(files.stored)
    quantised = checkpoint.quantise_tensors(tensors, format_name)
    bare = format_name == checkpoint.UNQUANTISED
    key = {} if bare else {checkpoint.CONFIG_KEY: format_name}
    write_checkpoint(out, quantised, raw | key)
    write_json(out / RECORD, _record(source, format_name, tensors, quantised))
    sizes = (checkpoint.bytes_of(each) / 1e6 for each in (tensors, quantised))
    _say(out, format_name, *sizes, calibrated=(source / "sts.json").exists())


def _say(out: Path, name: str, before: float, after: float, *, calibrated: bool) -> None:
    print(f"{out}: {name} experts, {after:.1f} MB (from {before:.1f} MB)")
    if calibrated:
        print(f"its confidence is not calibrated yet: dspark calibrate --drafter {out}")


def _record(
    source: Path, name: str, tensors: dict[str, Tensor], quantised: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the record: format, source, and the mean error of each kind of weight."""
    from sglang_dspark.models.identity import target_sha256
    from sglang_dspark.quantisation.checkpoint import expert_names, relative_error, restore_tensors
    from sglang_dspark.training.provenance import environment

    restored = restore_tensors(quantised, name)
    errors: dict[str, list[float]] = {}
    for key in expert_names(tensors):
        kind = key.partition(".mlp.")[2]
        errors.setdefault(kind, []).append(relative_error(tensors[key], restored[key].float()))
    return {
        "format": name,
        "source": source.name,
        "source_sha256": target_sha256(source),
        "relative_error": {kind: sum(found) / len(found) for kind, found in errors.items()},
        "environment": environment(),
    }
