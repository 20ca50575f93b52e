"""Compare the throughput of our training step with that of `speculators` (PyPI), paired.

Both train the same DSpark drafter shape on the same sequences with as many anchors a step: tokens,
features and last hidden states come from one store of random answers, read as in training. A step
is data, forward pass, losses (the paper's weights), backward pass, clipping and AdamW. The
implementations differ: their attention runs over the packed length under a mask and their losses
over whole vocabulary tensors; `training/` reads token-level indices and fuses loss and gradient.

`speculators` is optional and imported only here. Each side draws anchors by its own rule.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, Qwen3Config

from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import paired_ratio
from sglang_dspark.models.identity import target_sha256, tokenizer_sha256
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.setup import prepare
from sglang_dspark.training.store import Response, StoreWriter
from sglang_dspark.training.trainer import Trainer

INSTALL = "pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0"
LAYERS = (1, 8, 15, 22, 28)
_CLIP = 1.0


@dataclass(frozen=True)
class TrainerShape:
    """Drafter that is trained, and the size of a step; the demo drafter's by default."""

    sequences: int = 6
    anchors: int = 24  # of each sequence
    prompt: int = 40  # tokens
    answer: int = 160
    gamma: int = 5
    layers: int = 3
    draft_vocab: int = 8192
    markov_rank: int = 128

    @property
    def anchors_per_step(self) -> int:
        """Return the number of blocks trained on in a step."""
        return self.sequences * self.anchors


def random_store(path: Path, target: Path, shape: TrainerShape, stored: int = 48) -> None:
    """Write answers of random tokens with random states, in the format of `dspark train data`."""
    config = AutoConfig.from_pretrained(str(target))
    rng = torch.Generator().manual_seed(0)
    meta = {
        "target_sha256": target_sha256(target),
        "tokenizer_sha256": tokenizer_sha256(target),
        "layer_ids": list(LAYERS),
    }
    writer = StoreWriter(path, meta)
    n, d = shape.prompt + shape.answer, config.hidden_size
    for i in range(stored):
        writer.add(
            Response(
                id=f"r{i}",
                domain="chat",
                temperature=0.0,
                prompt_len=shape.prompt,
                tokens=torch.randint(0, config.vocab_size, (n,), generator=rng),
                features=torch.randn(n, len(LAYERS) * d, generator=rng).bfloat16(),
                hidden=torch.randn(n, d, generator=rng).bfloat16(),
                log_partition=torch.full((n,), 12.0),
            )
        )
    writer.flush()


def our_trainer(work: Path, target: Path, shape: TrainerShape, *, half: bool) -> Trainer:
    """Make our trainer on the store in `work`, with its run directory in `work` too."""
    prompts = work / "prompts.jsonl"
    prompts.write_text('{"prompt": "random"}\n')
    raw = {
        "run_dir": work / f"run-{half}",
        "data": {"target": target, "prompts": [prompts], "store": work / "store"},
        "drafter": {
            "gamma": shape.gamma,
            "layers": shape.layers,
            "target_layer_ids": LAYERS,
            "markov_rank": shape.markov_rank,
            "draft_vocab": shape.draft_vocab,
            "mask_token_id": 3,
            "init_from_target": False,
        },
        "schedule": {
            "sequences_per_step": shape.sequences,
            "anchors_per_sequence": shape.anchors,
            "validation_sequences": 0,
            "half_products": half,
            "ema": 0.0,
            "threads": torch.get_num_threads(),
            "device": "cpu",
        },
    }
    return prepare(RunConfig.model_validate(raw))[0]


class PeerStep:
    """A training step of `speculators`' DSpark model on the sequences that `trainer` draws."""

    def __init__(self, trainer: Trainer, target: Path, shape: TrainerShape, *, half: bool):
        """Build model and optimiser. Raises DSparkError if `speculators` cannot be imported."""
        core, losses = _peer("models.dspark.core"), _peer("losses")
        self.trainer, self.half = trainer, half
        base = AutoConfig.from_pretrained(str(target))
        vocabulary = _vocabulary(trainer, base.vocab_size)
        chosen = torch.zeros(base.vocab_size, dtype=torch.bool)
        chosen[vocabulary] = True
        self.model: nn.Module = core.DSparkDraftModel.from_training_args(
            _layers_config(base, shape.layers),
            t2d=chosen,
            d2t=vocabulary - torch.arange(len(vocabulary)),
            draft_vocab_size=len(vocabulary),
            block_size=shape.gamma,
            target_layer_ids=list(LAYERS),
            verifier_name_or_path=str(target),
            mask_token_id=3,
            markov_rank=shape.markov_rank,
            draft_attn_impl="sdpa",
        ).train()
        spec = '{"ce": 0.1, "tv": 1.8}'  # their tv is half the L1 norm: 0.9 of ours
        self.options = {
            "loss_config": losses.resolve_loss_config(spec, "eager"),
            "tv_loss_fn": losses.resolve_loss_config("tv", "eager")["tv"][0],
            "max_anchors": shape.anchors_per_step,
            "gamma": float(shape.gamma),
        }
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(trained, lr=6e-4, betas=(0.9, 0.95), fused=True)

    def __call__(self) -> float:
        """Run one optimiser step; return the loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            _, loss, _ = self.model(**self._batch(), **self.options)
        self.adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.adam.step()
        return float(loss.detach())

    def _batch(self) -> dict[str, Tensor]:
        """Pack whole sequences end to end, as their collator does, without padding."""
        s = self.trainer.cfg.schedule
        draws = self.trainer.sampler.draw(s.sequences_per_step, s.anchors_per_sequence)
        found = [self.trainer.sampler.reader[draw.index] for draw in draws]
        dtype = torch.bfloat16 if self.half else torch.float32
        lengths = torch.tensor([len(r.tokens) for r in found])
        positions = [torch.arange(len(r.tokens)) for r in found]
        mask = [p >= r.prompt_len for p, r in zip(positions, found, strict=True)]
        return {
            "hidden_states": torch.cat([r.features for r in found])[None].to(dtype),
            "verifier_last_hidden_states": torch.cat([r.hidden for r in found])[None].to(dtype),
            "input_ids": torch.cat([r.tokens for r in found])[None],
            "loss_mask": torch.cat(mask)[None].to(dtype),
            "document_ids": torch.repeat_interleave(torch.arange(len(found)), lengths)[None],
            "position_ids": torch.cat(positions)[None],
        }


def paired(
    ours: Callable[[], Any], theirs: Callable[[], Any], anchors: int, repeats: int, warm_up: int = 2
) -> dict[str, Any]:
    """Time interleaved steps of both; return median anchors/s and the ratio with its interval.

    Times are wall time. The ratio is the geometric mean over pairs of their seconds / our seconds
    (`intervals`); seconds holds those of every pair. Raises DSparkError for a pair without a time
    above 0.
    """
    seconds = np.zeros((repeats, 2))
    for i in range(-warm_up, repeats):
        for side in (0, 1) if i % 2 else (1, 0):
            begun = time.perf_counter()
            (ours, theirs)[side]()
            if i >= 0:
                seconds[i, side] = time.perf_counter() - begun
    mine, peers = seconds.T.tolist()
    ratio = paired_ratio(peers, mine)
    low, high = ratio.bounds or (None, None)
    return {
        "pairs": repeats,
        "ours_anchors_per_s": anchors / statistics.median(mine),
        "peer_anchors_per_s": anchors / statistics.median(peers),
        "ratio": {"value": ratio.mid, "low": low, "high": high, "method": ratio.method},
        "seconds": {"ours": mine, "peer": peers},
    }


def peer_version() -> str:
    """Return the version of `speculators`, or "unknown"."""
    try:
        return version("speculators")
    except PackageNotFoundError:
        return "unknown"


def _peer(module: str) -> Any:
    try:
        return import_module(f"speculators.{module}")
    except ImportError as error:
        raise DSparkError(
            f"the comparison needs the package `speculators` ({error}): {INSTALL}, and what else "
            "its import asks for, in an environment of its own"
        ) from None


def _vocabulary(trainer: Trainer, size: int) -> Tensor:
    """Return the ids of our trainer's draft vocabulary [V']."""
    ids = getattr(trainer.learner.module, "draft_ids", None)
    return torch.arange(size) if ids is None else ids


def _layers_config(base: Any, layers: int) -> Qwen3Config:
    """Return a config of draft layers with the widths and heads of the target's."""
    return Qwen3Config(
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=base.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads,
        head_dim=base.hidden_size // base.num_attention_heads,
        max_position_embeddings=base.max_position_embeddings,
    )
