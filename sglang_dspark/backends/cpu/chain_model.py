"""Load a chain drafter (Eagle3, MTP) as the draft model of SGLang's DSPARK worker on a CPU.

SGLang serves it as EAGLE3 or EAGLE, which verify every draft. Here families/chain computes it, so
that our step drafts to any depth and schedules verification (chain_draft.py). For its entry in
SGLang's model registry, and for the options that SGLang's DSPARK expects in config.json and such a
drafter does not have, see patches/cpu/chain_drafters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear, packed_weights, weight_methods
from sglang_dspark.backends.cpu.weight_formats import PANEL, dense, is_packed, look_up
from sglang_dspark.drafter.weight_files import bare_name
from sglang_dspark.families.chain.model import ChainDrafter, WeightOps, multiply
from sglang_dspark.families.chain.served import EAGLE3, MTP
from sglang_dspark.families.eagle3.checkpoint import eagle3_of, eagle3_tensors
from sglang_dspark.families.eagle3.model import Eagle3Config, named_layers
from sglang_dspark.families.mtp.checkpoint import mtp_of, mtp_tensors
from sglang_dspark.families.mtp.model import MTPConfig

if TYPE_CHECKING:
    from sglang_dspark.backends.cpu.chain_draft import ChainContext

_UNNAMED = (0, 1, 2)  # three layers; the target defines which (patches/cpu/chain_drafters.py)


def _eagle3_config(raw: Mapping[str, Any]) -> Eagle3Config:
    return Eagle3Config.from_json(raw, named_layers(raw) or _UNNAMED)


@dataclass(frozen=True)
class _Kind:
    """Make a config of config.json, a drafter of config and tensors, tensors of a drafter."""

    config: Callable[[Mapping[str, Any]], Any]
    drafter: Callable[[Any, Mapping[str, Tensor]], ChainDrafter]
    tensors: Callable[[Any], dict[str, Tensor]]


_KINDS = {
    EAGLE3: _Kind(_eagle3_config, eagle3_of, eagle3_tensors),
    MTP: _Kind(MTPConfig.from_json, mtp_of, mtp_tensors),
}


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by our kernel; by torch, in the weight's type, if the kernel cannot read it."""
    return (linear.product if linear.kernel_of(weight) is not None else multiply)(x, weight)


_OPS = WeightOps(packed_weights.take_draft_rows, look_up, _multiply)


class ChainModel(nn.Module):
    """Draft model of a chain drafter's architecture, with the attributes that the worker reads.

    context: its keys and values, once there is a cache. num_stages: layers of that cache.
    """

    sample_from_anchor = True
    confidence_head = None
    markov_head = None
    num_stages = 1
    supports_pre_gather_target_hidden_projection = False
    logits_mup_width_multiplier: float | None = None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        """Read `config`, the checkpoint's as Transformers parses it."""
        super().__init__()
        self._kind = _KINDS[config.architectures[0]]
        self.config = self._kind.config(config.to_dict())
        self.drafter: ChainDrafter | None = None
        self.context: ChainContext | None = None
        self._shared: tuple[Any, Any] | None = None  # the target's embedding and LM head

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Read a checkpoint's tensors, or a part of them when a running server is updated."""
        held = {} if self.drafter is None else self._kind.tensors(self.drafter)
        tensors = {name: dense(each) if is_packed(each) else each for name, each in held.items()}
        tensors |= {bare_name(name): tensor for name, tensor in weights}
        self.drafter = self._kind.drafter(self.config, tensors).float().requires_grad_(False)
        packed_weights.pack_chain(self.drafter)
        weight_methods.adopt_plain_layers(self.drafter)
        self.drafter.ops = _OPS
        self.attach_again()

    def attach_shared_modules(self, *, embed_tokens: Any, lm_head: Any) -> None:
        """Share the target's embedding and LM head."""
        self._shared = (embed_tokens, lm_head)
        self.attach_again()

    def attach_again(self) -> None:
        """Copy the target's present LM head rows for the drafter."""
        if self.drafter is None or self._shared is None:
            return
        # Without most of SGLang's padding, but int8 rows are read in whole panels.
        rows = -(-self.config.vocab_size // PANEL) * PANEL
        self.drafter.attach(*(each.weight[:rows] for each in self._shared))

    def write_target_hidden_kv(
        self, *, target_hidden: Tensor, positions: Tensor, cache_loc: Tensor, **unused: Any
    ) -> None:
        """Write features [n, m*d] of a prefill's tokens at `positions` [n] to its context.

        unused: the pool, which the context already has, and windows, which only decode steps have.
        """
        assert self.context is not None, "the context is attached before the first request"
        with torch.inference_mode():
            self.context.prefill(target_hidden, positions.long(), cache_loc.long())
