"""`dspark eval rules`: judge sampled drafts by block and token by token, on the same prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dspark.cli._workload import DrafterOption, WorkloadOptions, takes_workload

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.cli.evaluate import Subject
    from sglang_dspark.evaluation.accept_rules import Compared, Judge
    from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine


@takes_workload(without=(), temperature=1.0)
def rules(
    options: WorkloadOptions,
    drafter: DrafterOption = "shipped",
    trials: Annotated[int, typer.Option(min=1, help="Runs of each rule, with other seeds.")] = 5,
    json_file: Annotated[Path, typer.Option("--json", help="Result file.")] = Path(
        "results/block_verification.json"
    ),
) -> None:
    """Compare tokens a step of the two rules for sampled drafts: by block, and token by token."""
    from rich.console import Console

    from sglang_dspark.cli.evaluate import open_subject
    from sglang_dspark.common.machine import cpu_description
    from sglang_dspark.evaluation.accept_rules import compare
    from sglang_dspark.loadtest.results import require_clean, write_results
    from sglang_dspark.models.resolve import model_name

    require_clean(json_file)
    console = Console(stderr=True, highlight=False)
    subject = open_subject(options, drafter, None, console)
    settings = replace(options.decoding(), stop_ids=subject.stop_ids)
    found = compare(
        _engines(subject),
        subject.ids,
        [replace(settings, seed=settings.seed + i) for i in range(trials)],
        lambda number, rule: console.print(f"trial {number + 1} of {trials}: {rule}", style="dim"),
    )
    names = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "batch", "seed")
    document = {
        "target": model_name(subject.target),
        "drafter": model_name(subject.drafter),
        "prompts": len(subject.ids),
        "settings": {name: asdict(settings)[name] for name in names},
        **found.metrics(),
    }
    _say(found, console)
    write_results(json_file, "block_verification", cpu_description(), document)
    console.print(f"written to {json_file}")


def _engines(subject: Subject) -> Callable[[DecodeSettings, Judge], ReferenceEngine]:
    """Return a function that makes engines of one target and drafter from settings and a rule."""
    from sglang_dspark.evaluation.engine import ReferenceEngine
    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.families.registry import drafter_layers, open_drafter

    model = TargetModel.load(subject.target, drafter_layers(subject.drafter))
    module = open_drafter(subject.drafter, model)
    return lambda settings, judge: ReferenceEngine(model, module, settings, judge)


def _say(found: Compared, console: Console) -> None:
    for name, ratio in (("on the same drafts", found.same_drafts), ("each by itself", found.kept)):
        console.print(
            f"tokens a step, by block over token by token, {name}: "
            f"{ratio.mid:.4f} ({ratio.low:.4f} to {ratio.high:.4f})"
        )
