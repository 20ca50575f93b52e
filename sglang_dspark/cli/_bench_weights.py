"""`dspark bench weights`: what `cpu.weights` changes in a target's logits and answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dspark.cli._workload import TargetOption

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.evaluation.weight_rounding import Change
    from sglang_dspark.serving.cpu.weight_formats import WeightFormat

RESULTS = Path("results/weights_cpu.json")


def weights(
    formats: Annotated[str, typer.Option(help="Of `cpu.weights`.")] = "bfloat16,int8",
    prompts: Annotated[int, typer.Option(min=1, help="The first so many of the package's.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, help="Length of an answer at most.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    out: Annotated[Path, typer.Option("--json", help="Result file.")] = RESULTS,
    target: TargetOption = "demo",
) -> None:
    """Logits and greedy answers with weights in fewer bits, beside float32's."""
    from dataclasses import asdict

    from rich.console import Console

    from sglang_dspark.cli._workload import target_dir
    from sglang_dspark.common.machine import cpu_description
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.loadtest.results import require_clean, write_results
    from sglang_dspark.serving.cpu.weight_formats import FORMATS

    console = Console(stderr=True, highlight=False)
    names = [each.strip() for each in formats.split(",")]
    if wrong := set(names) - set(FORMATS):
        raise DSparkError(f"--formats {', '.join(wrong)}: choose of {', '.join(FORMATS)}")
    require_clean(out)
    folder = target_dir(target, console)
    found = _changes(console, folder, [FORMATS[name] for name in names], (prompts, tokens, batch))
    metrics: dict[str, Any] = {
        "target": folder.name,
        "tokens_at_most": tokens,
        "formats": {name: asdict(change) for name, change in found.items()},
    }
    write_results(out, out.stem, cpu_description(), metrics)
    _show(console, found)
    console.print(f"written to {out}")


def _changes(
    console: Console, folder: Path, formats: list[WeightFormat], size: tuple[int, int, int]
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
            progress(f"answering with {name} weights", (done - 1) % len(ids) + 1, len(ids))

        ours = answer(exact, ids, settings, lambda *_: tell("float32"))
        for form in formats:
            rounded = _rounded(folder, form)
            theirs = answer(rounded, ids, settings, lambda *_, name=form.name: tell(name))
            found[form.name] = compare(exact, rounded, ids, ours, theirs)
    return found


def _rounded(folder: Path, form: WeightFormat) -> TargetModel:
    """The target with the numbers that weights and activations stand for in a format's products."""
    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.evaluation.weight_rounding import round_weights
    from sglang_dspark.serving.cpu.weight_formats import INT8, dense, fits, pack, rounded_rows

    def rounding(weight: Tensor) -> Tensor:
        return dense(pack(weight, form)) if fits(weight, form) else weight

    target = TargetModel.load(folder)
    round_weights(target, rounding, rounded_rows if form is INT8 else None)
    return target


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
