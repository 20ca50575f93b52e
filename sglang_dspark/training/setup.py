"""Prepare a training run: store, target weights, learner, and the state to resume."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from sglang_dspark.common.files import load_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.learning.learner import Ingredients
from sglang_dspark.families.registry import build_learner
from sglang_dspark.models.identity import target_sha256, tokenizer_sha256
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.distributed import World
from sglang_dspark.training.draft_vocabulary import draft_vocabulary, token_counts, vocabulary_of
from sglang_dspark.training.files import write_json
from sglang_dspark.training.packing import anchor_positions
from sglang_dspark.training.plan import prompt_token_counts
from sglang_dspark.training.provenance import environment
from sglang_dspark.training.sampler import Draw, Sampler, usable
from sglang_dspark.training.state import check_state
from sglang_dspark.training.states import ComputedStates, StateSource, StoredStates
from sglang_dspark.training.store import StoreReader, check_meta, subset
from sglang_dspark.training.trainer import Trainer

# The draft vocabulary is counted over answers and prompts: drafts are parts of answers, but there
# are few answers if training starts during data generation.
ANSWER_WEIGHT = 8


def prepare(cfg: RunConfig, *, world: World | None = None, commit: str = "") -> tuple[Trainer, str]:
    """Return a trainer ready to run (resumed if the run directory has a state) and a line about it.

    commit: of the code, for the run directory. Raises DSparkError if store, target and config do
    not belong together.
    """
    world = world or World.join(cfg.schedule.device)
    torch.set_num_threads(cfg.schedule.threads)
    torch.manual_seed(cfg.schedule.seed)
    reader, expected = _open_store(cfg)
    done = check_state(cfg, reader)
    half = cfg.schedule.half_products or world.device.type == "cuda"
    target = _target(cfg, world)
    counts, pairs = token_counts(reader, target.config.vocab_size)
    vocabulary = _vocabulary(cfg, counts, world, fresh=done is None)
    learner = build_learner(
        Ingredients(
            shape=cfg.drafter,
            objective=cfg.objective,
            target_dir=cfg.data.target,
            target=target.config,
            embed_weight=target.embed_weight.detach().float().to(world.device),
            head_weight=target.head_weight.detach().float().to(world.device),
            vocabulary=None if vocabulary is None else vocabulary.to(world.device),
            counts=counts,
            pairs=pairs,
            half=half,
            fresh=done is None,
        )
    )
    source: StateSource = StoredStates(reader) if cfg.data.cache else ComputedStates(reader, target)
    sampler = Sampler(reader, cfg.schedule.held_out_every, cfg.schedule.seed, world)
    held_out = _held_out(cfg, reader)
    trainer = Trainer(cfg, learner, sampler, source, world=world, half=half, held_out=held_out)
    note = _note(len(reader), counts, vocabulary)
    if trainer.resume():
        note = f"going on from step {trainer.step}"
    if world.leads:
        write_json(cfg.run_dir / "run.json", _record(cfg, expected, len(reader), commit, world))
    return trainer, note


def _open_store(cfg: RunConfig) -> tuple[StoreReader, dict[str, object]]:
    """Open the store, if it belongs to the target; also return the fields that were checked."""
    expected: dict[str, object] = {
        "target_sha256": target_sha256(cfg.data.target),
        "tokenizer_sha256": tokenizer_sha256(cfg.data.target),
        "answers": cfg.data.answers,
    }
    if cfg.data.cache:
        expected |= {"layer_ids": list(cfg.drafter.target_layer_ids), "cached": True}
    check_meta(cfg.data.store, expected)
    reader = StoreReader(cfg.data.store)
    kept, _ = subset(reader.rows, cfg.schedule.held_out_every)
    if not kept:
        raise DSparkError(f"{cfg.data.store} holds too few sequences to train on")
    try:
        cfg.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DSparkError(f"cannot make run_dir {cfg.run_dir}: {error.strerror}") from None
    return reader, expected


def _target(cfg: RunConfig, world: World) -> TargetModel:
    """Load the target; it computes only if states are not stored, then on the device."""
    if cfg.data.cache:
        return TargetModel.load(cfg.data.target)
    return TargetModel.load(
        cfg.data.target,
        cfg.drafter.target_layer_ids,
        half_products=cfg.data.half_products,
        device=world.device,
    )


def _vocabulary(cfg: RunConfig, counts: Tensor, world: World, *, fresh: bool) -> Tensor | None:
    """Return ids of the reduced draft vocabulary, saved in the run directory next to the state.

    fresh: there is no state yet, so they are chosen again, even if an earlier run left a file.
    """
    size, wanted = len(counts), cfg.drafter.draft_vocab
    if wanted is None or wanted >= size:
        return None
    file = cfg.run_dir / "vocabulary.json"
    if world.leads and (fresh or not file.exists()):
        start = getattr(cfg.drafter, "start_from", None)
        if start is not None:
            ids = vocabulary_of(start, wanted, size)
        else:
            wide = ANSWER_WEIGHT * counts + prompt_token_counts(cfg.data, size)
            ids, _ = draft_vocabulary(wide, wanted)
        write_json(file, ids.tolist())
    world.wait()
    with reading(file, "draft vocabulary", "delete it and it is chosen again"):
        return torch.tensor(load_json(file), dtype=torch.int64)


def _held_out(cfg: RunConfig, reader: StoreReader) -> list[Draw]:
    """Return sequences never trained on, with anchors that are the same in every run."""
    s = cfg.schedule
    generator = torch.Generator().manual_seed(s.seed + 1)
    _, held = subset(reader.rows, s.held_out_every)
    chosen = [i for i in held if usable(reader, i)][: s.validation_sequences]
    return [
        Draw(i, anchor_positions(reader.answers(i), s.anchors_per_sequence, generator))
        for i in chosen
    ]


def _note(sequences: int, counts: Tensor, vocabulary: Tensor | None) -> str:
    covered = counts.sum() if vocabulary is None else counts[vocabulary].sum()
    return (
        f"{sequences} sequences, {int(counts.sum())} answer tokens; draft vocabulary covers "
        f"{100 * float(covered / counts.sum()):.2f}% of them"
    )


def _record(
    cfg: RunConfig, expected: dict[str, object], sequences: int, commit: str, world: World
) -> dict[str, object]:
    """Return the content of `run.json`: how a drafter was made."""
    return {
        "argv": sys.argv,
        "commit": commit,
        "config": json.loads(cfg.model_dump_json()),
        "sequences": sequences,
        "processes": world.size,
        "device": str(world.device),
        "environment": environment(),
        **expected,
    }
