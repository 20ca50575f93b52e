"""Serve a one-layer drafter that runs once a token (Eagle3, MTP) by SGLang's DSPARK worker.

SGLang serves it as EAGLE3 or EAGLE, which verify every draft. Here families/chain computes it, so
that our step drafts to any depth and schedules verification. For its entry in SGLang's model
registry, and for the options that SGLang's DSPARK expects in config.json and such a drafter does
not have, see patches/step/chain_drafters.py.

Eagle3 reads features of the target's layers, MTP its last hidden state; both are called features
here. An entry of the context is the pair (token at j, the target's features at j - 1); it has the
position and the cache slot of j - 1 (families/chain/model.py). So a request whose anchor is at p
has entries for the slots of 0 .. p - 2, and its features of p - 1 wait for the next draft. The last
entry of a shared prefix has the first request's next token, or is missing if that request ended
there: acceptance drops a little and the output is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear, packed_weights
from sglang_dspark.backends.cpu.context_kv import Committed
from sglang_dspark.backends.cpu.draft import draft_params, drawn_by, widened
from sglang_dspark.backends.cpu.reduced_head import block_uniforms
from sglang_dspark.backends.cpu.weight_formats import PANEL, dense, is_packed, look_up
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.drafter.weight_files import bare_name
from sglang_dspark.families.chain.model import Attend, ChainDrafter, WeightOps, multiply
from sglang_dspark.families.chain.served import EAGLE3, MTP
from sglang_dspark.families.eagle3.checkpoint import eagle3_of, eagle3_tensors
from sglang_dspark.families.eagle3.model import Eagle3Config, named_layers
from sglang_dspark.families.mtp.checkpoint import mtp_of, mtp_tensors
from sglang_dspark.families.mtp.model import MTPConfig
from sglang_dspark.serving import mode, upstream
from sglang_dspark.step.seeds import Seeds, draft_result

_UNNAMED = (0, 1, 2)  # three layers; the target defines which (patches/step/chain_drafters.py)


def _eagle3_config(raw: Mapping[str, Any]) -> Eagle3Config:
    return Eagle3Config.from_json(raw, named_layers(raw) or _UNNAMED)


# By architecture: config of config.json, drafter of config and tensors, tensors of a drafter.
_KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    EAGLE3: (_eagle3_config, eagle3_of, eagle3_tensors),
    MTP: (MTPConfig.from_json, mtp_of, mtp_tensors),
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
        read, self._made, self._tensors = _KINDS[config.architectures[0]]
        self.config = read(config.to_dict())
        self.drafter: ChainDrafter | None = None
        self.context: ChainContext | None = None
        self._shared: tuple[Any, Any] | None = None  # the target's embedding and LM head

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Read a checkpoint's tensors, or a part of them when a running server is updated."""
        held = {} if self.drafter is None else self._tensors(self.drafter)
        tensors = {name: dense(each) if is_packed(each) else each for name, each in held.items()}
        tensors |= {bare_name(name): tensor for name, tensor in weights}
        self.drafter = self._made(self.config, tensors).float().requires_grad_(False)
        packed_weights.pack_chain(self.drafter)
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


class ChainContext:
    """Keys and values in the draft's cache, and waiting features by pool row."""

    def __init__(self, worker: Any) -> None:
        """Use the pools of `worker`, upstream's, when they are ready."""
        runner = worker.draft_model_runner
        self._model: ChainModel = worker.draft_model
        pool = runner.token_to_kv_pool
        self._keys, self._values = pool.k_buffer[0], pool.v_buffer[0]  # [slots, Hkv, D]
        self._dtype, self._stored = pool.dtype, pool.store_dtype  # fp8 is stored as bytes
        self._table = worker.model_runner.req_to_token_pool.req_to_token  # [rows, context] int32
        self._waiting = torch.zeros(len(self._table), self.drafter.state_width)
        self._ends = torch.zeros(len(self._table), dtype=torch.int64)  # after the features
        self._owners: dict[int, str] = {}  # pool row: id of the request whose features wait
        self._prefill: Any = None

    @property
    def drafter(self) -> ChainDrafter:
        """Return the drafter with its present weights."""
        assert self._model.drafter is not None
        return self._model.drafter

    def begin_prefill(self, batch: Any) -> None:
        """Record a batch whose features are written next: its tokens make the entries."""
        self._prefill = batch

    def prefill(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the entries of a prefill: features [n, m*d], positions and slots [n] int64."""
        batch, last_id = self._prefill, self.drafter.config.vocab_size - 1
        tokens = batch.input_ids.long().clamp(0, last_id)  # places of images have ids outside
        lens, rows = torch.tensor(batch.extend_lens), batch.req_pool_indices.long()
        last = lens.cumsum(0) - 1  # [R], last packed row of each request
        first = last - lens + 1
        inner = torch.ones(len(tokens), dtype=torch.bool).index_fill_(0, last, False)
        pairs = inner.nonzero().flatten()
        self._write(tokens[pairs + 1], features[pairs], positions[pairs], slots[pairs])
        goes_on = self._ends[rows] == positions[first]  # a prompt's next chunk
        owners = dict(zip(rows.tolist(), (req.rid for req in batch.reqs), strict=True))
        owned = [self._owners.get(row) == rid for row, rid in owners.items()]
        chosen = (goes_on & torch.tensor(owned)).nonzero().flatten()
        if len(chosen):
            begins, whose = first[chosen], rows[chosen]
            before = positions[begins] - 1
            at = self._table[whose, before].long()
            self._write(tokens[begins], self._waiting[whose], before, at)
        self._owners |= owners
        self._wait(rows, features[last], positions[last] + 1)

    def commit(self, committed: Committed) -> None:
        """Write the entries of a step's committed rows, an anchor and its accepted drafts each."""
        rows = committed.requests.long()
        last = committed.lens.long().cumsum(0) - 1
        first = last - committed.lens.long() + 1
        positions = committed.positions.long() - 1  # of each token's features
        features, slots = committed.hidden.float().roll(1, 0), committed.slots.long().roll(1, 0)
        features[first] = self._waiting[rows]
        slots[first] = self._table[rows, positions[first]].long()
        self._write(committed.tokens.long(), features, positions, slots)
        self._wait(rows, committed.hidden[last], committed.positions[last].long() + 1)

    def attended(self, rows: Tensor, lens: Tensor, depth: int) -> tuple[Tensor, Attend]:
        """Return the waiting features [R, m*d] and the attention of drafts over the context.

        rows, lens: [R] int64, pool rows and positions of the anchors. depth: drafts to come.
        """
        seen = int(lens.max()) - 1
        slots = self._table[rows, :seen].long()  # [R, T]
        room = (len(rows), seen + depth, *self._keys.shape[1:])
        keys, values = torch.empty(room), torch.empty(room)
        mask = torch.ones(room[:2], dtype=torch.bool)
        mask[:, :seen] = torch.arange(seen) < (lens - 1)[:, None]
        ragged = not mask.all()
        for all_of, cache in ((keys, self._keys), (values, self._values)):
            all_of[:, :seen] = cache[slots].view(self._dtype)
            if ragged:  # entries of other requests: their NaN times 0 is NaN
                all_of[:, :seen].masked_fill_(~mask[:, :seen, None, None], 0.0)

        def attend(query: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
            end = seen + own_keys.shape[1]
            keys[:, end - 1], values[:, end - 1] = own_keys[:, -1], own_values[:, -1]
            out = nn.functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                keys[:, :end].transpose(1, 2),
                values[:, :end].transpose(1, 2),
                attn_mask=mask[:, None, None, :end],
                enable_gqa=True,
            )
            return out.transpose(1, 2)

        return self._waiting[rows], attend

    def _wait(self, rows: Tensor, features: Tensor, ends: Tensor) -> None:
        self._waiting[rows] = features.float()
        self._ends[rows] = ends

    def _write(self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        keys, values = self.drafter.context_kv(tokens, features.float(), positions)
        for cache, entries in ((self._keys, keys), (self._values, values)):
            cache[slots] = entries.to(self._dtype).view(self._stored)


class ChainDraft:
    """Draft for one worker, to any depth up to gamma; the same calls as `draft.Drafter`."""

    def __init__(self, worker: Any) -> None:
        self.context = worker.draft_model.context = ChainContext(worker)
        self._gamma, self._mask = int(worker.gamma), int(worker._mask_token_id)
        self.noise = worker._proposer.noise
        self.greedy_only = bool(worker._greedy_draft)
        self._estimates = mode.estimates_confidence(has_head=False)

    @torch.inference_mode()
    def propose(self, batch: Any, window: Any, depth: int, seeds: Seeds | None) -> Any:
        """Return upstream's `DraftProposal` of `depth` drafts a request, its tokens gamma wide.

        window: ignored. seeds: of the sampled requests that have one.
        """
        anchors, lens = batch.spec_info.bonus_tokens.view(-1).long(), batch.seq_lens.long()
        drafter, rows = self.context.drafter, batch.req_pool_indices.long()
        draw = _Draw(self, batch, depth, seeds)
        tokens, confidence = [anchors], []
        features, attend = self.context.attended(rows, lens, depth)
        steps = drafter.unroll(features, lens - 1, lambda k: tokens[k - 1], attend)
        for place in range(depth):
            logits = drafter.logits(next(steps))  # [R, V']
            if self._estimates:
                confidence.append(draft_confidence(logits[:, None], draw.temperatures))
            columns = draw.columns(logits, place)
            tokens.append(columns if drafter.draft_ids is None else drafter.draft_ids[columns])
        block = draft_result(torch.stack(tokens[1:], 1), draw.params, draw.logits)
        ids = torch.full((len(anchors), depth), self._mask)
        ids[:, 0] = anchors
        return upstream.DraftProposal(
            draft_block_ids=ids,
            draft_block=widened(block, self._gamma),
            confidence_raw=torch.cat(confidence, 1) if confidence else None,
        )


class _Draw:
    """The choices of one block: the likeliest tokens, or draws by temperature, noise and seeds.

    temperatures: [R], 0 for greedy requests; logits: [R, depth, V]; None: all are greedy.
    """

    def __init__(self, draft: ChainDraft, batch: Any, depth: int, seeds: Seeds | None) -> None:
        info, requests = batch.sampling_info, len(batch.seq_lens)
        self.temperatures: Tensor | None = None
        self.logits: Tensor | None = None
        self._drafter = draft.context.drafter
        self.params = draft_params(info, requests)
        if draft.greedy_only or info is None or info.is_all_greedy:
            return
        scale = self.params.temperatures.view(-1).float()
        self.temperatures = scale.where(~self.params.greedy_mask, 0.0)
        noise, size = draft.noise, self._drafter.config.vocab_size
        self._uniforms = block_uniforms(noise.key, int(noise.offset), (requests, depth))
        noise.offset.add_(1)
        self.logits = torch.full((requests, depth, size), -torch.inf)
        self._seeds = drawn_by(seeds, batch.seq_lens)

    def columns(self, logits: Tensor, place: int) -> Tensor:
        """Choose a column of logits [R, V'] for each request: [R] int64."""
        likeliest = logits.argmax(-1)
        if self.logits is None:
            return likeliest
        ids, scale = self._drafter.draft_ids, self.params.temperatures.view(-1)
        self.logits[:, place, slice(None) if ids is None else ids] = logits
        sums = torch.softmax(logits.double() / scale[:, None], -1).cumsum(-1)
        reached = self._uniforms[:, place, None] * sums[:, -1:]  # below the whole sum
        drawn = torch.searchsorted(sums, reached, right=True).squeeze(-1)
        drawn = drawn.clamp(max=logits.shape[1] - 1)
        if self._seeds is not None:
            drawn = self._seeds.drawn(drawn, logits, scale, place, ids)
        return likeliest.where(self.params.greedy_mask, drawn)
