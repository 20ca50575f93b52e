"""Serve a drafter that runs once a token (Eagle3, MTP) by SGLang's DSPARK worker on a GPU.

SGLang's own class of the architecture computes the layer. Its steps run where those of a Markov
head do, so they are part of the draft's graph, and noise, seeds and kept logits are a block's. Step
k reads the token of step k - 1; its attention runs over the request's window of gamma rows, of
which row k alone is used, so any attention backend that verifies windows serves it.

chain_context.py keeps the drafter's context, whose entries are at the position of the target's
features (families/chain/model.py). backends/cpu/chain_draft.py is the same on a CPU.

Upstream: `draft_markov_block` in sglang/srt/speculative/dspark_components/dspark_draft.py;
sglang/srt/models/{llama_eagle,llama_eagle3}.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.reduced_vocabulary import token_ids
from sglang_dspark.families.chain.served import EAGLE3
from sglang_dspark.serving import upstream

if TYPE_CHECKING:
    from sglang_dspark.backends.cuda.chain_context import ChainContext


@dataclass
class Block:
    """One block of drafts: its window of R x gamma rows, and what its steps have computed.

    batch: upstream's `ForwardBatch` of the windows. scope: the forward context of its pass.
    first: [R] int64 positions of the first rows. states: [R, w], read by the next step. place: of
    the next step. rows: queries, keys and values [R, gamma, heads * D] of the steps so far.
    """

    batch: Any
    scope: Any
    first: Tensor
    gamma: int
    states: Tensor
    place: int = 0
    rows: list[Tensor] = field(default_factory=list)

    def window(self, new: tuple[Tensor, ...]) -> list[Tensor]:
        """Put the step's query, key and value, [R, ...] each, into its row of every window.

        Returns all rows, [R * gamma, ...]. Later rows are zeros, and no earlier row reads them.
        """
        if not self.rows:
            self.rows = [
                each.new_zeros(len(self.first), self.gamma, each.shape[-1]) for each in new
            ]
        for rows, each in zip(self.rows, new, strict=True):
            rows[:, self.place] = each
        return [rows.flatten(0, 1) for rows in self.rows]


class WindowAttention(nn.Module):
    """Attend with one row of each window. attn: upstream's `RadixAttention` of the layer."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any) -> Tensor:
        """Attend with q [R, Hq * D], k and v [R, Hkv * D] of a step -> [R, Hq * D]."""
        block: Block = forward_batch.dspark_block
        out: Tensor = self.attn(*block.window((q, k, v)), block.batch)
        return out.view(len(q), block.gamma, -1)[:, block.place]


class ChainHead:
    """The steps of a chain drafter, called as those of SGLang's `BaseDSparkMarkovHead`."""

    vocab_shard = None

    def __init__(self, model: ChainModel) -> None:
        self._model = model
        self.vocab_size = int(model.config.vocab_size)

    def init_state(self, hidden_states: Tensor | None) -> None:
        """Return None: the state of a block is in the model, which the pass has set."""

    def step_bias(
        self, prev_tokens: Tensor, *, hidden_states: Tensor | None, state: Any
    ) -> tuple[Tensor, Any]:
        """Return the logits [R, V] after the tokens [R] of the previous step, and None."""
        return self._model.step(prev_tokens), None

    def step_logits_dtype(self, base_dtype: torch.dtype) -> torch.dtype:
        """Return the type of a step's logits: that of the base logits."""
        return base_dtype

    def greedy_w2_weight(self) -> None:
        """Return None: no step is a product with a table alone."""


class ChainModel(nn.Module):
    """Draft model of a chain drafter's architecture, with the attributes that the worker reads.

    inner: SGLang's model of the architecture. context: set before graphs are captured.
    """

    sample_from_anchor = True
    confidence_head = None
    num_stages = 1
    supports_pre_gather_target_hidden_projection = False
    logits_mup_width_multiplier: float | None = None
    draft_ids: Tensor | None
    head_rows: Tensor | None
    base: Tensor | None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        """Make SGLang's model of `config`, the checkpoint's as Transformers parses it."""
        super().__init__()
        self.config = config
        if getattr(config, "draft_vocab_size", None) is None:  # SGLang's Eagle3 reads it
            config.draft_vocab_size = config.vocab_size
        self.reads_features = config.architectures[0] == EAGLE3
        made = (
            upstream.LlamaForCausalLMEagle3
            if self.reads_features
            else upstream.LlamaForCausalLMEagle
        )
        self.inner: Any = made(config, quant_config=quant_config, prefix=prefix)
        layer = self.inner.model.layers[0].self_attn
        layer.attn = WindowAttention(layer.attn)
        self.context: ChainContext | None = None
        self.lm_head: Any = None  # the target's
        self.markov_head = ChainHead(self)
        self.register_buffer("draft_ids", None, persistent=False)  # [V'] int64
        self.register_buffer("head_rows", None, persistent=False)  # [V', d] of the target's head
        self.register_buffer("base", None, persistent=False)  # [V]: 0, -inf where not drafted
        self._block: Block | None = None

    @property
    def state_width(self) -> int:
        """Return w, the width of the target's states."""
        width = int(self.config.hidden_size)
        return int(self.inner.model.fc.in_features) if self.reads_features else width

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Read a checkpoint's tensors, or a part of them when a running server is updated."""

        def others() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.endswith("d2t"):
                    ids = token_ids(tensor.long().flatten(), int(self.config.vocab_size))
                    if self.draft_ids is None:
                        self.draft_ids = ids.to(self.inner.model.fc.weight.device)
                    self.draft_ids.copy_(ids)  # in place, as graphs read them
                elif not name.endswith(("t2d", "embed_tokens.weight")):  # that is the target's
                    yield name, tensor

        self.inner.load_weights(others())

    def attach_shared_modules(self, *, embed_tokens: Any, lm_head: Any) -> None:
        """Share the target's embedding, and its LM head where the drafter has none."""
        self.inner.model.embed_tokens, self.lm_head = embed_tokens, lm_head
        if not self.reads_features:
            self.inner.lm_head = lm_head
            plain = lm_head.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
            if self.draft_ids is not None and plain:
                self.head_rows = lm_head.weight.detach()[self.draft_ids]
        self.base = self.inner.model.fc.weight.new_zeros(int(self.config.vocab_size))
        self.attach_again()

    @torch.no_grad()
    def attach_again(self) -> None:
        """Copy rows of the target's present LM head, in place, as graphs read them."""
        if self.draft_ids is not None and self.base is not None:
            self.base.fill_(-torch.inf)[self.draft_ids] = 0.0
        if self.head_rows is not None:
            self.head_rows.copy_(self.lm_head.weight[self.draft_ids])

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **unused: Any
    ) -> Any:
        """Begin the block of a batch of windows, R x gamma rows; its steps draft it.

        unused: embeddings of the rows, most of which are masks. The hidden states of upstream's
        `LogitsProcessorOutput` only count rows, [R * gamma, 1].
        """
        assert self.context is not None, "the context is attached before the first pass"
        requests = int(forward_batch.batch_size)
        states = self.context.waiting[forward_batch.req_pool_indices.long()]  # [R, w]
        gamma = len(input_ids) // requests
        self._block = Block(
            forward_batch,
            upstream.get_forward_context(),
            positions.view(requests, gamma)[:, 0].long(),
            gamma,
            states,
        )
        return upstream.LogitsProcessorOutput(
            next_token_logits=None, hidden_states=states.new_zeros(len(input_ids), 1)
        )

    def compute_base_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N, V] for rows [N, 1], to which a step's logits are added, and the rows."""
        assert self.base is not None
        return self.base.expand(len(hidden), -1), hidden

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Run the block's next step after tokens [R] int64; return logits [R, V]."""
        block = self._block
        assert block is not None, "a pass begins the block"
        batch = copy(block.batch)  # the layer's view: one row a request
        batch.spec_info = SimpleNamespace(hidden_states=block.states)
        batch.dspark_block = block
        with upstream.forward_context(block.scope):
            out = self.inner.model(tokens, block.first + block.place, batch)
            hidden, block.states = (out[0], out[1][0]) if self.reads_features else (out, out)
            block.place += 1
            return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Map the layer's output [R, d] to logits [R, V], 0 outside the draft vocabulary."""
        base, ids = self.base, self.draft_ids
        assert base is not None, "the target is attached"
        if self.head_rows is not None:
            logits = nn.functional.linear(hidden.to(self.head_rows.dtype), self.head_rows)
        else:
            logits = upstream.project_through_lm_head(hidden, self.inner.lm_head)
            if not self.reads_features:
                ids = None  # the target's head; base excludes tokens
        if ids is None:
            return logits[:, : len(base)]  # without padding
        spread = logits.new_zeros(len(logits), len(base))
        return spread.index_copy_(1, ids, logits[:, : len(ids)])

    def write_target_hidden_kv(
        self, *, target_hidden: Tensor, positions: Tensor, cache_loc: Tensor, **unused: Any
    ) -> None:
        """Write features [n, w] of a prefill's tokens at `positions` [n] to the context.

        unused: the pool, which the context already has, and windows, which only decode steps have.
        """
        assert self.context is not None, "the context is attached before the first request"
        self.context.prefill(target_hidden, positions.long(), cache_loc.long())

    @torch.no_grad()
    def keys_values(
        self, tokens: Tensor, states: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys, values [n, Hkv, D] of entries (token at j, target's state at j - 1).

        tokens [n] int64, states [n, w], positions [n] int64 of the states.
        """
        model = self.inner.model
        layer, embedded = model.layers[0], model.embed_tokens(tokens)
        if self.reads_features:
            x = torch.cat(
                [layer.input_layernorm(embedded), layer.hidden_norm(model.fc(states))], -1
            )
        else:
            x = model.fc(torch.cat([embedded, states], -1))
        attention = layer.self_attn
        _, keys, values = attention.forward_prepare_native(positions, x)
        shape = len(tokens), -1, attention.head_dim
        return keys.reshape(shape), values.reshape(shape)
