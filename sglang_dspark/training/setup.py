"""Everything a training run needs before its first step: store, target weights, drafter, start."""

from __future__ import annotations

import json
import os
import platform
import sys

import torch

from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.batches import Sampler
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.initial import (
    draft_vocabulary,
    drafter_config,
    initialise,
    token_counts,
)
from sglang_dspark.training.plan import prompt_token_counts
from sglang_dspark.training.provenance import target_sha256
from sglang_dspark.training.store import StoreReader, check_meta, subset, write_json
from sglang_dspark.training.trainer import Trainer

# The draft vocabulary is counted over answers and prompts: answers are what is drafted, but there
# are few of them when training starts beside data generation.
ANSWER_WEIGHT = 8


def prepare(cfg: RunConfig) -> tuple[Trainer, str]:
    """A trainer ready to run (resumed when the run directory has a state) and one line about it.

    Raises DSparkError when store, target and config do not belong together.
    """
    torch.set_num_threads(cfg.schedule.threads)
    torch.manual_seed(cfg.schedule.seed)
    expected: dict[str, object] = {
        "target_sha256": target_sha256(cfg.data.target),
        "layer_ids": list(cfg.drafter.target_layer_ids),
    }
    check_meta(cfg.data.store, expected)
    reader = StoreReader(cfg.data.store)
    kept, _ = subset(reader.rows, cfg.schedule.held_out_every)
    if not kept:
        raise DSparkError(f"{cfg.data.store} holds too few sequences to train on")
    target = TargetModel.load(cfg.data.target)
    drafter = DSparkDrafter(drafter_config(cfg.drafter, target.config))
    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    note = _start(cfg, drafter, reader)
    drafter.attach(target.embed_weight, target.head_weight)
    trainer = Trainer(cfg, drafter, Sampler(reader, cfg.schedule.held_out_every, cfg.schedule.seed))
    if trainer.resume():
        note = f"going on from step {trainer.step}"
    write_json(cfg.run_dir / "run.json", _provenance(cfg, expected, len(kept)))
    return trainer, note


def _start(cfg: RunConfig, drafter: DSparkDrafter, reader: StoreReader) -> str:
    """Initial weights; the draft vocabulary is chosen once and kept in the run directory."""
    size = drafter.config.vocab_size
    counts, pairs = token_counts(reader, size)
    ids, coverage = None, 1.0
    file = cfg.run_dir / "vocabulary.json"
    if cfg.drafter.draft_vocab is not None and cfg.drafter.draft_vocab < size:
        if file.exists():
            ids = torch.tensor(json.loads(file.read_text()))
            coverage = float(counts[ids].sum() / counts.sum())
        else:
            wide = ANSWER_WEIGHT * counts + prompt_token_counts(cfg.data, size)
            ids, _ = draft_vocabulary(wide, cfg.drafter.draft_vocab)
            coverage = float(counts[ids].sum() / counts.sum())
            write_json(file, ids.tolist())
    if cfg.drafter.init_from_target:
        initialise(drafter, cfg.data.target, pairs, ids)
    return (
        f"{len(reader)} sequences, {int(counts.sum())} answer tokens; "
        f"draft vocabulary covers {100 * coverage:.2f}% of them"
    )


def _provenance(cfg: RunConfig, expected: dict[str, object], sequences: int) -> dict[str, object]:
    return {
        "argv": sys.argv,
        "config": json.loads(cfg.model_dump_json()),
        "sequences": sequences,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": cfg.schedule.threads,
        "host_isa": torch.backends.cpu.get_cpu_capability(),
        "pid": os.getpid(),
        **expected,
    }
