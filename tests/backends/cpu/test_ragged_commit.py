"""Compare both caches after ragged steps with plain decoding's, row by row.

The target is a stub whose hidden state is a function of token and position, so the distribution of
every row is known. Layout, window, accept rule, commit, injection and both pools are the real ones.
Draft context in a wrong slot costs no wrong token, only acceptance: the rows themselves have
to be looked at.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang_dspark.backends.cpu import device as device_module
from sglang_dspark.backends.cpu import plain_step
from sglang_dspark.backends.cpu.context_kv import write_target_hidden_kv
from sglang_dspark.backends.cpu.device import HostDevice
from sglang_dspark.backends.cpu.fast_paths import require
from sglang_dspark.backends.cpu.ragged_layout import layout_of
from sglang_dspark.step.rules import Rules
from sglang_dspark.step.verify import VerifyInput
from tests.backends.cpu.step_world import worker_for
from tests.backends.cpu.test_context_kv import (
    DIM,
    FEATURES,
    KV_HEADS,
    SLOTS,
    Draft,
    draft,
    pool,
    upstreams,
)

__all__ = ["draft"]  # the fixture

GAMMA, VOCAB, REQUESTS = 5, 50, 4
WIDTH = GAMMA + 1
PROMPTS = (3, 9, 1, 6)  # tokens of each request's prompt
LONGEST = SLOTS // REQUESTS  # slots that each request owns, in any order
STEPS = (  # drafts admitted and, of them, how many are right
    ([5, 0, 3, 1], [2, 0, 3, 0]),
    ([0, 5, 2, 4], [0, 5, 0, 3]),
    ([0, 0, 0, 0], [0, 0, 0, 0]),
    ([1, 4, 0, 5], [1, 4, 0, 1]),
    ([5, 5, 5, 2], [4, 5, 0, 2]),
)


class Target:
    """Hidden states by token and position; the next token is (3 token + position + 1) % VOCAB."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randn(VOCAB, FEATURES, generator=generator)
        self._places = torch.randn(LONGEST, FEATURES, generator=generator)
        self.written = torch.full((SLOTS + 1, 2), -1)  # by slot: the token and position there

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[n], [n] -> [n, FEATURES]"""
        return self._tokens[tokens] + self._places[positions]

    def following(self, token: int, position: int) -> int:
        return (3 * token + position + 1) % VOCAB

    def verify(self, worker: Any, batch: Any, layout: Any, window: Any, plan: Any = None) -> Any:
        """`verify_forward`: a pass over packed rows, its K and V included."""
        ids, positions = window.verify_ids, window.positions
        self.written[window.verify_cache_loc] = torch.stack([ids, positions], 1)
        logits = torch.zeros(len(ids), VOCAB)
        pairs = zip(ids.tolist(), positions.tolist(), strict=True)
        for row, (token, position) in enumerate(pairs):
            logits[row, self.following(token, position)] = 1.0
        return SimpleNamespace(hidden_states=self.hidden(ids, positions), next_token_logits=logits)


def plain_tokens(target: Target, count: int) -> list[list[int]]:
    """The tokens of plain decoding, prompts included: `count` behind each prompt."""
    texts = []
    for r, prompt in enumerate(PROMPTS):
        text = [(11 * r + 5 * i) % VOCAB for i in range(prompt)]
        while len(text) < prompt + count:
            text.append(target.following(text[-1], len(text) - 1))
        texts.append(text)
    return texts


def drafts_of(text: list[int], anchor: int, right: int) -> list[int]:
    """A block behind position `anchor` whose first `right` tokens are the target's."""
    truth = text[anchor + 1 : anchor + 1 + GAMMA]
    return [t if k < right else (t + 1) % VOCAB for k, t in enumerate(truth)]


def worker_of(model: Draft, buffers: Any, table: Tensor) -> Any:
    """Upstream's worker with this draft model, its pool and the table of slots."""
    places = SimpleNamespace(req_to_token=table.to(torch.int32))
    model.markov_head = model.lm_head = None  # another head than the kernels know: upstream's code
    vars(model)["write_target_hidden_kv"] = partial(write_target_hidden_kv, upstreams, model)
    return worker_for(
        GAMMA,
        draft_model=model,
        draft_model_runner=SimpleNamespace(token_to_kv_pool=buffers),
        model_runner=SimpleNamespace(device="cpu", req_to_token_pool=places),
    )


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """Stands for the target's pass in every stage that makes one."""
    target = Target()
    for module in (device_module, plain_step):
        monkeypatch.setattr(module, "verify_forward", target.verify)
    return target


def device_of(worker: Any) -> HostDevice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_step, "require_worker", lambda worker: require(False, "for this test"))
        return HostDevice(worker)


def ragged_step(
    device: HostDevice,
    table: Tensor,
    lens: Tensor,
    blocks: Tensor,
    admitted: list[int],
    spread: bool,
) -> tuple[Tensor, Tensor]:
    """One step: pass, accept, commit.

    lens: [R] tokens before the anchors; blocks: [R, WIDTH] anchors and drafts. spread: log-
    probabilities are asked for, so logits are spread over whole windows. Returns the tokens that
    came out, [R, WIDTH], and how many of them count, [R].
    """
    positions = lens[:, None] + torch.arange(WIDTH)
    slots = table.gather(1, positions).reshape(-1)
    plan = SimpleNamespace(write_ids=lambda translator, cols: slots)
    window = SimpleNamespace(positions_2d=positions, verify_cache_loc=slots, kv_loc_plan=plan)
    layout, drafts = layout_of(tuple(admitted)), blocks[:, 1:]
    batch = SimpleNamespace(
        has_grammar=False,
        return_logprob=spread,
        sampling_info=None,
        seq_lens=lens,
        req_pool_indices=torch.arange(REQUESTS),
    )
    block = SimpleNamespace(draft_tokens=drafts)
    proposal = SimpleNamespace(draft_block_ids=blocks, draft_block=block)
    asked = VerifyInput(batch, None, window, proposal, layout, blocks, True, False, Rules())
    verified = device.run(asked)
    assert spread == (verified.outputs.next_token_logits.shape[0] == REQUESTS * WIDTH)
    outs = device.accept(asked, verified)
    device.commit(asked, verified, outs)
    assert outs.new_seq_lens.tolist() == (lens + outs.commit_lens).tolist()
    return outs.out_tokens, outs.commit_lens


@pytest.mark.parametrize("spread", [False, True])
def test_both_caches_hold_what_plain_decoding_writes(
    draft: Draft, target: Target, spread: bool
) -> None:
    """The draft's rows against a plain pass over each request's own tokens, one request at a time;
    the target's by the token and position that were computed for every slot."""
    ours, theirs = pool(), pool()
    texts = plain_tokens(target, sum(max(right) + 1 for _, right in STEPS) + WIDTH)
    table = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)) + 1
    table = table.view(REQUESTS, LONGEST)
    device, lens = device_of(worker_of(draft, ours, table)), torch.tensor(PROMPTS) - 1
    for admitted, right in STEPS:
        blocks = torch.tensor(
            [
                [texts[r][at], *drafts_of(texts[r], at, right[r])]
                for r, at in enumerate(lens.tolist())
            ]
        )
        tokens, counts = ragged_step(device, table, lens, blocks, admitted, spread)
        assert counts.tolist() == [n + 1 for n in right]
        for r, (at, n) in enumerate(zip(lens.tolist(), counts.tolist(), strict=True)):
            assert tokens[r, :n].tolist() == texts[r][at + 1 : at + 1 + n]
        lens = lens + counts

    spans = [(prompt - 1, end) for prompt, end in zip(PROMPTS, lens.tolist(), strict=True)]
    assert_caches_hold(draft, target, ours, theirs, texts, table, spans)


def assert_caches_hold(
    draft: Draft, target: Target, ours: Any, theirs: Any, texts: Any, table: Tensor, spans: Any
) -> None:
    """Of each request's positions, in its row of `table`: the target's cache is what was computed,
    and the draft's, `ours`, what `draft` writes into `theirs`, slots without a row included."""
    for text, row, (begin, end) in zip(texts, table, spans, strict=True):
        positions = torch.arange(begin, end)
        own, slots = torch.tensor(text)[positions], row[positions]
        with torch.inference_mode():
            upstreams(
                draft,
                target_hidden=target.hidden(own, positions),
                pool=theirs,
                positions=positions,
                cache_loc=slots,
            )
        assert target.written[slots].tolist() == torch.stack([own, positions], 1).tolist()
    pairs = zip((*ours.k_buffer, *ours.v_buffer), (*theirs.k_buffer, *theirs.v_buffer), strict=True)
    for mine, plain in pairs:
        assert mine.shape[1:] == (KV_HEADS, DIM)
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)  # unused slots included
