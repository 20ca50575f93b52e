"""Keep a chain drafter's context in the draft's cache, and draft from it, on a GPU.

The entry of a token and the target's state before it has the position and the slot of that state,
one before the token's (families/chain/model.py). So the state of a request's last token waits, by
pool row, for the token after it, and a draft's window begins one position before the anchor. No
value is read back to the host.

Rejected rows are written, too: as in commit.py, a slot is written again before it is read. A row
without a request, and the first entry of a request whose state does not wait, go to slot 0, which
no request owns. A prefix that is found in the cache ends with the first request's next token, or
with an older entry if that request ended there; acceptance drops a little and the output is
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cuda.chain_model import ChainModel
from sglang_dspark.kernels.pass_rows import PassRows
from sglang_dspark.serving import upstream
from sglang_dspark.step.verify import window_of


class ChainContext:
    """Keys and values in the draft's cache, and waiting states by pool row.

    waiting: [pool rows, w], the states of each row's last token. Graphs have its address.
    """

    def __init__(self, worker: Any) -> None:
        """Use the pools of `worker`, upstream's, before its graphs are captured."""
        self._worker, self._model = worker, worker.draft_model
        self._pool = worker.draft_model_runner.token_to_kv_pool
        table = worker.model_runner.req_to_token_pool.req_to_token  # [rows, context]
        device, rows = table.device, len(table)
        width, dtype = self._model.state_width, worker.model_runner.dtype
        self.waiting = torch.zeros(rows, width, dtype=dtype, device=device)
        # Positions after the states, and their slots: behind a pass's launch the scheduler may give
        # a row of the table to another request.
        self._ends, self._slots = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._owners: dict[int, str] = {}  # pool row: id of the request whose state waits
        self._prefill: Any = None

    def begin_prefill(self, batch: Any) -> None:
        """Record a batch whose features are written next: its tokens make the entries."""
        self._prefill = batch

    @torch.no_grad()
    def prefill(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the entries of a prefill: states [n, w], positions and slots [n] int64."""
        batch, device = self._prefill, states.device
        rows = batch.req_pool_indices_cpu.tolist()
        whose = dict(zip(rows, (req.rid for req in batch.reqs), strict=True))
        owned = [self._owners.get(row) == rid for row, rid in whose.items()]
        self._owners |= whose
        indptr = [0, *accumulate(batch.extend_lens)]
        ends, mine = (
            upstream.async_h2d(each, dtype=torch.int64, device=device) for each in (indptr, owned)
        )
        first, owners = ends[:-1], batch.req_pool_indices.long()
        begins = positions[first]
        goes_on = (self._ends[owners] == begins) & mine.bool()  # the next chunk
        # Places of images have ids outside the vocabulary.
        last_id = int(self._model.config.vocab_size) - 1
        tokens = batch.input_ids[: len(positions)].long().clamp(0, last_id)
        self._write(tokens, states, positions, slots, first, owners, goes_on)
        last = ends[1:] - 1
        self._wait(owners, states[last], positions[last], slots[last])

    @torch.no_grad()
    def commit(
        self, rows: PassRows, slots: Tensor, hidden: Tensor, indptr: Tensor, counts: Tensor,
        owners: Tensor,
    ) -> None:  # fmt: skip
        """Write the entries of a verify pass, and keep the state of each last accepted row.

        slots: [T], of the draft's cache, 0 for rows without a request. hidden: [T, w]. indptr: [R +
        1] int32, of the windows. counts: [R], rows that were accepted, the anchor included. owners:
        [R], pool rows.
        """
        first, owners = indptr[:-1].long(), owners.long()
        known = torch.ones_like(owners, dtype=torch.bool)
        self._write(rows.ids, hidden, rows.positions, slots.long(), first, owners, known)
        last = first + counts.long() - 1
        self._wait(owners, hidden[last], rows.positions[last], slots[last].long())

    def _write(
        self, tokens: Tensor, states: Tensor, positions: Tensor, slots: Tensor,
        first: Tensor, owners: Tensor, known: Tensor,
    ) -> None:  # fmt: skip
        """Write one entry a row: its token [T], the state and the slot of the row before it.

        first: [R], a request's first row, before which its waiting state belongs where `known`.
        """
        states, at = states.roll(1, 0), slots.roll(1, 0)
        states[first] = self.waiting[owners].to(states.dtype)
        at[first] = torch.where(known, self._slots[owners], 0)
        at = torch.where(slots > 0, at, 0)
        at_state = (positions - 1).clamp(min=0)
        keys, values = self._model.keys_values(tokens, states, at_state)
        attention = self._model.inner.model.layers[0].self_attn.attn.attn
        self._pool.set_kv_buffer(attention, upstream.KVWriteLoc(at, None), keys, values)

    def _wait(self, owners: Tensor, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        self.waiting[owners] = states.to(self.waiting.dtype)
        self._ends[owners], self._slots[owners] = positions + 1, slots

    def propose(self, original: Any, *, batch: Any, verify_window: Any, **options: Any) -> Any:
        """Call upstream's `propose` on windows that begin with the position before the anchor."""
        earlier = copy(batch)
        earlier.seq_lens = batch.seq_lens - 1
        if batch.seq_lens_cpu is not None:
            earlier.seq_lens_cpu = batch.seq_lens_cpu - 1
        worker = self._worker
        window = window_of(worker, earlier)
        with _eager_without(worker._proposer._draft_sampler, worker.draft_model_runner):
            return original(batch=earlier, verify_window=window, **options)


@contextmanager
def _eager_without(sampler: Any, runner: Any) -> Iterator[None]:
    """Draft outside of graphs where the steps are not in them: for requests with a seed."""
    graphs = runner.decode_cuda_graph_runner
    if sampler is None:
        runner.decode_cuda_graph_runner = None
    try:
        yield
    finally:
        runner.decode_cuda_graph_runner = graphs


def context_of(worker: Any) -> ChainContext | None:
    """Return the context of a worker whose drafter is a chain, or None."""
    model = worker.draft_model
    return model.context if isinstance(model, ChainModel) else None


def attach(worker: Any) -> None:
    """Give a chain drafter its context and its windows; call before graphs are captured."""
    if worker._hosts_draft and isinstance(worker.draft_model, ChainModel):
        context = worker.draft_model.context = ChainContext(worker)
        proposer = worker._proposer
        proposer.propose = partial(context.propose, proposer.propose)
