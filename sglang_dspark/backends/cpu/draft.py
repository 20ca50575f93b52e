"""Draft a block on a CPU: layers, heads and confidence, called one after the other.

Re-implements `DraftBlockProposer.propose` and `_run_forward`
(sglang/srt/speculative/dspark_components/dspark_draft.py). Upstream makes a `ForwardBatch` of some
90 fields and goes through the runner's Python; a draft model that our forward does not serve still
does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import context_kv
from sglang_dspark.backends.cpu.confidence import confidence_of
from sglang_dspark.backends.cpu.draft_heads import DraftHeads
from sglang_dspark.backends.cpu.fast_paths import fits, need
from sglang_dspark.backends.cpu.layers import forward as layer_forward
from sglang_dspark.backends.cpu.layers.models import stack_of_model
from sglang_dspark.backends.cpu.layers.support import draft_layer_of, ending_of
from sglang_dspark.serving import upstream
from sglang_dspark.step.seeds import Seeds

_PLAIN = "dspark_plain_ends"  # attribute of a draft model: (its embedding, the answer)


class Drafter:
    """Drafts for one worker, to any depth up to gamma."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._runner, self._model = worker.draft_model_runner, worker.draft_model
        self._gamma = int(worker.gamma)
        # One counter of noise for all depths.
        self._heads = DraftHeads(
            self._model,
            worker._proposer.noise,
            worker._tp_sync,
            greedy_only=bool(worker._greedy_draft),
        )
        self._ids: dict[int, Tensor] = {}  # by depth

    def propose(self, batch: Any, window: Any, depth: int, seeds: Seeds | None) -> Any:
        """Upstream's `DraftProposal` of `depth` drafts a request, its tokens gamma wide.

        window: upstream's positions and cache slots of all places of each request. seeds: of the
        sampled requests that have one.
        """
        anchors = batch.spec_info.bonus_tokens.view(-1)  # [R]
        ids = self._block_ids(anchors, depth)  # [R, depth]
        with self._worker._draft_context():
            hidden = self._hidden(batch, ids, window)  # [R * depth, d]
            base, features = self._heads.base_logits(hidden)
            base = base.view(len(ids), depth, -1)  # [R, depth, n]
            block = self._heads.sample(
                base, anchors, hidden, batch.sampling_info, batch.seq_lens, seeds
            )
            confidence = confidence_of(self._model, anchors, block.draft_tokens, features)
        return upstream.DraftProposal(
            draft_block_ids=ids,
            draft_block=_widened(block, self._gamma),
            confidence=confidence[0],
            confidence_raw=confidence[1],
        )

    def _block_ids(self, anchors: Tensor, depth: int) -> Tensor:
        """The draft's input ids [R, depth]: anchors, then mask tokens."""
        ids = self._ids.get(depth)
        if ids is None or len(ids) < len(anchors):
            mask = int(self._worker._mask_token_id)
            ids = self._ids[depth] = torch.full((len(anchors), depth), mask, dtype=torch.int64)
        ids = ids[: len(anchors)]
        ids[:, 0].copy_(anchors)
        return ids

    def _hidden(self, batch: Any, ids: Tensor, window: Any) -> Tensor:
        """Hidden states [R * depth, d] of the block, its context written first."""
        runner, model, depth = self._runner, self._model, ids.shape[1]
        table = runner.req_to_token_pool.req_to_token
        context_kv.settle(model, table, batch.req_pool_indices, batch.seq_lens)
        positions = window.positions_2d[:, :depth].reshape(-1)
        slots = window.verify_cache_loc_2d[:, :depth].reshape(-1)
        if model is runner.model and layer_forward.serves(runner) and _is_plain(model):
            spec = _block_spec(depth, str(self._worker.device))
            seen = layer_forward.Window(
                ids.view(-1), positions, slots, batch.req_pool_indices, batch.seq_lens, spec
            )
            stack = stack_of_model(model, draft_layer_of, ending_of)
            done = stack and layer_forward.run(runner, stack, model.embed_tokens, seen)
            if done:
                hidden: Tensor = done[0]
                return hidden
        return self._through_runner(batch, ids, window, positions, slots)

    def _through_runner(
        self, batch: Any, ids: Tensor, window: Any, positions: Tensor, slots: Tensor
    ) -> Tensor:
        """The same pass by SGLang's runner."""
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
        """Embeddings [R * depth, d] of a model that has none of its own; None: it embeds."""
        model = self._model
        if upstream.envs.SGLANG_DSPARK_EMBED_IN_GRAPH.get() and hasattr(model, "forward_embed"):
            return None
        target = self._worker.target_worker.model_runner.model
        embedded: Tensor = upstream.unwrap_lora_layer(target.get_input_embeddings())(ids)
        return embedded.view(-1, embedded.shape[-1])


def _widened(block: Any, gamma: int) -> Any:
    """A shallow block with tokens for gamma places: nothing reads what is added."""
    import msgspec

    missing = gamma - block.draft_tokens.shape[1]
    if not missing:
        return block
    tokens = torch.nn.functional.pad(block.draft_tokens, (0, missing))  # [R, gamma]
    return msgspec.structs.replace(block, draft_tokens=tokens)


@lru_cache(maxsize=64)
def _block_spec(depth: int, device: str) -> Any:
    """Upstream's description of blocks of `depth` tokens."""
    return upstream.make_draft_block_spec_info(draft_token_num=depth, device=device)


def _is_plain(model: Any) -> bool:
    """Return whether a block is embedding and layers; asked again for another embedding."""
    embedding = model.embed_tokens
    found = model.__dict__.get(_PLAIN)
    if found is None or found[0] is not embedding:
        name = f"short draft pass of {type(model).__name__}"
        plain = fits(name, lambda: _require_plain(model))
        found = model.__dict__[_PLAIN] = (embedding, plain)
    return bool(found[1])


def _require_plain(model: Any) -> None:

    need(upstream.envs.SGLANG_DSPARK_EMBED_IN_GRAPH.get(), "SGLANG_DSPARK_EMBED_IN_GRAPH is off")
    need(hasattr(model, "forward_embed"), "it embeds no tokens of its own")
    layer_forward.require_plain_embedding(model.embed_tokens)
