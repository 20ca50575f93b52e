"""Resolve models, prompts and settings that the measuring commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from sglang_dspark.errors import DSparkError
from sglang_dspark.models.drafters import find_drafter, shipped_drafter_path
from sglang_dspark.models.resolve import model_name, resolve

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.evaluation.engine import DecodeSettings
    from sglang_dspark.evaluation.prompts import EvalPrompt
    from sglang_dspark.evaluation.recording import Workload
    from sglang_dspark.evaluation.traces import Trace

TOP_K_ALL = 1 << 30

TargetOption = Annotated[
    str,
    typer.Option(
        help="Target: a folder, a Hugging Face id as OWNER/NAME[@REVISION], or `demo` for the demo "
        "target."
    ),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        help="Drafter: a folder, a Hugging Face id as OWNER/NAME[@REVISION], or `shipped` for the "
        "demo target's."
    ),
]
DraftersOption = Annotated[
    list[str],
    typer.Option(
        "--drafter",
        help="LABEL=PATH[@GAMMA]; PATH is a drafter's folder, its Hugging Face id, `shipped`, or a "
        "trace of `dspark eval record`. Repeat for several.",
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Result file. Default: results/drafters_NAME.json.")
]


def chosen(option: str, text: str, known: Collection[str]) -> list[str]:
    """Return the names of a comma-separated option. Raises DSparkError if one is unknown."""
    names = [each.strip() for each in text.split(",")]
    if wrong := set(names) - set(known):
        raise DSparkError(f"{option} {', '.join(sorted(wrong))}: choose of {', '.join(known)}")
    return names


SAMPLING = ("top_p", "top_k", "min_p")  # of `WorkloadOptions`: fields that few commands offer


@dataclass(frozen=True)
class WorkloadOptions:
    """Workload and settings of decoding, from a command's options."""

    target: TargetOption = "demo"
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="File of prompts as [DOMAIN=]FILE; repeat for several. Default: the "
            "package's own 192."
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per domain at most.")] = None
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Output tokens per prompt.")] = 96
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Nucleus mass, in (0, 1].")] = 1.0
    top_k: Annotated[int, typer.Option(help="Most likely tokens kept; default all.")] = TOP_K_ALL
    min_p: Annotated[float, typer.Option(help="Cut relative to the likeliest token.")] = 0.0
    batch: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8
    seed: Annotated[int, typer.Option(help="Of the engine's random numbers.")] = 0

    def decoding(self, gamma: int | None = None) -> DecodeSettings:
        """Make settings of the reference engine. Raises DSparkError for a value out of bounds."""
        from sglang_dspark.evaluation.engine import DecodeSettings

        return DecodeSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            batch=self.batch,
            gamma=gamma,
            seed=self.seed,
        )


def takes_workload(
    *, without: Collection[str] = SAMPLING, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `options: WorkloadOptions` by one option for each field.

    without: fields that the command does not offer, which keep their default. defaults: of fields,
    if the command has others. Typer reads a command's signature, so the decorator changes that:
    the fields replace `options`, by keyword.
    """
    base = replace(WorkloadOptions(), **defaults)
    hints = get_type_hints(WorkloadOptions, include_extras=True)
    offered = {
        name: field.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[name],
            default=getattr(base, name),
        )
        for name, field in inspect.signature(WorkloadOptions).parameters.items()
        if name not in without
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in offered}
            command(**given, options=replace(base, **chosen))

        call.__signature__ = _with_options(command, offered)  # type: ignore[attr-defined]
        return call

    return decorate


def _with_options(
    command: Callable[..., None], offered: dict[str, inspect.Parameter]
) -> inspect.Signature:
    """Return the command's signature, keyword-only, with `offered` in place of `options`."""
    parameters: list[inspect.Parameter] = []
    for name, own in inspect.signature(command, eval_str=True).parameters.items():
        if name == "options":
            parameters += offered.values()
        else:
            parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return inspect.Signature(parameters)


def given(context: typer.Context, names: Collection[str]) -> list[str]:
    """Return the options, of the parameters `names`, that the command line gives."""
    sources = {name: context.get_parameter_source(name) for name in names}
    said = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    return [each.opts[0] for each in context.command.params if each.name in said]


@dataclass(frozen=True)
class DrafterArgument:
    """One `--drafter`: its label, a directory or trace file, and gamma if it was named."""

    label: str
    path: Path
    gamma: int | None

    @property
    def is_trace(self) -> bool:
        """Return whether the path is a file, which must then be a trace."""
        return self.path.is_file()


def parse_drafter(argument: str) -> DrafterArgument:
    """Parse `LABEL=PATH[@GAMMA]`, or `PATH[@GAMMA]`, whose label is its last part.

    A number behind the last @ is gamma; OWNER/NAME@REVISION@GAMMA names both.
    """
    label, separator, place = argument.partition("=")
    if not separator:
        label, place = "", argument
    head, at, tail = place.rpartition("@")
    gamma = int(tail) if at and tail.isdigit() else None
    name = head if gamma is not None else place
    path = Path(name) if Path(name).is_file() else drafter_dir(name)
    if not label:
        label = path.resolve().stem if Path(name).exists() else model_name(path)
    return DrafterArgument(label, path, gamma)


def target_dir(target: str, console: Console) -> Path:
    """Return the target's directory, from a folder or Hugging Face id; build `demo` if needed."""
    if target != "demo":
        path = resolve(target)
        if not (path / "config.json").is_file():
            raise DSparkError(f"no model at {target}: expected a directory with config.json")
        return path
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.models.demo import ensure_demo_target

    with stages(console) as progress:
        return ensure_demo_target(progress=progress)


def drafter_dir(drafter: str) -> Path:
    """Return the drafter's directory, from a folder or id; `shipped` is the demo target's."""
    return shipped_drafter_path() if drafter == "shipped" else find_drafter(drafter)


def open_tokenizer(target: Path) -> Any:
    """Load the target's tokenizer. Raises DSparkError if it does not load."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(target))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DSparkError(f"{target} has no usable tokenizer: {reason}") from None


def read_prompt_files(
    files: Sequence[str] | None,
    prompt_field: str | None,
    default: Callable[[], list[EvalPrompt]] | None = None,
) -> list[EvalPrompt]:
    """Read the prompts of all `[DOMAIN=]FILE` arguments; without any, `default` or the demo's."""
    from sglang_dspark.evaluation.prompts import demo_prompts, read_prompts

    if not files:
        return (default or demo_prompts)()
    found: list[EvalPrompt] = []
    for argument in files:
        domain, separator, name = argument.partition("=")
        if not separator or Path(argument).exists():
            domain, name = "", argument
        found += read_prompts(Path(name), domain=domain or None, prompt_field=prompt_field)
    return found


def open_workload(
    options: WorkloadOptions,
    console: Console,
    default: Callable[[], list[EvalPrompt]] | None = None,
) -> Workload:
    """Open target and prompts of a measurement; by default the package's evaluation prompts."""
    from transformers.utils import logging as transformers_logging

    from sglang_dspark.evaluation import prompts as prompt_files
    from sglang_dspark.evaluation.recording import Workload
    from sglang_dspark.models.identity import target_sha256

    transformers_logging.disable_progress_bar()
    settings = options.decoding()
    path = target_dir(options.target, console)
    tokenizer = open_tokenizer(path)
    found = read_prompt_files(options.prompts, None, default or prompt_files.evaluation_prompts)
    chosen = prompt_files.limit_per_domain(found, options.limit)
    return Workload(
        target=path,
        target_sha256=target_sha256(path),
        prompts=tuple(chosen),
        ids=tuple(tuple(prompt_files.encode(tokenizer, prompt)) for prompt in chosen),
        settings=replace(settings, stop_ids=prompt_files.stop_token_ids(path, tokenizer)),
    )


def trace_of(
    argument: DrafterArgument, workload: Callable[[], Workload], console: Console
) -> Trace:
    """Return the trace that an argument names, or a new one; open `workload` only if needed."""
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.evaluation.recording import record
    from sglang_dspark.evaluation.traces import read_trace

    if argument.is_trace:
        return read_trace(argument.path)
    work = workload()
    work = replace(work, settings=replace(work.settings, gamma=argument.gamma))
    with stages(console) as progress:
        count = counter(progress, f"decoding with {argument.label}", len(work.ids))
        return record(work, argument.path, count)


def counter(progress: Any, stage: str, total: int) -> Any:
    """Return a function to call once for each finished prompt."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        progress(stage, done, total)

    progress(stage, 0, total)
    return count


def device_description() -> str:
    """Return the device's name for result files: the GPU's, or this machine's CPU."""
    import torch

    from sglang_dspark.common.machine import cpu_description

    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_description()
