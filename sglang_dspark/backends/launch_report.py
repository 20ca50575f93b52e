"""Report for `dspark doctor --serve` how a server with given arguments would start.

SGLang itself resolves the arguments, with our patches in place, so its checks and ours
(drafter_check.py, cuda/features.py) decide as at a start. No weight is read: sizes are those of the
files' headers. Facts that only a start can show are reported as unknown.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.backends import drafter_check
from sglang_dspark.backends.cpu import csrc, jit
from sglang_dspark.backends.cpu.boot import ATTENTION_BACKEND
from sglang_dspark.drafter.config import OTHER_ARCHITECTURES, architecture_of, read_config
from sglang_dspark.drafter.config import DrafterConfig as Drafter
from sglang_dspark.drafter.weight_files import stored_tensors
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.chain.served import chain_gamma, is_chain
from sglang_dspark.models.resolve import offline_if_unreachable
from sglang_dspark.schedule import compiled
from sglang_dspark.serving import mode, on_demand, startup, upstream

MIB = 1 << 20
HUB_S = 3.0  # limit of a connection to the Hub
_ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}  # others: one byte
_FLOATS = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_STARTERS = ("python", "python3", "-m", "sglang.launch_server", "sglang", "serve")
_OF_HUB = "https://huggingface.co"  # in errors about a name that is not a folder
_NO_STEP = (  # variables with which our step does not serve on a CPU (step/build.py)
    "SGLANG_SIMULATE_ACC_LEN",
    "SGLANG_DSPARK_DEFER_CONTEXT_KV",
    "SGLANG_OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE",
)


@dataclass
class LaunchReport:
    """scheduled: whether the server would schedule by confidence. verdict: the same in one line.

    facts: known before the start, by name.
    """

    scheduled: bool = False
    verdict: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"scheduled": self.scheduled, "verdict": self.verdict, "facts": self.facts}


class _NotStartingError(Exception):
    """The server would not start."""


class _NotScheduledError(Exception):
    """The server would start without scheduling."""


def report_launch(line: str, *, complete: bool = False) -> LaunchReport:
    """Examine an argument line of `sglang.launch_server`, with or without the command itself.

    Loads SGLang's plugins into this process; leaves the environment unchanged. complete: install
    all patches, which imports the modules of a server; else only those of modules in use.
    """
    report, before = LaunchReport(), dict(os.environ)
    try:
        with (
            contextlib.nullcontext() if complete else on_demand.examination(),
            contextlib.ExitStack() as ends,
        ):
            _examine(_arguments(line), report, ends)
        report.scheduled, report.verdict = True, "starts, and is scheduled by confidence"
    except _NotScheduledError as reason:
        report.verdict = f"starts, but is not scheduled: {reason}"
    except (_NotStartingError, DSparkError) as reason:
        report.verdict = f"does not start: {reason}"
    finally:
        os.environ.clear()
        os.environ.update(before)
    return report


def _arguments(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise _NotStartingError(f"the argument line cannot be split: {error}") from error
    while words and words[0] in _STARTERS:
        words = words[1:]
    if words and not words[0].startswith("-"):  # `sglang serve TARGET`
        words = ["--model-path", *words]
    return words


def _examine(words: Sequence[str], report: LaunchReport, ends: contextlib.ExitStack) -> None:
    """Fill the report's facts. Raises the verdict, unless the server is scheduled.

    ends: closed after the examination.
    """
    off = startup.switched_off()
    if off is not None:
        raise _NotScheduledError(f"sglang-dspark is switched off: {off}")
    with _refusals():
        upstream.load_plugins()
        record = upstream.prepare_server_args(list(words))
    device = str(record.device or startup.active_device())
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise _NotStartingError("--device cuda, and torch finds no CUDA device on this machine")
    names = (record.model_path, record.speculative_draft_model_path, record.tokenizer_path)
    # os.path: Path.exists raises for a name that is too long for a path.
    if any(name is not None and not os.path.exists(name) for name in names):
        ends.enter_context(offline_if_unreachable(HUB_S))
    with _refusals():
        record.resolve_once()
    args = upstream.resolving_view(record)
    _device_facts(args, report)
    _memory_facts(record, args, report)
    algorithm = str(args.speculative_algorithm or "").upper()
    if algorithm != "DSPARK":
        said = f"is {algorithm}, which is SGLang's own" if algorithm else "is absent"
        raise _NotScheduledError(f"--speculative-algorithm {said}; ours is DSPARK")
    path = drafter_check.drafter_folder(args)
    if path is not None:
        _drafter_facts(path, args, report)
    _require_scheduled(record, args, path)


def _require_scheduled(record: Any, args: Any, path: Path | None) -> None:
    """Raise unless DSPARK is scheduled with these resolved arguments."""
    if str(args.device) == "cpu":
        _require_cpu_step(args)
    chosen = mode.choice()
    if not chosen.ours:
        raise _NotScheduledError(f"every draft is verified: {chosen.reason}")
    if path is None:
        raise _NotScheduledError("the drafter is not in a folder of its own here")
    if str(args.device) == "cpu":
        return
    why = drafter_check.obstacle(record, args)
    if why is not None:
        raise _NotScheduledError(f"every draft is verified: {why}")


def _require_cpu_step(args: Any) -> None:
    """Raise where backends/cpu/attach.py would stop the server."""
    cannot = "DSPARK cannot serve this on a CPU"
    if str(args.attention_backend) != ATTENTION_BACKEND:
        raise _NotStartingError(
            f"{cannot}: {args.attention_backend} has no windows of different lengths; remove "
            "--attention-backend"
        )
    if args.enable_dp_attention:
        raise _NotStartingError(
            f"{cannot}: ranks of data-parallel attention plan apart; remove --enable-dp-attention"
        )
    for name in _NO_STEP:
        if os.environ.get(name, "").strip().lower() not in ("", "0", "false"):
            raise _NotStartingError(f"{cannot}: {name} is set; unset it")


def _device_facts(args: Any, report: LaunchReport) -> None:
    device = str(args.device)
    report.facts["device"] = (
        torch.cuda.get_device_name() if device.startswith("cuda") else f"{device}, our platform"
    )
    draft = args.speculative_draft_attention_backend
    named = f", {draft} for the draft" if draft else ""
    report.facts["attention backend"] = f"{args.attention_backend}{named}"
    overlap = "off" if args.disable_overlap_schedule else "on"
    report.facts["overlap schedule"] = overlap
    report.facts["ranks"] = f"{args.tp_size} tensor-parallel, page size {args.page_size}"
    report.facts["kernels"] = _kernels(device)


def _kernels(device: str) -> str:
    """Return the number of compiled kernels, if it is known before the start."""
    if device != "cpu":
        return "unknown before the start: Triton compiles for the model's sizes"
    parts = []
    for folder, kept, mark in (
        (Path(compiled.__file__).parent, compiled.cache_folder(), "@compiled"),
        (Path(jit.__file__).parent, jit.cache_folder(), "@kernel"),
    ):
        text = "\n".join(file.read_text() for file in folder.glob("*.py"))
        functions = sum(line.strip() == mark for line in text.splitlines())
        cached = len({file.name.split("-")[0] for file in kept.rglob("*.nbi")})
        parts.append(f"{min(cached, functions)} of {functions} of {folder.name}/ compiled (cached)")
    why = csrc.why_not()
    return ", ".join([*parts, "C++ library compiled" if why is None else f"C++ off: {why}"])


def _memory_facts(record: Any, args: Any, report: LaunchReport) -> None:
    """Add memory by part, summed over all ranks."""
    report.facts["target weights"] = _stored(Path(str(args.model_path)))
    row = _kv_bytes(upstream.model_config_of(record), args)
    tokens = args.max_total_tokens
    report.facts["KV pool"] = f"{row} bytes a token of the target" + (
        f", {tokens} tokens: {row * tokens / MIB:.0f} MiB"
        if tokens
        else "; its tokens are fixed by the memory free at the start"
    )
    report.facts["graphs"] = (
        "none on a CPU" if str(args.device) == "cpu" else "unknown before the start"
    )


def _stored(path: Path) -> str:
    """Return the size of the weights in a folder, by the headers of its files."""
    try:
        tensors = stored_tensors(path, lambda name: name).values()
    except DSparkError:
        return "unknown: no readable safetensors files here"
    size = sum(prod(tensor.shape) * _ITEM.get(tensor.dtype, 1) for tensor in tensors)
    kinds = ", ".join(sorted({tensor.dtype for tensor in tensors}))
    return f"{size / MIB:.0f} MiB as stored ({kinds})"


def _kv_bytes(model: Any, args: Any) -> int:
    """Return the bytes of a token's keys and values in all layers of the target."""
    config = model.hf_text_config
    item = _FLOATS.get(str(args.dtype)) or int(model.dtype.itemsize)
    kind = str(args.kv_cache_dtype)
    if kind != "auto":
        item = 1 if kind.startswith("fp8") else _FLOATS.get(kind, 2)
    latent = getattr(config, "kv_lora_rank", None)
    if latent is not None:
        width = int(latent) + int(config.qk_rope_head_dim)
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = 2 * int(heads) * int(model.head_dim)
    return int(config.num_hidden_layers) * width * item


def _drafter_facts(path: Path, args: Any, report: LaunchReport) -> None:
    """Describe a drafter that has passed the start's checks (drafter_check.py)."""
    report.facts["drafter weights"] = _stored(path)
    raw = read_config(path)
    if is_chain(raw):
        gamma = args.speculative_dspark_block_size or chain_gamma(raw)
        report.facts["drafter"] = f"fits: one layer, run for each of {gamma} drafts"
        return
    if architecture_of(raw, path) in OTHER_ARCHITECTURES:
        report.facts["drafter"] = "computed by SGLang alone; its fit is not checked"
        return
    config = Drafter.from_json(raw, path, computed=raw.get("quantization_config") is None)
    gamma = args.speculative_dspark_block_size or config.gamma
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    report.facts["drafter"] = (
        f"fits: hidden size {config.hidden_size}, vocabulary {config.vocab_size}, reads layers "
        f"{list(config.target_layer_ids)}, drafts {gamma} of {config.gamma} positions, mask token "
        f"{config.mask_token_id}{_token(Path(str(args.tokenizer_path)), config.mask_token_id)}, "
        f"{'a' if config.confidence_head else 'no'} confidence head; {row} values of K and V a "
        "token"
    )


def _token(folder: Path, number: int) -> str:
    """Return a token's text in quotes, by the target's tokenizer.json; "" without the file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return ""
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(file)).id_to_token(number)
    return f" {text!r}" if text is not None else " (not a token of the tokenizer)"


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise the error by which SGLang, a plugin or our check ends a start, as one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except SystemExit as error:
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        marked = [line for line in lines if ": error: " in line or "sglang-dspark: " in line]
        last = (marked or lines or [f"it ends with status {error.code}"])[-1]
        reason = last.removeprefix("sglang-dspark: ").removeprefix("sglang serve: error: ")
        raise _NotStartingError(reason) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        advice = "; fetch the model (hf download) or name a folder" if _OF_HUB in str(error) else ""
        raise _NotStartingError(
            f"SGLang refuses ({type(error).__name__}: {reason}){advice}"
        ) from error
