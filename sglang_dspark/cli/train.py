"""`dspark train`: run the stages of training a drafter, each alone or all in one go.

The target writes prompts and then responses with hidden states; a drafter is trained and
calibrated, and a server drafts with it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sglang_dspark.cli._progress import stages
from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.training.config import RunConfig
    from sglang_dspark.training.distributed import World

app = typer.Typer(help="Train a drafter for a target.")
ConfigOption = Annotated[
    Path, typer.Option("--config", help="YAML, or a name of configs/train, as tiny.")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Stop at a broken prompt row instead of skipping it.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of the config, as schedule.steps=500; may be repeated.",
    ),
]
_REASONS_SHOWN = 5
_SHOWN = ("loss", "tau", "steps_per_s", "held_out_loss", "held_out_tau", "held_out_ece")


@app.callback(invoke_without_command=True)
def train(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML: run all stages, resuming each.")
    ] = None,
    strict: StrictOption = False,
    changes: SetOption = None,
) -> None:
    """Train a drafter for a target: all stages with --config, or one of them."""
    if context.invoked_subcommand is not None:
        return
    if config is None:
        print(context.get_help())
        raise typer.Exit(2)
    cfg = _load(config, changes, strict)
    if cfg.data.self_prompts is not None and not cfg.data.self_prompts.exists():
        _write_prompts(cfg, cfg.data.self_prompt_count)
    _answer(cfg, minutes=1e9)
    _train(cfg)
    _calibrate(cfg)
    _serve(cfg)


@app.command()
def prompts(
    config: ConfigOption,
    count: Annotated[int | None, typer.Option(min=1)] = None,
    changes: SetOption = None,
) -> None:
    """Let the target write `count` user prompts into the config's `self_prompts` file."""
    cfg = _load(config, changes)
    _write_prompts(cfg, count or cfg.data.self_prompt_count)


@app.command()
def data(
    config: ConfigOption,
    minutes: Annotated[float, typer.Option(min=0)] = 1e9,
    strict: StrictOption = False,
    changes: SetOption = None,
) -> None:
    """Let the target answer the prompts; save tokens and hidden states. Resumable."""
    _answer(_load(config, changes, strict), minutes)


@app.command()
def drafter(config: ConfigOption, changes: SetOption = None) -> None:
    """Train the drafter on the stored responses; continues a stopped run."""
    _train(_load(config, changes)).end()


@app.command()
def average(
    first: Annotated[Path, typer.Argument(help="Drafter of an earlier stage.")],
    second: Annotated[Path, typer.Argument(help="Drafter that was trained on from it.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    share: Annotated[float, typer.Option(min=0, max=1, help="Weight of the second.")] = 0.5,
) -> None:
    """Average the weights of two stages of one drafter."""
    from sglang_dspark.training.averaging import average as averaged

    averaged(first, second, share, out)
    print(f"{out}: {1 - share:g} of {first}, {share:g} of {second}")
    if (first / "sts.json").exists():
        print(f"its confidence is not calibrated yet: dspark calibrate --drafter {out}")


def _load(config: Path, changes: Sequence[str] | None = None, strict: bool = False) -> RunConfig:
    """Load the config, with the target's folder in place of its name."""
    from sglang_dspark.cli._workload import target_dir
    from sglang_dspark.shipped import config_file
    from sglang_dspark.training.config import SLOW_HALVES, load_config, without_slow_halves
    from sglang_dspark.training.curves import require_tensorboard

    asked = load_config(config_file("train", config), changes or ())
    cfg = without_slow_halves(asked)
    require_tensorboard(cfg.curves)
    data: dict[str, object] = {"strict": True} if strict else {}
    try:
        data["target"] = target_dir(str(cfg.data.target), Console(stderr=True))
    except DSparkError as error:
        raise DSparkError(f"{config}: data.target: {error}") from None
    if cfg is not asked:
        Console(stderr=True).print(f"{config}: {SLOW_HALVES}", soft_wrap=True)
    return cfg.model_copy(update={"data": cfg.data.model_copy(update=data)})


def _started(cfg: RunConfig) -> RunConfig:
    """Return the config with the folder of the drafter to start from, if it names one."""
    from sglang_dspark.models.drafters import find_drafter

    start = getattr(cfg.drafter, "start_from", None)
    if start is None:
        return cfg
    try:
        shape = cfg.drafter.model_copy(update={"start_from": find_drafter(start)})
    except DSparkError as error:
        raise DSparkError(f"drafter.start_from: {error}") from None
    return cfg.model_copy(update={"drafter": shape})


def _open_target(cfg: RunConfig, layer_ids: tuple[int, ...]) -> TargetModel:
    """Load the target that writes prompts or answers.

    Raises DSparkError, before any data is made, if the drafter does not fit it, and in one of
    several processes, which would all write the same data.
    """
    import torch

    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.families.registry import check_shape
    from sglang_dspark.training.distributed import place_of, started_by_torchrun

    if started_by_torchrun():
        raise DSparkError(
            "torchrun starts `dspark train drafter` alone: make the data first, without torchrun, "
            "by `dspark train data`"
        )
    torch.set_num_threads(cfg.data.threads)
    target = TargetModel.load(
        cfg.data.target,
        layer_ids,
        half_products=cfg.data.half_products,
        device=place_of(cfg.schedule.device),
    )
    check_shape(cfg.drafter, target.config)
    return target


def _write_prompts(cfg: RunConfig, count: int) -> None:
    from sglang_dspark.training.collect import write_self_prompts

    target = _open_target(cfg, ())
    with stages(Console()) as show:
        kept = write_self_prompts(
            cfg.data, target, count, lambda done, total: show("prompts by the target", done, total)
        )
    print(f"{kept} prompts in {cfg.data.self_prompts}")


def _answer(cfg: RunConfig, minutes: float) -> None:
    from sglang_dspark.training.collect import answer, plan_answers

    skipped: list[str] = []
    target = _open_target(cfg, cfg.drafter.target_layer_ids if cfg.data.cache else ())
    try:
        plan = plan_answers(cfg, target.config, skipped.append)
    finally:  # even if no row is left, so that the reasons are known
        _report_skipped(cfg.data.store, skipped)
    size, free = plan.size, shutil.disk_usage(cfg.data.store).free
    print(
        f"{len(plan.todo)} prompts to answer; in all at most {size.tokens} tokens x "
        f"{size.bytes_per_token} bytes = {size.total / 1e9:.2f} GB in {cfg.data.store} "
        f"({free / 1e9:.0f} GB free); full logits would take {size.logit_bytes_per_token} bytes a "
        f"token, {size.logit_bytes_per_token / size.bytes_per_token:.0f} times as much"
    )
    if size.total > free:
        print("this may not fit: free some disk, shorten the plan, or set data.cache: false")
    started = time.monotonic()
    with stages(Console()) as show:
        made = answer(
            plan, cfg.data, target, minutes, lambda done, total: show("responses", done, total)
        )
    print(f"{made} tokens, {made / (time.monotonic() - started):.0f} tokens/s")
    print(f"{len(plan.writer.done)} responses in {cfg.data.store}")


def _report_skipped(store: Path, reasons: Sequence[str]) -> None:
    """Print the first reasons why prompts were skipped; write all into a file next to the store."""
    from sglang_dspark.training.files import write_lines

    file = store.with_name(f"{store.name}.skipped.txt")
    file.unlink(missing_ok=True)  # of an earlier run
    for reason in reasons[:_REASONS_SHOWN]:
        print(f"skipped: {reason}")
    if not reasons:
        return
    where = ""
    if len(reasons) > _REASONS_SHOWN:
        write_lines(file, reasons)
        where = f", all reasons in {file}"
    print(f"{len(reasons)} prompts skipped{where}; --strict stops at the first broken row")


def _train(cfg: RunConfig) -> World:
    """Train the drafter; return this process's place among the training ones, which it has left."""
    from sglang_dspark.loadtest.results import commit
    from sglang_dspark.training.curves import Curves
    from sglang_dspark.training.distributed import World
    from sglang_dspark.training.journal import Journal
    from sglang_dspark.training.setup import prepare

    cfg = _started(cfg)
    world = World.join(cfg.schedule.device)
    trainer, note = prepare(cfg, world=world, commit=commit())
    if not world.leads:
        trainer.run(lambda *_: None)
        world.leave()
        return world
    print(note)
    console, first, started = Console(), trainer.step, time.monotonic()
    with (
        Journal(cfg.run_dir / "metrics.jsonl", trainer.step) as journal,
        Curves(cfg.curves, trainer.step) as curves,
        stages(console) as show,
    ):

        def report(step: int, means: dict[str, float]) -> None:
            journal.write(step, means)
            curves.write(step, means)
            left = (time.monotonic() - started) / (step - first) * (cfg.schedule.steps - step)
            shown = " ".join(f"{name} {means[name]:.3f}" for name in _SHOWN if name in means)
            console.print(f"step {step}: {shown}, {left / 60:.0f} min left", highlight=False)
            show("training", step, cfg.schedule.steps)

        trainer.run(report)
    world.leave()
    print(f"drafter in {cfg.run_dir / 'drafter'}")
    return world


def _calibrate(cfg: RunConfig) -> None:
    """Fit the confidence temperatures in a separate process, because it is another command."""
    from sglang_dspark.models.identity import target_sha256 as weights_sha256

    path = cfg.run_dir / "drafter"
    if find_spec("sglang_dspark.cli.calibrate") is None or cfg.drafter.kind not in (
        "dspark",
        "moe",
    ):
        return
    sts = path / "sts.json"
    if _made_for(weights_sha256(path), sts):
        print(f"calibrated already: {sts}")
        return
    c = cfg.calibration
    command = [sys.executable, "-m", "sglang_dspark.cli.main", "calibrate"]
    command += ["--target", str(cfg.data.target), "--drafter", str(path)]
    command += ["--max-new-tokens", str(c.max_new_tokens), "--batch", str(cfg.data.rows)]
    command += [] if c.limit is None else ["--limit", str(c.limit)]
    command += ["--half-products"] if cfg.data.half_products else []
    for prompts in c.prompts:
        command += ["--prompts", prompts]
    for prompts in c.held_out:
        command += ["--held-out", prompts]
    status = subprocess.run(command, check=False).returncode
    if status:
        raise typer.Exit(status)


def _made_for(drafter_sha256: str, file: Path) -> bool:
    """Return whether a file exists and names the drafter with these weights."""
    from sglang_dspark.common.files import load_json, reading

    if not file.exists():
        return False
    with reading(file, "record of a drafter", "delete it and it is made again"):
        return bool(load_json(file)["drafter_sha256"] == drafter_sha256)


def _serve(cfg: RunConfig) -> None:
    """Serve the drafter, check that greedy answers are the target's own, print how to serve it."""
    from sglang_dspark.cli._served_check import as_json, serve_and_check
    from sglang_dspark.models.identity import target_sha256 as weights_sha256
    from sglang_dspark.training.files import write_json

    if not cfg.serving.check:
        return
    drafter, record = cfg.run_dir / "drafter", cfg.run_dir / "served.json"
    sha256 = weights_sha256(drafter)
    if _made_for(sha256, record):
        print(f"served already: {record}")
        return
    s = cfg.serving
    check = serve_and_check(
        Console(),
        cfg.data.target,
        drafter,
        port=s.port,
        per_domain=s.per_domain,
        max_new_tokens=s.max_new_tokens,
        run_dir=cfg.run_dir / "server",
    )
    write_json(record, as_json(check, sha256))
    print(
        f"served: tau {check.tau:.2f}, {check.tokens_per_s:.1f} tokens/s for one user; "
        f"{check.equal} of {check.prompts} greedy answers are the target's own"
        + (f", {check.near_ties} part from it at a near tie" if check.near_ties else "")
    )
