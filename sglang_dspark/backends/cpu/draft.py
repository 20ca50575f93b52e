"""Draft a block on a CPU: layers, heads left to right (paper, 3.1.2), and confidence.

Re-implements `DraftBlockProposer.propose`, `_run_forward` and `sample_draft_block`
(sglang/srt/speculative/dspark_components/dspark_draft.py). Upstream makes a `ForwardBatch` of about
90 fields and runs the runner's Python; a draft model that our forward pass does not support still
uses these. Heads over a reduced vocabulary are computed by reduced_head.py, any other by upstream,
which spans the whole vocabulary. Replaces `DSparkConfidenceHead.predict`
(sglang/srt/models/dspark.py), a dozen small tensor operations for about a thousand multiplications.
"""

from __future__ import annotations

import copy
from ctypes import c_int64, c_void_p
from functools import lru_cache, partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import context_kv, reduced_head, seeded_ops
from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.fast_paths import (
    find_or_log,
    require,
    require_class,
    require_library,
)
from sglang_dspark.backends.cpu.layers import direct_forward
from sglang_dspark.backends.cpu.layers.layer_spec import draft_layer_of
from sglang_dspark.backends.cpu.reduced_head import ReducedHead, reduced_head_of
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.serving import mode, upstream
from sglang_dspark.step.seeds import DraftSeeds, Seeds, draft_block, draft_result

_P, _N = c_void_p, c_int64
_CONFIDENCE = ("confidence", _P, _N, _N, _N, _P, _P, _P, _P, _P, _N, _P)


class Drafter:
    """Draft for one worker, to any depth up to gamma."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._runner, self._model = worker.draft_model_runner, worker.draft_model
        self._skipped = 0 if worker.sample_from_anchor else 1  # rows before the first drafting row
        self._estimates = mode.estimates_confidence(
            has_head=self._model.confidence_head is not None
        )

    def propose(self, batch: Any, window: Any, depth: int, seeds: Seeds | None) -> Any:
        """Return upstream's `DraftProposal` of `depth` drafts a request, its tokens gamma wide.

        window: upstream's positions and cache slots of all gamma + 1 places of each request. seeds:
        of the sampled requests that have one.
        """
        anchors = batch.spec_info.bonus_tokens.view(-1)  # [R]
        rows, mask = depth + self._skipped, int(self._worker._mask_token_id)
        ids = torch.full((len(anchors), rows), mask, dtype=torch.int64)
        ids[:, 0] = anchors
        with self._worker._draft_context():
            hidden = self._hidden(batch, ids, window)  # [R * depth, d]
            heads = self._heads()
            base, features = heads.base_logits(hidden)
            base = base.view(len(ids), depth, -1)  # [R, depth, n]
            estimated = torch.empty(base.shape[:2]) if self._estimates else None  # [R, depth]
            block = heads.sample(
                base, anchors, hidden, batch.sampling_info, batch.seq_lens, seeds, estimated
            )
            logits = confidence_of(self._model, anchors, block.draft_tokens, features)
        return upstream.DraftProposal(
            draft_block_ids=ids,
            draft_block=widened(block, int(self._worker.gamma)),
            confidence_raw=logits if estimated is None else estimated,
        )

    def _heads(self) -> DraftHeads:
        """Return the heads with their present weights."""
        worker = self._worker
        return DraftHeads(
            self._model,
            worker._proposer.noise,  # one counter for all depths
            worker._tp_sync,
            reduced_head_of(self._model),
            greedy_only=bool(worker._greedy_draft),
        )

    def _hidden(self, batch: Any, ids: Tensor, window: Any) -> Tensor:
        """Compute hidden states [R * depth, d] of ids [R, rows], of the rows that draft; write
        their context first."""
        runner, model, rows = self._runner, self._model, ids.shape[1]
        table = runner.req_to_token_pool.req_to_token
        context_kv.settle(model, table, batch.req_pool_indices, batch.seq_lens)
        # A column alone would be a view with strides, which the compiled layers do not read.
        positions = window.positions_2d[:, :rows].reshape(-1).contiguous()
        slots = window.verify_cache_loc_2d[:, :rows].reshape(-1).contiguous()
        if model is runner.model and direct_forward.supports_pass(
            runner, _require_plain, (model.embed_tokens,)
        ):
            spec = _block_spec(rows, str(self._worker.device))
            seen = direct_forward.Window(
                ids.view(-1), positions, slots, batch.req_pool_indices, batch.seq_lens, spec
            )
            done = direct_forward.run(runner, model, draft_layer_of, seen)
            if done is not None:
                hidden = done[0]  # [R * rows, d]
                if not self._skipped:
                    return hidden
                return hidden.unflatten(0, (-1, rows))[:, self._skipped :].flatten(0, 1)
        return self._through_runner(batch, rows, window)

    def _through_runner(self, batch: Any, rows: int, window: Any) -> Tensor:
        """Run the same pass by upstream's proposer, made for blocks of `rows` tokens."""
        worker = self._worker
        proposer = copy.copy(worker._proposer)
        proposer.gamma, proposer.query_token_num = rows - self._skipped, rows
        proposer._draft_block_spec_info = _block_spec(rows, str(worker.device))
        proposer._draft_block_ids_buf = None  # has another width
        target = worker.target_worker.model_runner.model
        embed = self._model.embed_tokens if self._skipped else target.get_input_embeddings()
        done = proposer._run_forward(
            batch=batch,
            draft_input=batch.spec_info,
            verify_window=window,
            bs=len(batch.seq_lens),
            device=worker.device,
            embed_module=upstream.unwrap_lora_layer(embed),
        )
        hidden: Tensor = done.raw_hidden
        return hidden


def widened(block: Any, gamma: int) -> Any:
    """Pad the tokens of a `DraftBlockResult` to width gamma; the padding is not read."""
    missing = gamma - block.draft_tokens.shape[1]
    if not missing:
        return block
    tokens = torch.nn.functional.pad(block.draft_tokens, (0, missing))  # [R, gamma]
    return msgspec.structs.replace(block, draft_tokens=tokens)


@lru_cache(maxsize=64)
def _block_spec(depth: int, device: str) -> Any:
    """Build upstream's description of blocks of `depth` tokens."""
    return upstream.make_draft_block_spec_info(draft_token_num=depth, device=device)


def _require_plain(model: Any) -> None:
    require(upstream.envs.SGLANG_DSPARK_EMBED_IN_GRAPH.get(), "SGLANG_DSPARK_EMBED_IN_GRAPH is off")
    require(hasattr(model, "forward_embed"), "it embeds no tokens of its own")
    direct_forward.require_plain_embedding(model.embed_tokens)


class DraftHeads:
    """The LM head and the sequential head of one draft model."""

    def __init__(
        self,
        model: Any,
        noise: Any,
        tp_sync: Any,
        reduced: ReducedHead | None,
        *,
        greedy_only: bool,
    ) -> None:
        """Use upstream's `DraftNoise` and `SpecTpSync`. greedy_only: sampled requests have greedy
        drafts too."""
        self._model, self._noise, self._tp_sync = model, noise, tp_sync
        self._reduced, self._greedy_only = reduced, greedy_only

    def base_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute U [R * depth, n] of hidden [R * depth, d], and the confidence head's features."""
        reduced = self._reduced
        if reduced is None:
            base, features = self._model.compute_base_logits(hidden)
            return base, features
        scale = self._model.logits_mup_width_multiplier
        return reduced_head.base_logits(reduced, hidden / scale if scale else hidden), hidden

    def sample(
        self,
        base: Tensor,
        anchors: Tensor,
        hidden: Tensor,
        info: Any,
        positions: Tensor,
        seeds: Seeds | None,
        confidence: Tensor | None = None,
    ) -> Any:
        """Sample upstream's `DraftBlockResult` from base logits [R, depth, n].

        anchors: [R] tokens, positions: [R] of the anchors. hidden: [R * depth, d]. info: the
        batch's sampling settings. seeds: of the sampled requests that have one. confidence:
        [R, depth] float32, filled with `draft_confidence`; None: the model has a confidence head.
        """
        greedy = self._greedy_only or info is None or info.is_all_greedy
        drawn = None if greedy else drawn_by(seeds, positions)
        params, reduced, noise = draft_params(info, len(base)), self._reduced, self._noise
        if reduced is None:
            block = self._by_upstream(
                base, anchors, hidden, None if greedy else info, drawn, confidence
            )
            return draft_result(block.draft_tokens, params) if greedy else block
        site = upstream.SpecTpSyncSite.DSPARK_DRAFT
        agree = partial(self._tp_sync.sync, site)
        if greedy:
            every = agree if self._tp_sync.enabled(site) else None
            tokens = reduced_head.draft_greedy(reduced, base, anchors.long(), every, confidence)
            return draft_result(tokens, params)
        shape = (len(base), base.shape[1])
        uniforms = reduced_head.block_uniforms(noise.key, int(noise.offset), shape)
        noise.offset.add_(1)
        tokens, logits = reduced_head.draft_sampled(
            reduced, base, anchors, params.step_temperatures, uniforms, agree, drawn, confidence
        )
        return draft_result(tokens, params, logits)

    def _by_upstream(
        self,
        base: Tensor,
        anchors: Tensor,
        hidden: Tensor,
        info: Any,
        drawn: DraftSeeds | None,
        confidence: Tensor | None,
    ) -> Any:
        """Sample by upstream's head; arguments as for `sample`, info None for greedy drafts."""
        options = {
            "base_logits": base,
            "anchor_tokens": anchors,
            "draft_hidden": hidden.view(*base.shape[:2], -1),
            "sampling_info": info,
            "markov_head": self._model.markov_head,
            "noise": self._noise,
            "device": base.device,
            "tp_sync": self._tp_sync,
        }
        if drawn is not None:
            block = draft_block(drawn, **options)
        else:  # upstream's greedy steps keep no logits to estimate confidence from
            greedy = info is None and confidence is None
            block = upstream.sample_draft_block(**options, greedy_draft=greedy)
        if confidence is not None:
            temperatures = torch.where(block.greedy_mask, 0.0, block.temperatures)  # [R]
            confidence.copy_(draft_confidence(block.corrected_logits, temperatures))
        return block


def drawn_by(seeds: Seeds | None, anchors: Tensor) -> DraftSeeds | None:
    """Return the `DraftSeeds` of requests with a seed, or None; anchors: [R] positions."""
    return None if seeds is None else DraftSeeds(seeds, anchors.long(), seeded_ops.waits)


def draft_params(info: Any, requests: int) -> Any:
    """Return upstream's draft parameters of a batch, read-only."""
    if info is None or info.is_all_greedy:
        return _greedy_params(requests)
    return upstream.resolve_draft_params(sampling_info=info, bs=requests, device="cpu")


@lru_cache(maxsize=64)
def _greedy_params(requests: int) -> Any:
    return upstream.resolve_draft_params(sampling_info=None, bs=requests, device="cpu")


def confidence_of(
    draft_model: Any, anchors: Tensor, drafts: Tensor, features: Tensor
) -> Tensor | None:
    """Return the confidence logits [R, d], w [h_k; W1[x_{k-1}]] + b; None without a head.

    anchors: [R] int64, drafts: [R, d] int64, features: [R * d, n] float. Calibration
    (`step/engine.py`) converts the logits to survivals. Paper, 3.2.1.
    """
    if draft_model.confidence_head is None:
        return None
    weights = find_or_log("confidence of a block in one call", lambda: _weights(draft_model))
    if weights is None or features.dtype is not torch.float32 or not features.is_contiguous():
        _, found = draft_model.compute_confidence(
            anchor_tokens=anchors, draft_tokens=drafts, confidence_features=features
        )
        return found
    run, width = operator(*_CONFIDENCE), features.shape[-1]
    assert run is not None
    anchors, drafts = anchors.contiguous(), drafts.contiguous()
    logits, (weight, bias, w1) = torch.empty(drafts.shape), weights
    run(
        features.data_ptr(), *drafts.shape, width, anchors.data_ptr(), drafts.data_ptr(),
        weight.data_ptr(), None if bias is None else bias.data_ptr(),
        None if w1 is None else w1.data_ptr(), weight.shape[1] - width, logits.data_ptr(),
    )  # fmt: skip
    return logits


def _weights(draft_model: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Resolve the confidence head: weight [1, d + r], bias [1] or None, W1 [V, r] or None (r = 0).

    Raises UnsupportedError if the operator (csrc/heads.cpp) cannot read them.
    """
    require_library()
    head, markov = draft_model.confidence_head, draft_model.markov_head
    require_class("its confidence head", head, upstream.DSparkConfidenceHead)
    w1 = None
    if head.with_markov:
        plain = type(markov).get_prev_embeddings is upstream.VanillaMarkov.get_prev_embeddings
        require(plain, f"{type(markov).__name__} embeds earlier tokens in a way of its own")
        require(markov.vocab_shard is None, "its vocabulary is split over ranks")
        w1 = markov.markov_w1.weight
    weights = (head.proj.weight, head.proj.bias, w1)
    tensors = [each for each in weights if each is not None]
    plain = all(t.is_cpu and t.dtype is torch.float32 and t.is_contiguous() for t in tensors)
    require(plain, "its weights are not float32 without gaps")
    return weights
