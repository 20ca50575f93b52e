"""Draft a block on a CPU: layers, heads left to right (paper, 3.1.2), and confidence.

Re-implements `DraftBlockProposer.propose`, `_run_forward` and `sample_draft_block`
(sglang/srt/speculative/dspark_components/dspark_draft.py). Upstream makes a `ForwardBatch` of about
90 fields and runs the runner's Python; a draft model that our forward pass does not support still
uses these. Heads over a reduced vocabulary are computed by reduced_head.py, any other by upstream,
which spans the whole vocabulary and draws noise for greedy requests too.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import context_kv, reduced_head, seeded_ops
from sglang_dspark.backends.cpu.confidence import confidence_of
from sglang_dspark.backends.cpu.fast_paths import require, supported
from sglang_dspark.backends.cpu.layers import direct_forward
from sglang_dspark.backends.cpu.layers.layer_spec import draft_layer_of
from sglang_dspark.backends.cpu.layers.layer_stack import stack_of_model
from sglang_dspark.backends.cpu.reduced_head import ReducedHead, find_reduced_head
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.serving import mode, upstream
from sglang_dspark.step.seeds import DraftSeeds, Seeds, draft_block, draft_result

_PLAIN = "dspark_plain_ends"  # attribute of a draft model: (its embedding, whether it is plain)


class Drafter:
    """Draft for one worker, to any depth up to gamma."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._runner, self._model = worker.draft_model_runner, worker.draft_model
        self._gamma = int(worker.gamma)
        self._skipped = 0 if worker.sample_from_anchor else 1  # rows before the first drafting row
        # One counter of noise for all depths.
        self._heads = DraftHeads(
            self._model,
            worker._proposer.noise,
            worker._tp_sync,
            find_reduced_head(self._model),
            greedy_only=bool(worker._greedy_draft),
        )
        self._estimates = mode.estimates_confidence(
            has_head=self._model.confidence_head is not None
        )
        self._ids: dict[int, Tensor] = {}  # by depth

    def propose(self, batch: Any, window: Any, depth: int, seeds: Seeds | None) -> Any:
        """Return upstream's `DraftProposal` of `depth` drafts a request, its tokens gamma wide.

        window: upstream's positions and cache slots of all gamma + 1 places of each request. seeds:
        of the sampled requests that have one.
        """
        anchors = batch.spec_info.bonus_tokens.view(-1)  # [R]
        ids = self._block_ids(anchors, depth + self._skipped)  # [R, rows]
        with self._worker._draft_context():
            hidden = self._drafting(self._hidden(batch, ids, window), depth)  # [R * depth, d]
            base, features = self._heads.base_logits(hidden)
            base = base.view(len(ids), depth, -1)  # [R, depth, n]
            estimated = torch.empty(base.shape[:2]) if self._estimates else None  # [R, depth]
            block = self._heads.sample(
                base, anchors, hidden, batch.sampling_info, batch.seq_lens, seeds, estimated
            )
            logits = confidence_of(self._model, anchors, block.draft_tokens, features)
        return upstream.DraftProposal(
            draft_block_ids=ids,
            draft_block=widened(block, self._gamma),
            confidence_raw=logits if estimated is None else estimated,
        )

    def _drafting(self, hidden: Tensor, depth: int) -> Tensor:
        """Drop the rows that do not draft: [R * rows, d] -> [R * depth, d]."""
        if not self._skipped:
            return hidden
        return hidden.unflatten(0, (-1, depth + self._skipped))[:, self._skipped :].flatten(0, 1)

    def _block_ids(self, anchors: Tensor, rows: int) -> Tensor:
        """Return the draft's input ids [R, rows]: anchors, then mask tokens."""
        ids = self._ids.get(rows)
        if ids is None or len(ids) < len(anchors):
            mask = int(self._worker._mask_token_id)
            ids = self._ids[rows] = torch.full((len(anchors), rows), mask, dtype=torch.int64)
        ids = ids[: len(anchors)]
        ids[:, 0].copy_(anchors)
        return ids

    def _hidden(self, batch: Any, ids: Tensor, window: Any) -> Tensor:
        """Compute hidden states [R * rows, d] of ids [R, rows]; write their context first."""
        runner, model, rows = self._runner, self._model, ids.shape[1]
        table = runner.req_to_token_pool.req_to_token
        context_kv.settle(model, table, batch.req_pool_indices, batch.seq_lens)
        positions = window.positions_2d[:, :rows].reshape(-1)
        slots = window.verify_cache_loc_2d[:, :rows].reshape(-1)
        if model is runner.model and direct_forward.supports_runner(runner) and _is_plain(model):
            spec = _block_spec(rows, str(self._worker.device))
            seen = direct_forward.Window(
                ids.view(-1), positions, slots, batch.req_pool_indices, batch.seq_lens, spec
            )
            stack = stack_of_model(model, draft_layer_of)
            done = stack and direct_forward.run(runner, stack, model.embed_tokens, seen)
            if done:
                hidden: Tensor = done[0]
                return hidden
        return self._through_runner(batch, ids, window, positions, slots)

    def _through_runner(
        self, batch: Any, ids: Tensor, window: Any, positions: Tensor, slots: Tensor
    ) -> Tensor:
        """Run the same pass by SGLang's runner."""
        runner, requests, tokens = self._runner, len(ids), ids.numel()
        forward = upstream.ForwardBatch(
            forward_mode=upstream.ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=slots,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            positions=positions,
            input_embeds=self._embedded(ids),
            spec_algorithm=upstream.SpeculativeAlgorithm.DSPARK,
            spec_info=_block_spec(ids.shape[1], str(self._worker.device)),
            capture_hidden_mode=upstream.CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=tokens,
        )
        forward.num_token_non_padded_cpu = tokens
        if upstream.enable_num_token_non_padded():
            forward.num_token_non_padded = torch.tensor([tokens], dtype=torch.int32)
            forward.global_num_token_non_padded = torch.tensor(tokens, dtype=torch.int32)
        window.kv_loc_plan.bind(forward, runner.kv_index_translator, cols=slice(0, ids.shape[1]))
        with torch.inference_mode():
            done = runner.forward(forward)
        hidden: Tensor | None = done.logits_output.hidden_states
        assert hidden is not None, "a draft model returns its hidden states"
        return hidden

    def _embedded(self, ids: Tensor) -> Tensor | None:
        """Embed ids by the target, [R * depth, d], for a model without an embedding; else None."""
        model = self._model
        if upstream.envs.SGLANG_DSPARK_EMBED_IN_GRAPH.get() and hasattr(model, "forward_embed"):
            return None
        target = self._worker.target_worker.model_runner.model
        embedded: Tensor = upstream.unwrap_lora_layer(target.get_input_embeddings())(ids)
        return embedded.view(-1, embedded.shape[-1])


def widened(block: Any, gamma: int) -> Any:
    """Pad the tokens of a `DraftBlockResult` to width gamma; the padding is not read."""
    import msgspec

    missing = gamma - block.draft_tokens.shape[1]
    if not missing:
        return block
    tokens = torch.nn.functional.pad(block.draft_tokens, (0, missing))  # [R, gamma]
    return msgspec.structs.replace(block, draft_tokens=tokens)


@lru_cache(maxsize=64)
def _block_spec(depth: int, device: str) -> Any:
    """Build upstream's description of blocks of `depth` tokens."""
    return upstream.make_draft_block_spec_info(draft_token_num=depth, device=device)


def _is_plain(model: Any) -> bool:
    """Return whether a block is embedding and layers; rechecked when the embedding changes."""
    embedding = model.embed_tokens
    found = model.__dict__.get(_PLAIN)
    if found is None or found[0] is not embedding:
        name = f"fast draft pass of {type(model).__name__}"
        plain = supported(name, lambda: _require_plain(model))
        found = model.__dict__[_PLAIN] = (embedding, plain)
    return bool(found[1])


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
        self._reduced = reduced
        self._model, self._noise = model, noise
        self._shared = {"noise": noise, "tp_sync": tp_sync}  # arguments of `sample_draft_block`
        self._greedy_only = greedy_only
        self._agree = partial(tp_sync.sync, upstream.SpecTpSyncSite.DSPARK_DRAFT)
        self._together = bool(tp_sync.enabled(upstream.SpecTpSyncSite.DSPARK_DRAFT))

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
        reduced = self._reduced
        if reduced is not None and greedy:
            agree = self._agree if self._together else None
            tokens = reduced_head.draft_greedy(reduced, base, anchors.long(), agree, confidence)
            return draft_result(tokens, greedy_params(len(base)))
        if reduced is not None:
            return self._sampled(reduced, base, anchors, info, positions, seeds, confidence)
        options = {
            "base_logits": base,
            "anchor_tokens": anchors,
            "draft_hidden": hidden.view(*base.shape[:2], -1),
            "sampling_info": info,
            "markov_head": self._model.markov_head,
            "device": base.device,
            **self._shared,
        }
        if (seeded := drawn_by(seeds, positions)) is not None and not greedy:
            block = draft_block(seeded, **options)
        elif greedy and confidence is not None:
            return _greedy_estimated(options, confidence)
        else:  # else upstream would save and noise the unread logits of greedy requests too
            block = upstream.sample_draft_block(**options, greedy_draft=greedy)
        return _estimated(block, confidence)

    def _sampled(
        self,
        reduced: ReducedHead,
        base: Tensor,
        anchors: Tensor,
        info: Any,
        positions: Tensor,
        seeds: Seeds | None,
        confidence: Tensor | None,
    ) -> Any:
        params = _params(info, base)
        key, offset = self._noise.key, int(self._noise.offset)
        tokens, logits = reduced_head.draft_sampled(
            reduced,
            base,
            anchors,
            params.step_temperatures,
            reduced_head.block_uniforms(key, offset, (base.shape[0], base.shape[1])),
            self._agree,
            drawn_by(seeds, positions),
            confidence,
        )
        self._noise.offset.add_(1)
        return draft_result(tokens, params, logits)


def drawn_by(seeds: Seeds | None, anchors: Tensor) -> DraftSeeds | None:
    """Return the `DraftSeeds` of requests with a seed, or None; anchors: [R] positions."""
    return None if seeds is None else DraftSeeds(seeds, anchors.long(), seeded_ops.waits)


def _params(info: Any, base: Tensor) -> Any:
    """Return upstream's parameters of the requests of base logits [R, depth, n]."""
    return upstream.resolve_draft_params(sampling_info=info, bs=len(base), device=base.device)


def _greedy_estimated(options: dict[str, Any], confidence: Tensor) -> Any:
    """Draft greedily by upstream's sampled steps, which keep the logits; its greedy steps do not.

    options: the arguments of `sample_draft_block`.
    """
    block = upstream.sample_draft_block(**options | {"sampling_info": None}, greedy_draft=False)
    _estimated(block, confidence)
    return draft_result(
        block.draft_tokens, _params(options["sampling_info"], options["base_logits"])
    )


def _estimated(block: Any, confidence: Tensor | None) -> Any:
    """Fill confidence [R, depth] from the logits of upstream's block; return the block."""
    if confidence is not None:
        temperatures = torch.where(block.greedy_mask, 0.0, block.temperatures)  # [R]
        confidence.copy_(draft_confidence(block.corrected_logits, temperatures))
    return block


@lru_cache(maxsize=64)
def greedy_params(requests: int) -> Any:
    """Build upstream's parameters of greedy rows, shared and read-only."""
    return upstream.resolve_draft_params(
        sampling_info=None, bs=requests, device=torch.device("cpu")
    )
