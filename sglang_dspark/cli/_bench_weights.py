"""`dspark bench weights`: measure how `cpu.weights` and `cpu.activations` change the output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dspark.cli._workload import TargetOption, chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from torch import Tensor

    from sglang_dspark.backends.cpu.weight_formats import WeightFormat
    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.evaluation.weight_rounding import Change

RESULTS = Path("results/weights_cpu.json")


def weights(
    formats: Annotated[str, typer.Option(help="Of `cpu.weights`.")] = "bfloat16,int8",
    activations: Annotated[
        str, typer.Option(help="Of `cpu.activations`; those that round alike are run once.")
    ] = "auto,wide,narrow",
    prompts: Annotated[int, typer.Option(min=1, help="The first so many of the package's.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, help="Length of an answer at most.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    out: Annotated[Path, typer.Option("--json", help="Result file.")] = RESULTS,
    target: TargetOption = "demo",
) -> None:
    """Compare logits and greedy answers of low-bit weights and activations with float32's."""
    from dataclasses import asdict

    from rich.console import Console

    from sglang_dspark.backends.cpu.weight_formats import FORMATS
    from sglang_dspark.cli._workload import target_dir
    from sglang_dspark.common.machine import cpu_description
    from sglang_dspark.loadtest.results import require_clean, write_results

    console = Console(stderr=True, highlight=False)
    names = chosen("--formats", formats, FORMATS)
    told = chosen("--activations", activations, ("wide", "auto", "narrow"))
    require_clean(out)
    folder = target_dir(target, console)
    ways = _ways([FORMATS[name] for name in names], told)
    found = _changes(console, folder, ways, (prompts, tokens, batch))
    metrics: dict[str, Any] = {
        "target": folder.name,
        "tokens_at_most": tokens,
        "formats": {name: asdict(change) for name, change in found.items()},
    }
    write_results(out, out.stem, cpu_description(), metrics)
    _show(console, found)
    console.print(f"written to {out}")


def _ways(forms: Sequence[WeightFormat], told: Sequence[str]) -> list[tuple[WeightFormat, str]]:
    """Return formats and activations; of those that round rows alike, only the first."""
    ways: dict[tuple[str, int], tuple[WeightFormat, str]] = {}
    for form in forms:
        for each in told:
            ways.setdefault((form.name, _bits(form, each)), (form, each))
    return list(ways.values())


def _bits(form: WeightFormat, told: str) -> int:
    """Return the bits of a row's numbers with a format."""
    if form.name == "int8":
        return 8 if told == "narrow" else 16
    return 16 if form.name == "bfloat16" and told != "wide" else 32


def _changes(
    console: Console, folder: Path, ways: list[tuple[WeightFormat, str]], size: tuple[int, int, int]
) -> dict[str, Change]:
    from transformers import AutoTokenizer

    from sglang_dspark.cli._progress import stages
    from sglang_dspark.evaluation.engine import DecodeSettings
    from sglang_dspark.evaluation.prompts import calibration_prompts, encode, stop_token_ids
    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.evaluation.weight_rounding import answer, compare

    count, tokens, batch = size
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [encode(tokenizer, each) for each in calibration_prompts()[:count]]
    settings = DecodeSettings(tokens, batch=batch, stop_ids=stop_token_ids(folder, tokenizer))
    exact = TargetModel.load(folder)
    found = {}
    with stages(console) as progress:
        done = 0

        def tell(name: str) -> None:
            nonlocal done
            done += 1
            progress(f"answering with {name}", (done - 1) % len(ids) + 1, len(ids))

        ours = answer(exact, ids, settings, lambda *_: tell("float32"))
        for form, told in ways:
            name = f"{form.name}, activations {told}"
            rounded = _rounded(folder, form, told)
            theirs = answer(rounded, ids, settings, lambda *_, name=name: tell(name))
            found[name] = compare(exact, rounded, ids, ours, theirs)
    return found


def _rounded(folder: Path, form: WeightFormat, activations: str) -> TargetModel:
    """Load the target with weights and activations rounded as in a format's products."""
    from sglang_dspark.backends.cpu.weight_formats import can_pack, dense, pack
    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.evaluation.weight_rounding import round_weights

    def rounding(weight: Tensor) -> Tensor:
        return dense(pack(weight, form)) if can_pack(weight, form) else weight

    target = TargetModel.load(folder)
    round_weights(target, rounding, _activations(form, activations))
    return target


def _activations(form: WeightFormat, told: str) -> Callable[[Tensor], Tensor] | None:
    """Return the rounding of rows with a format; None: no rounding."""
    from sglang_dspark.backends.cpu.weight_formats import (
        BFLOAT16,
        INT8,
        half_rows,
        rounded_groups,
        rounded_rows,
    )

    bits = _bits(form, told)
    if form is INT8:
        rounding = rounded_groups if bits == 8 else rounded_rows
        return lambda x: x if x.shape[-1] % form.columns else rounding(x)
    return half_rows if form is BFLOAT16 and bits == 16 else None


def _show(console: Console, found: dict[str, Change]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="Beside float32, greedy", box=box.SIMPLE_HEAD)
    for name in ("weights", "logits rms", "largest", "KL, nats", "same token", "same answer"):
        table.add_column(name, justify="left" if name == "weights" else "right", no_wrap=True)
    for name, change in found.items():
        table.add_row(
            name,
            f"{change.logit_rms:.3f}",
            f"{change.logit_max:.2f}",
            f"{change.kl:.1e}",
            f"{change.same_choice:.2%}",
            f"{change.same_answers:.0%}",
        )
    console.print(table)
