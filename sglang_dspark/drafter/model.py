"""DSpark drafter: hidden states -> draft block -> confidence (paper, 3.1 and 3.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.attention import ContextKV, PackedLayout
from sglang_dspark.drafter.backbone import Backbone
from sglang_dspark.drafter.confidence import ConfidenceHead
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.drafter.draft_probs import choose, over_vocabulary
from sglang_dspark.drafter.heads import HEADS, allowed_vocabulary


@dataclass(frozen=True)
class DraftBlock:
    """Proposals of one draft pass for R requests.

    tokens: [R, gamma] int64; probs: [R, gamma, V] float32, the distribution each token was drawn
    from, or None when drafting greedily; confidence: [R, gamma] conditional survival c_k in (0, 1),
    not calibrated; confidence_logits: [R, gamma], of a head, or of a DSpark drafter without one by
    `draft_confidence`. Drafters of other families give [R, 0].
    """

    tokens: Tensor
    probs: Tensor | None
    confidence: Tensor
    confidence_logits: Tensor


class DSparkDrafter(nn.Module):
    """Backbone, sequential head and confidence head around the target's embedding and LM head."""

    embed_weight: Tensor
    head_weight: Tensor

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.markov_head = HEADS[config.markov_head_type](config)
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        empty = torch.empty(0, config.hidden_size)
        self.register_buffer("embed_weight", empty, persistent=False)
        self.register_buffer("head_weight", empty, persistent=False)
        self.register_buffer("draft_ids", None, persistent=False)
        self._kept: tuple[tuple[int, int], Tensor] | None = None

    def attach(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
        """Share the target's embedding and LM head, both [V, d]; neither is trained or saved.

        Also finds a reduced draft vocabulary in the Markov weights, so that base logits are
        computed for its tokens only.
        """
        shape = (self.config.vocab_size, self.config.hidden_size)
        for name, weight in (("embedding", embed_tokens), ("LM head", lm_head)):
            if tuple(weight.shape) != shape:
                raise ValueError(f"target {name} is {tuple(weight.shape)}, drafter wants {shape}")
        self.embed_weight, full_head = embed_tokens.detach(), lm_head.detach()
        self.draft_ids, self._kept = allowed_vocabulary(self.markov_head), None
        self.head_weight = full_head if self.draft_ids is None else full_head[self.draft_ids]

    def context_kv(self, features: Tensor, positions: Tensor) -> list[ContextKV]:
        """Map target features [..., m*d] at positions [...] to k, v [..., Hkv, D] per layer."""
        return self.backbone.context_kv(features, positions)

    def forward_blocks(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Sequence[ContextKV],
        visible: Tensor | PackedLayout,
    ) -> Tensor:
        """Run A blocks in each of S sequences, or P packed blocks, in one pass.

        anchors, positions: [S, A] or [P], token id and position of each anchor. context: per layer
        keys, values [S, T, Hkv, D], or [N, Hkv, D] end to end. visible: [S, A], number of context
        tokens that each block sees (those before its anchor), or the packed blocks' layout. Returns
        h [S, A, gamma, d], or [P, gamma, d], of the rows that draft. A drafter that does not sample
        from its anchor has one more row, the first, which no loss trained.
        """
        skipped = 0 if self.config.sample_from_anchor else 1
        rows = self.config.gamma + skipped
        ids = anchors.new_full((*anchors.shape, rows), self.config.mask_token_id)
        ids[..., 0] = anchors
        x = self.embed_weight[ids]
        if self.config.family == "gemma4":
            x = x * self.config.hidden_size**0.5
        return self.backbone(x, positions, context, visible)[..., skipped:, :]

    def forward_block(
        self, anchor: Tensor, positions: Tensor, context: Sequence[ContextKV], context_lens: Tensor
    ) -> Tensor:
        """Run one block per request: anchor, positions, context_lens [R] -> h [R, gamma, d]."""
        h = self.forward_blocks(anchor[:, None], positions[:, None], context, context_lens[:, None])
        return h[:, 0]

    def base_logits(self, h: Tensor) -> Tensor:
        """Return U = h W_head^T, [..., gamma, d] -> [..., gamma, V'] over the draft vocabulary.

        V' is V, or the size of the reduced draft vocabulary; `draft_ids` maps it to token ids.
        """
        logits = nn.functional.linear(h, self.head_weight)
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def draft(
        self,
        anchor: Tensor,
        h: Tensor,
        temperature: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> DraftBlock:
        """Draft left to right over the block: x_k ~ softmax((U_k + B(x_{k-1})) / T).

        anchor [R] int64, h [R, gamma, d]; temperature [R] (0: that row is greedy), None: all
        greedy. Greedy rows of a mixed batch get one-hot probabilities.
        """
        base, transition = self.base_logits(h), self._transition()
        state = self.markov_head.start(len(anchor))
        previous, tokens, distributions, embedded, estimates = anchor, [], [], [], []
        for k in range(h.shape[1]):
            embedded.append(self.markov_head.embed(previous))
            latent, state = self.markov_head.latent(embedded[-1], h[:, k], state)
            logits = base[:, k] + nn.functional.linear(latent, transition)
            if self.confidence_head is None:
                estimates.append(draft_confidence(logits[:, None], temperature))
            chosen, distribution = choose(logits, temperature, generator)
            if distribution is not None:
                distributions.append(distribution)
            previous = chosen if self.draft_ids is None else self.draft_ids[chosen]
            tokens.append(previous)
        probs = None
        if distributions:
            probs = over_vocabulary(
                torch.stack(distributions, 1), self.draft_ids, self.config.vocab_size
            )
        if estimates:
            logits = torch.cat(estimates, 1)  # [R, gamma]
        else:
            logits = self.confidence(h, torch.stack(embedded, 1))
        return DraftBlock(torch.stack(tokens, 1), probs, torch.sigmoid(logits), logits)

    def _transition(self) -> Tensor:
        """Return W2 over the draft vocabulary, [V', r].

        Its rows are gathered once, and again only if W2 was changed or replaced. A gather at every
        position costs ten times the product, and the loop must stay a small part of a round.
        """
        weight = self.markov_head.markov_w2.weight
        if self.draft_ids is None:
            return weight
        version = (weight.data_ptr(), weight._version)
        if self._kept is None or self._kept[0] != version:
            self._kept = (version, weight.detach()[self.draft_ids])
        return self._kept[1]

    def confidence(self, h: Tensor, embedded: Tensor) -> Tensor:
        """Return confidence logits [..., gamma]; +inf (always verify) without a confidence head."""
        if self.confidence_head is None:
            return h.new_full(h.shape[:-1], float("inf"))
        return self.confidence_head(h, embedded)
