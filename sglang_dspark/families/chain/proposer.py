"""Proposer of the one-layer drafters: keep their context and run the layer once per token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.attention import ContextKV
from sglang_dspark.drafter.draft_probs import choose, over_vocabulary
from sglang_dspark.drafter.model import DraftBlock
from sglang_dspark.families.chain.model import Attend, ChainDrafter


def attend_with(context: ContextKV, visible: Tensor) -> Attend:
    """Return attention over the first visible[r] entries of context [R, T, Hkv, D] and own ones."""
    far_keys, far_values = context
    seen = torch.arange(far_keys.shape[1], device=visible.device) < visible[:, None]  # [R, T]

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mask = torch.cat([seen, seen.new_ones(keys.shape[:2])], 1)
        out = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            torch.cat([far_keys, keys], 1).transpose(1, 2),
            torch.cat([far_values, values], 1).transpose(1, 2),
            attn_mask=mask[:, None, None],
            enable_gqa=True,
        )
        return out.transpose(1, 2)

    return attend


class ChainState:
    """Context of the requests in flight; see `evaluation.proposer`.

    Entry j of a slot is at index j - 1, so a request whose anchor is at p has p - 1 entries. The
    target's state at p - 1 waits for the anchor's own entry.
    """

    def __init__(self, proposer: ChainProposer, slots: int, max_len: int):
        self.drafter, self.gamma = proposer.drafter, proposer.gamma
        c = self.drafter.config
        size = (slots, max_len, c.num_kv_heads, c.head_dim)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self.waiting = torch.zeros(slots, self.drafter.state_width)  # [slots, w]

    def prefill(self, rows: Tensor, tokens: Tensor, features: Tensor, hidden: Tensor) -> None:
        """Store a prompt's tokens [R, P] and the target's outputs [R, P, ...] in slots `rows`."""
        states = features if self.drafter.reads_features else hidden
        self._write(rows, torch.zeros_like(rows), tokens[:, 1:], states[:, :-1])
        self.waiting[rows] = states[:, -1]

    def propose(
        self,
        rows: Tensor | None,
        anchor: Tensor,
        lens: Tensor,
        temperature: Tensor | None,
        generator: torch.Generator,
    ) -> DraftBlock:
        """Draft after anchor [R] at positions lens [R]."""
        drafter, picked = self.drafter, slice(None) if rows is None else rows
        length = int(lens.max()) - 1
        context = self.keys[picked, :length], self.values[picked, :length]
        tokens, distributions = [anchor], []
        attend = attend_with(context, lens - 1)
        states = self.waiting[picked]
        steps = drafter.unroll(states, lens - 1, lambda k: tokens[k - 1], attend)
        for out in (next(steps) for _ in range(self.gamma)):
            column, distribution = choose(drafter.logits(out), temperature, generator)
            tokens.append(column if drafter.draft_ids is None else drafter.draft_ids[column])
            if distribution is not None:
                distributions.append(
                    over_vocabulary(distribution, drafter.draft_ids, drafter.config.vocab_size)
                )
        nothing = states.new_empty(len(anchor), 0)
        probs = torch.stack(distributions, 1) if distributions else None
        return DraftBlock(torch.stack(tokens[1:], 1), probs, nothing, nothing)

    def commit(
        self,
        rows: Tensor,
        lens: Tensor,
        tokens: Tensor,
        features: Tensor,
        hidden: Tensor,
        accepted: Tensor,
    ) -> None:
        """Store the verify window's tokens [R, q] at positions lens.. and the target's outputs.

        Of its drafts, accepted [R] stay. Later commits overwrite the entries after them.
        """
        states = features if self.drafter.reads_features else hidden
        before = torch.cat([self.waiting[rows][:, None], states[:, :-1]], 1)
        self._write(rows, lens - 1, tokens, before)
        self.waiting[rows] = states[torch.arange(len(rows)), accepted]

    def open(self, rows: Tensor, anchor: Tensor, lens: Tensor) -> ChainBlock:
        """See `DraftState.open`."""
        return ChainBlock(self, rows, anchor, lens)

    def _write(self, rows: Tensor, first: Tensor, tokens: Tensor, states: Tensor) -> None:
        positions = first[:, None] + torch.arange(tokens.shape[1])
        k, v = self.drafter.context_kv(tokens, states, positions)
        self.keys[rows[:, None], positions] = k
        self.values[rows[:, None], positions] = v


class ChainProposer:
    """A one-layer drafter for the reference engine, run for any number of steps."""

    def __init__(self, drafter: ChainDrafter, gamma: int | None = None):
        self.drafter, self.gamma = drafter, gamma or drafter.config.gamma
        self.target_layer_ids = drafter.target_layer_ids if drafter.reads_features else ()

    def start(self, slots: int, max_len: int) -> ChainState:
        """Return empty context for a run."""
        return ChainState(self, slots, max_len)


class ChainBlock:
    """A block from one pass of the layer per position."""

    def __init__(self, state: ChainState, rows: Tensor, anchor: Tensor, lens: Tensor):
        self.drafter, self.rows = state.drafter, len(rows)
        self.draft_ids = self.drafter.draft_ids
        self.chosen: list[Tensor] = []
        length = int(lens.max()) - 1
        context = state.keys[rows, :length], state.values[rows, :length]
        self.steps = self.drafter.unroll(
            state.waiting[rows],
            lens - 1,
            lambda k: self.chosen[k - 1],
            attend_with(context, lens - 1),
        )

    def logits(self, previous: Tensor) -> Tensor:
        """See `OpenBlock`."""
        self.chosen.append(previous)
        return self.drafter.logits(next(self.steps))

    def confidence(self) -> Tensor:
        """See `OpenBlock`."""
        return torch.empty(self.rows, 0)
