"""Installs CUDA's seams where our CPU platform serves, without what only makes a CPU fast.

Replaced is the device alone: events by a clock that is planted (each pass and draft moves it by a
cost known to the test), pinned copies by copies. DSPARK_REHEARSAL names a folder: each planned step
and each verify pass is a line of steps.jsonl there. DSPARK_REHEARSAL_GRAPHS=1: passes replay
captured graphs (`graphs.py`). DSPARK_REHEARSAL_LATENT=1: DeepSeek-V4's kernels are torch
(`latent.py`). DSPARK_REHEARSAL_FAIL names a step whose plan fails, DSPARK_REHEARSAL_FAULT a file
that names a fault of the KV cache (`kv_faults.py`). DSPARK_REHEARSAL_COINS=1: a step's random
numbers follow from its lengths alone. Of several ranks those behind the first one write to
RANK.jsonl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.rehearsal import chains, experts, graphs, kv_faults, latent, reads, recurrent

GAMMA = 5
TIER = GAMMA + 1  # tokens: what a captured graph of one more request adds
# Modules that replace operators which a CPU lacks; the other ones of `cpu` make it faster.
NEEDED = ("arguments", "delta_rule", "gpu_assumptions", "models")


def pass_seconds(tokens: int) -> float:
    """Return the planted time of a pass: a staircase (DSPARK_REHEARSAL_STAIR: a steeper one)."""
    return 20e-3 + float(os.environ.get("DSPARK_REHEARSAL_STAIR", "3e-3")) * -(-tokens // TIER)


def draft_seconds(requests: int) -> float:
    """Return the planted time of a draft block; DSPARK_REHEARSAL_DRAFT: a slower one."""
    return float(os.environ.get("DSPARK_REHEARSAL_DRAFT", "3e-3")) + 0.1e-3 * requests


@dataclass
class PlantedClock:
    """The time that the planted world has taken."""

    now: float = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def lead(self) -> None:
        """Do nothing: planted time belongs to no device."""


def install_rehearsal() -> None:
    """In place of `plugin._install`."""
    from sglang_dspark import plugin
    from sglang_dspark.backends.cpu import platform
    from sglang_dspark.backends.moe import moe_config
    from sglang_dspark.patches import patch_modules, registry
    from sglang_dspark.serving.config import load_config
    from tests.kernels.interpreter import patch_language_once

    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_language_once()

    load_config()
    moe_config.register()
    seams = []
    for name in patch_modules():
        folder, _, module = name.partition(".")
        if folder != "cpu" or module in NEEDED:
            seams += _seams_of(name)
    if os.environ.get("DSPARK_REHEARSAL_GRAPHS") == "1":
        graphs.install()
        seams += graphs.SEAMS
    seams += [experts.SEAM, recurrent.CONVOLUTION, recurrent.STATES, *chains.SEAMS]
    if os.environ.get("DSPARK_REHEARSAL_LATENT") == "1":
        latent.install()
    if "DSPARK_REHEARSAL_FAULT" in os.environ:
        kv_faults.install()
    registry.install(seams)
    plugin._verify_after_apply()
    # The platform knows one backend of the draft; here its Triton kernels may be interpreted.
    platform.DsparkCpuPlatform.supports_speculative_draft_attention_backend = (  # type: ignore[method-assign]
        lambda self, algorithm, backend: True
    )
    _plant()


def _seams_of(module: str) -> tuple[Any, ...]:
    import importlib

    found: tuple[Any, ...] = importlib.import_module(f"sglang_dspark.patches.{module}").SEAMS
    if module == "cpu.models":  # without its fast paths, which an accelerator has not
        return tuple(replace(seam, hook=partial(seam.hook, fast=False)) for seam in found)
    return found


def _plant() -> None:
    """The planted clock in place of events, from the moment a worker is taken over."""
    from sglang_dspark.backends.cuda import attach
    from sglang_dspark.patches.step import chain_drafters
    from sglang_dspark.patches.step import worker as patched

    take_over = attach.take_over

    def planted(worker: Any, clock: Any) -> Any:
        world = PlantedClock()
        _moves(worker, world)
        state = take_over(worker, world)
        _record(worker, state)
        return state

    for module in (patched, chain_drafters):
        module.active_device = lambda: "cuda"  # type: ignore[attr-defined]
    attach.take_over = planted
    attach.EventClock = PlantedClock  # type: ignore[misc,assignment]


def _moves(worker: Any, world: PlantedClock) -> None:
    """Passes and drafts of this worker take planted time.

    Each rank has a clock of its own, and behind the first one drafts never pay.
    """
    target, proposer = worker.target_worker, worker._proposer
    slowdown = 1.0 if rank_here() == 0 else 50.0
    forward, propose = target.forward_batch_generation, proposer.propose

    def passes(*args: Any, **options: Any) -> Any:
        batch = options.get("forward_batch")
        if options.get("is_verify") and batch is not None:
            world.now += pass_seconds(len(batch.input_ids))
        return forward(*args, **options)

    def drafts(**options: Any) -> Any:
        world.now += slowdown * draft_seconds(options["bs"])
        return propose(**options)

    target.forward_batch_generation, proposer.propose = passes, drafts


def _record(worker: Any, state: Any) -> None:
    """Record the inputs of each step's plan, and the step's outcome."""
    rank = rank_here()
    path = Path(os.environ["DSPARK_REHEARSAL"]) / ("steps.jsonl" if not rank else f"{rank}.jsonl")
    if state.ranks.leads:
        _record_plans(state.engine, path)
    _record_passes(path)
    if os.environ.get("DSPARK_REHEARSAL_COINS") == "1":
        _plant_coins()
    _record_reads(path)
    _record_context(worker, path.with_suffix(".safetensors"))


def rank_here() -> int:
    """Among those of a tensor-parallel server."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def _record_plans(engine: Any, path: Path) -> None:
    """Write down what each step knew when it was planned."""
    table = engine.planner.costs.table
    with path.open("a") as file:
        print(json.dumps({"knots": table.knots, "seconds": table.seconds}), file=file)
    begin: Callable[..., Any] = engine.begin
    landed: Callable[..., None] = engine.landed
    last = {"landed": -1}

    def begun(*args: Any, **options: Any) -> Any:
        step = begin(*args, **options)
        if str(step.plan.step) == os.environ.get("DSPARK_REHEARSAL_FAIL"):
            raise RuntimeError("the rehearsal's leader fails")
        plan = step.plan
        said = {
            "step": plan.step,
            "requests": plan.requests,
            "drafts": plan.budget.drafts if plan.speculates else 0,
            "speculates": plan.speculates,
            "mode": plan.mode.value,
            "repeated": step.repeated,
            "last_landed": last["landed"],
        }
        with path.open("a") as file:
            print(json.dumps(said), file=file)
        return step

    def noted(step: Any, *args: Any) -> None:
        last["landed"] = step.plan.step
        landed(step, *args)

    engine.begin, engine.landed = begun, noted


def _plant_coins() -> None:
    """Seed the generators of a step by its lengths, and the one that draws an answer's first token,
    behind its prefill, by a constant."""
    from sglang.srt.layers.sampler import Sampler

    from sglang_dspark.step import decode

    launch: Callable[..., Any] = decode.decode
    sample = Sampler.forward

    def sampled(*args: Any, **options: Any) -> Any:
        torch.manual_seed(1)
        return sample(*args, **options)

    def launched(state: Any, batch: Any, *rest: Any) -> Any:
        seed = int(batch.seq_lens.sum())
        torch.manual_seed(seed)
        state.worker._proposer.noise.offset.fill_(seed)  # of SGLang's draft noise, a counter
        return launch(state, batch, *rest)

    Sampler.forward, decode.decode = sampled, launched


def _record_reads(path: Path) -> None:
    """Write down what each step's launch read back to the host."""
    from sglang_dspark.step import decode

    launch: Callable[..., Any] = decode.decode

    def launched(state: Any, batch: Any, *rest: Any) -> Any:
        with reads.watched() as seen:
            result = launch(state, batch, *rest)
        with path.open("a") as file:
            print(json.dumps({"launched": len(batch.seq_lens), "reads": seen}), file=file)
        return result

    decode.decode = launched


def _record_context(worker: Any, path: Path) -> None:
    """Keep what the draft's cache holds of a request that is alone, as a step finds it."""
    from sglang_dspark.step import decode

    launch: Callable[..., Any] = decode.decode
    table = worker.model_runner.req_to_token_pool.req_to_token
    pool = worker.draft_model_runner.token_to_kv_pool

    def launched(state: Any, batch: Any, *rest: Any) -> Any:
        if len(batch.seq_lens) == 1:
            row, length = int(batch.req_pool_indices[0]), int(batch.seq_lens[0])
            slots = table[row, :length].long()
            partial = path.with_suffix(".tmp")
            save_file(_context_rows(pool, slots), partial)
            partial.replace(path)
        return launch(state, batch, *rest)

    decode.decode = launched


def _context_rows(pool: Any, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a draft's cache holds at these slots, by layer."""
    if not hasattr(pool, "k_buffer"):
        return {"rows": latent.context_rows(pool, slots)}
    return {
        "keys": torch.stack([buffer[slots] for buffer in pool.k_buffer]),
        "values": torch.stack([buffer[slots] for buffer in pool.v_buffer]),
    }


def _record_passes(path: Path) -> None:
    """Write down the size of each verify pass, and what of the step a graph did."""
    from sglang_dspark.step import verify

    run: Callable[..., Any] = verify.verify
    launched = _launches_of_operators()
    for sizes in graphs.REPLAYS.values():
        sizes.clear()  # those of the profile

    def passed(device: Any, asked: Any, grammar: Any) -> Any:
        done, layout = run(device, asked, grammar), asked.layout
        said = {
            "pass": len(layout.verify_lens),
            "verified": int(layout.verify_lens.sum()) - len(layout.verify_lens),
            "lengths": (layout.verify_lens - 1).tolist(),
            "tokens": layout.graph_num_tokens,
            "replayed": graphs.REPLAYS[False],
            "drafts_replayed": graphs.REPLAYS[True],
            "folded": done.folded,
            "operators": launched,  # since the last pass
        }
        with path.open("a") as file:
            print(json.dumps(said), file=file)
        for noted in (*graphs.REPLAYS.values(), launched):
            noted.clear()
        return done

    verify.verify = passed


def _launches_of_operators() -> list[str]:
    """A list that the names of our operators come to as they are launched, here interpreted."""
    from sglang_dspark.backends.cuda import (
        accept,
        commit,
        device,
        draft,
        graph_epilogue,
    )
    from sglang_dspark.patches.cuda import triton_attention

    launched: list[str] = []
    for module, name in (
        (draft, "markov_triton"),
        (device, "admit_triton"),
        (accept, "accept_triton"),
        (accept, "accept_block_triton"),
        (accept, "accept_listed_triton"),
        (graph_epilogue, "accept_greedy_triton"),
        (commit, "write_triton"),
        (triton_attention, "attend_triton"),
    ):
        operator = getattr(module, name)

        def noted(*args: Any, _name: str = name, _launch: Any = operator, **options: Any) -> Any:
            launched.append(_name)
            return _launch(*args, **options)

        setattr(module, name, noted)
    return launched
