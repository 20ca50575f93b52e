"""Draft with a one-layer drafter that runs once a token, and keep its context.

Eagle3 reads features of the target's layers, MTP its last hidden state; both are called features
here. An entry of the context is the pair (token at j, the target's features at j - 1); it has the
here. An entry of the context is the pair (token at j, the target's features at j - 1); it has the
position and the cache slot of j - 1 (families/chain/model.py). So a request whose anchor is at p
has entries for the slots of 0 .. p - 2, and its features of p - 1 wait for the next draft. The last
entry of a shared prefix has the first request's next token, or is missing if that request ended
there: acceptance drops a little and the output is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu.chain_model import ChainModel
from sglang_dspark.backends.cpu.context_kv import Committed
from sglang_dspark.backends.cpu.draft import drawn_by, greedy_params, widened
from sglang_dspark.backends.cpu.reduced_head import block_uniforms
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.families.chain.model import Attend, ChainDrafter
from sglang_dspark.serving import mode, upstream
from sglang_dspark.step.seeds import Seeds, draft_result


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
        batch, tokens = self._prefill, self._prefill.input_ids.long()
        lens, rows = torch.tensor(batch.extend_lens), batch.req_pool_indices.long()
        last = lens.cumsum(0) - 1  # [R], last packed row of each request
        first = last - lens + 1
        inner = torch.ones(len(tokens), dtype=torch.bool).index_fill_(0, last, False)
        pairs = inner.nonzero().flatten()
        self._write(tokens[pairs + 1], features[pairs], positions[pairs], slots[pairs])
        goes_on = self._ends[rows] == positions[first]  # a prompt's next chunk
        owned = [self._owners.get(row) == req.rid for row, req in self._requests(batch)]
        chosen = (goes_on & torch.tensor(owned)).nonzero().flatten()
        if len(chosen):
            begins, whose = first[chosen], rows[chosen]
            before = positions[begins] - 1
            at = self._table[whose, before].long()
            self._write(tokens[begins], self._waiting[whose], before, at)
        self._owners.update((row, req.rid) for row, req in self._requests(batch))
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
            all_of[:, :seen] = self._read(cache, slots)
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

    @staticmethod
    def _requests(batch: Any) -> Any:
        return zip(batch.req_pool_indices.tolist(), batch.reqs, strict=True)

    def _wait(self, rows: Tensor, features: Tensor, ends: Tensor) -> None:
        self._waiting[rows] = features.float()
        self._ends[rows] = ends

    def _write(self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        keys, values = self.drafter.context_kv(tokens, features.float(), positions)
        for cache, entries in ((self._keys, keys), (self._values, values)):
            cache[slots] = entries.to(self._dtype).view(self._stored)

    def _read(self, cache: Tensor, slots: Tensor) -> Tensor:
        """Read the entries of slots [...] in float32, [..., Hkv, D]."""
        return cache[slots].view(self._dtype).float()


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
        ids = torch.full((len(anchors), depth), self._mask)
        ids[:, 0] = anchors
        return upstream.DraftProposal(
            draft_block_ids=ids,
            draft_block=widened(draw.block(torch.stack(tokens[1:], 1)), self._gamma),
            confidence_raw=torch.cat(confidence, 1) if confidence else None,
        )


class _Draw:
    """The choices of one block: the likeliest tokens, or draws by temperature, noise and seeds.

    temperatures: [R], 0 for greedy requests; None: all are greedy.
    """

    def __init__(self, draft: ChainDraft, batch: Any, depth: int, seeds: Seeds | None) -> None:
        info, requests = batch.sampling_info, len(batch.seq_lens)
        self.temperatures: Tensor | None = None
        self._drafter = draft.context.drafter
        if draft.greedy_only or info is None or info.is_all_greedy:
            self._params = greedy_params(requests)
            return
        self._params = upstream.resolve_draft_params(
            sampling_info=info, bs=requests, device=batch.seq_lens.device
        )
        scale = self._params.temperatures.view(-1).float()
        self.temperatures = scale.where(~self._params.greedy_mask, 0.0)
        noise, size = draft.noise, self._drafter.config.vocab_size
        self._uniforms = block_uniforms(noise.key, int(noise.offset), (requests, depth))
        noise.offset.add_(1)
        self._logits = torch.full((requests, depth, size), -torch.inf)
        self._seeds = drawn_by(seeds, batch.seq_lens)

    def columns(self, logits: Tensor, place: int) -> Tensor:
        """Choose a column of logits [R, V'] for each request: [R] int64."""
        likeliest = logits.argmax(-1)
        if self.temperatures is None:
            return likeliest
        ids, scale = self._drafter.draft_ids, self._params.temperatures.view(-1)
        self._logits[:, place, slice(None) if ids is None else ids] = logits
        sums = torch.softmax(logits.double() / scale[:, None], -1).cumsum(-1)
        reached = self._uniforms[:, place, None] * sums[:, -1:]  # below the whole sum
        drawn = torch.searchsorted(sums, reached, right=True).squeeze(-1)
        drawn = drawn.clamp(max=logits.shape[1] - 1)
        if self._seeds is not None:
            drawn = self._seeds.drawn(drawn, logits, scale, place, ids)
        return likeliest.where(self._params.greedy_mask, drawn)

    def block(self, tokens: Tensor) -> Any:
        """Return upstream's `DraftBlockResult` of tokens [R, depth]."""
        logits = None if self.temperatures is None else self._logits
        return draft_result(tokens, self._params, logits)


def chain_draft_of(worker: Any) -> ChainDraft | None:
    """Return a `ChainDraft` for a worker whose drafter runs once a token; None for any other."""
    return ChainDraft(worker) if isinstance(worker.draft_model, ChainModel) else None
