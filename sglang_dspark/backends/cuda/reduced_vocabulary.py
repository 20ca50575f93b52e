"""Draft over a reduced vocabulary on a GPU: multiply the rows of the heads that can be drafted.

A drafter of ours, or a converted one with `draft_vocab_size`, excludes tokens by its own weights
(drafter/heads.py, `restrict_vocabulary`). Upstream reads all rows of the LM head once a block and
all rows of W2 once a position. Here the rows inside are copied once, before graphs are captured:
n (d + r) numbers for n tokens. Logits are -inf outside, where a draft's probability is then
exactly 0, as verification requires. For a vanilla head on one rank; others span the vocabulary.

Upstream: `DSparkDraftMixin.compute_base_logits` (sglang/srt/models/dspark.py) and
`draft_markov_block` (sglang/srt/speculative/dspark_components/dspark_draft.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.heads import restricted_tokens
from sglang_dspark.serving import mode, upstream
from sglang_dspark.step.seeds import DraftSeeds, draft_result

logger = logging.getLogger(__name__)
_REDUCED = "dspark_reduced"  # attribute of a Markov head
Choice = Callable[[Tensor, Tensor, int], Tensor]  # columns [R], logits [R, n], step -> columns


class ReducedVocabulary:
    """The rows of one draft model's heads that can be drafted.

    tokens: [n] int64 ascending. lm_head: [n, d]. head: upstream's, with the model's W1 [V, r] and
    W2 [n, r]. width: V.
    """

    def __init__(self, model: Any, tokens: Tensor) -> None:
        self._model, markov = model, model.markov_head
        self.tokens, self.width = tokens, int(markov.vocab_size)
        self.lm_head, self.w2 = (source[tokens] for source in self._sources())
        self.head = copy.copy(markov)
        self.head._modules = {**markov._modules, "markov_w2": _linear(self.w2)}

    def _sources(self) -> tuple[Tensor, Tensor]:
        head = self._model.markov_head
        return self._model.lm_head.weight.detach(), head.markov_w2.weight.detach()

    @property
    def bytes(self) -> int:
        """Count the bytes of the copied rows."""
        return sum(each.numel() * each.element_size() for each in (self.lm_head, self.w2))

    def renew(self) -> None:
        """Copy the rows again, in place, as captured graphs read them."""
        for rows, source in zip((self.lm_head, self.w2), self._sources(), strict=True):
            rows.copy_(source[self.tokens])
        found = restricted_tokens(self.head.markov_w1.weight, self._sources()[1])
        if found is None or not torch.equal(found, self.tokens):
            logger.warning(
                "sglang-dspark: the updated drafter has another vocabulary; until the server is "
                "started again drafts stay within the old one"
            )

    def base_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `compute_base_logits`: hidden [N, d] -> logits [N, n], and confidence's input."""
        return nn.functional.linear(hidden.to(self.lm_head.dtype), self.lm_head), hidden

    def spread(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Write logits [..., n] to their tokens, [..., V], -inf elsewhere.

        out: a buffer that the draft's graph writes in every replay. It is filled when the graph is
        warmed up, which precedes its capture; a replay writes the same columns again.
        """
        if out is None:
            out = logits.new_full((*logits.shape[:-1], self.width), -torch.inf)
        elif not _is_captured(out):
            out.fill_(-torch.inf)
        return out.index_copy_(-1, self.tokens, logits)

    def draft(
        self,
        *,
        markov_head: Any,
        base_logits: Tensor,
        anchor_tokens: Tensor,
        draft_hidden: Tensor | None,
        step_temperatures: Tensor,
        noise: Any,
        tp_sync: Any,
        logits_out: Tensor | None = None,
        greedy_draft: bool = False,
        choose: Choice | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run `draft_markov_block` over base_logits [R, gamma, n]: tokens, logits [R, gamma, V].

        choose: replaces the columns that a step draws; logits must be kept.
        """
        dtype = markov_head.step_logits_dtype(base_logits.dtype)
        kept = None if greedy_draft else torch.empty_like(base_logits, dtype=dtype)
        previous, drafted = anchor_tokens.long(), []
        for step in range(base_logits.shape[1]):
            column, _ = upstream._draft_step(
                self.head,
                previous,
                base_logits[:, step],
                hidden_states=None, state=None, temperatures=step_temperatures, noise=noise,
                step=step, logits_out=None if kept is None else kept[:, step],
            )  # fmt: skip
            if choose is not None and kept is not None:
                column = choose(column, kept[:, step], step)
            previous = tp_sync.sync(upstream.SpecTpSyncSite.DSPARK_DRAFT, self.tokens[column])
            drafted.append(previous)
        tokens = torch.stack(drafted, dim=1)
        if kept is None:
            return tokens, None
        noise.offset.add_(1)
        return tokens, self.spread(kept, logits_out)

    def draft_by_seeds(
        self, drawn: DraftSeeds, *, sampling_info: Any, device: Any, **block: Any
    ) -> Any:
        """Compute `step.seeds.draft_block`: return upstream's `DraftBlockResult`."""
        params = upstream.resolve_draft_params(
            sampling_info=sampling_info, bs=len(block["base_logits"]), device=device
        )

        def choose(column: Tensor, logits: Tensor, step: int) -> Tensor:
            return drawn.drawn(column, logits, params.temperatures, step, self.tokens)

        tokens, logits = self.draft(
            **block, step_temperatures=params.step_temperatures, choose=choose
        )
        return draft_result(tokens, params, logits)


def reduced_of(markov_head: Any) -> ReducedVocabulary | None:
    """Return the reduction of a head's model; None for a head that spans the vocabulary."""
    found: ReducedVocabulary | None = getattr(markov_head, _REDUCED, None)
    return found


def reduce(worker: Any) -> None:
    """Reduce a worker's draft model if its weights exclude tokens; log one line.

    Call before its graphs are captured, with its target's LM head attached.
    """
    if not (worker._hosts_draft and mode.choice().ours):
        return
    model = worker.draft_model
    head = model.markov_head
    if type(head) is not upstream.VanillaMarkov:
        return
    tokens = restricted_tokens(head.markov_w1.weight, head.markov_w2.weight)
    if tokens is None or len(tokens) == head.vocab_size:
        return
    reason = obstacle(model)
    if reason is not None:
        logger.info("sglang-dspark: drafts span the whole vocabulary: %s", reason)
        return
    reduced = ReducedVocabulary(model, tokens)
    setattr(head, _REDUCED, reduced)
    model.compute_base_logits = reduced.base_logits
    logger.info(
        "sglang-dspark: drafts span %d of %d tokens, whose rows take %.0f MiB",
        len(tokens), head.vocab_size, reduced.bytes / 2**20,
    )  # fmt: skip


def obstacle(model: Any) -> str | None:
    """Return the reason why a draft model's base logits need all rows, or None."""
    lm_head, theirs = model.lm_head, upstream.DSparkDraftMixin.compute_base_logits
    if type(model).compute_base_logits is not theirs:
        return f"{type(model).__name__} has base logits of its own"
    if model.markov_head.vocab_shard is not None or int(getattr(lm_head, "tp_size", 1)) > 1:
        return "it is split over ranks"
    if model.logits_mup_width_multiplier:
        return "the target scales its logits (logits_mup_width_multiplier)"
    method = getattr(lm_head, "quant_method", None)
    plain = isinstance(method, upstream.UnquantizedEmbeddingMethod)
    if not plain and upstream.should_apply_lm_head_quant_method(lm_head, method):
        return "the LM head is quantised"
    if lm_head.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the LM head is {lm_head.weight.dtype}"
    if lm_head.weight.shape[0] < model.markov_head.vocab_size:
        return "the LM head has fewer tokens than the drafter"
    return None


def _is_captured(out: Tensor) -> bool:
    """Return whether work launched on a tensor now becomes a part of a graph."""
    return out.is_cuda and torch.cuda.is_current_stream_capturing()


def _linear(weight: Tensor) -> nn.Linear:
    """Make a layer without bias that has this weight [out, in]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
