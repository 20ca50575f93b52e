"""Blocks drafted by the operator in Triton's interpreter and by SGLang's torch steps, from the same
noise; in a process of its own, as the interpreter is chosen before Triton is imported. Prints JSON.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.models.dspark import GatedMarkovHead, RNNHead, VanillaMarkov
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block
from torch import Tensor

from sglang_dspark.backends.cuda import draft
from sglang_dspark.backends.cuda.reduced_vocabulary import ReducedVocabulary
from sglang_dspark.drafter.heads import restrict_vocabulary
from sglang_dspark.serving.mode import Choice
from tests.kernels.interpreter import patch_language_once

NARROW = {"gated": torch.bfloat16, "bfloat16": torch.bfloat16}  # of which the base logits are
SLOTS, REQUESTS, GAMMA, VOCAB, RANK, WIDTH = 9, 6, 4, 203, 16, 24


class Other(VanillaMarkov):
    """A head that the operator does not know."""


def heads() -> dict[str, VanillaMarkov]:
    torch.manual_seed(2)
    sizes = {"vocab_size": VOCAB, "markov_rank": RANK}
    return {
        "vanilla": VanillaMarkov(**sizes),
        "gated": GatedMarkovHead(**sizes, hidden_size=WIDTH),
        "rnn": RNNHead(**sizes, hidden_size=WIDTH),
        "bfloat16": whole(VanillaMarkov(**sizes)).bfloat16(),
    }


def whole(head: VanillaMarkov) -> VanillaMarkov:
    """With small integers for weights: no order of adding up rounds their products."""
    for weight in head.parameters():
        weight.copy_(weight.round().clamp(-1, 1))
    return head


def ranks(agree: bool = False) -> Any:
    return SimpleNamespace(enabled=lambda site: agree, sync=lambda site, values: values)


def block(head: Any, way: str, dtype: torch.dtype = torch.float32, **extra: Any) -> dict[str, Any]:
    """Build a block of the graph's: slots for more requests, anchors before the mask tokens."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCAB, (REQUESTS, GAMMA), generator=generator)
    warm = torch.full((SLOTS,), 0.8)
    warm[1::3] = 0.0
    base = 2 * torch.randn(REQUESTS, GAMMA, VOCAB, generator=generator)
    kept = torch.full((SLOTS, GAMMA, VOCAB), torch.nan, dtype=head.step_logits_dtype(dtype))
    return {
        "markov_head": head,
        "base_logits": base.to(dtype),
        "anchor_tokens": ids[:, 0],
        "draft_hidden": torch.randn(REQUESTS, GAMMA, WIDTH, generator=generator),
        "step_temperatures": warm[:REQUESTS],
        "noise": DraftNoise(key=2**61 + 11, offset=torch.tensor([2**32 + 4])),
        "tp_sync": ranks(),
        "logits_out": kept[:REQUESTS] if way == "in the graph" else None,
        "greedy_draft": way == "argmax",
        **extra,
    }


def differences(head: VanillaMarkov, way: str, logits: torch.dtype) -> list[str]:
    """In what two blocks in a row differ, by the seam and by upstream's function."""
    ours, theirs = block(head, way, logits), block(head, way, logits)
    original = mock.Mock(side_effect=draft_markov_block)
    found = []
    for _ in range(2):
        tokens, kept = draft.draft_steps(original, **ours)
        expected, theirs_kept = draft_markov_block(**theirs)
        if not torch.equal(tokens, expected):
            found.append("tokens")
        if (kept is None) != (theirs_kept is None) or (kept is not None and far(kept, theirs_kept)):
            found.append("logits")
        if kept is not None and way == "in the graph":
            found += [] if kept.data_ptr() == ours["logits_out"].data_ptr() else ["address"]
    if not torch.equal(ours["noise"].offset, theirs["noise"].offset):
        found.append("offset")
    measured_slower = way == "in the graph" and type(head) is VanillaMarkov
    return found + (["not by whom it should"] if original.called != measured_slower else [])


def far(kept: Tensor, theirs: Tensor) -> bool:
    return kept.dtype != theirs.dtype or not torch.allclose(kept, theirs, atol=1e-5, rtol=1e-5)


def refusals() -> dict[str, Any]:
    """Count upstream's drafts of what the operator refuses, and return the warnings."""
    plain = heads()["vanilla"]
    sharded = heads()["vanilla"]
    sharded.vocab_shard = SimpleNamespace(start=0)
    other = Other(vocab_size=VOCAB, markov_rank=RANK)
    steps, upstream = draft.DraftSteps(), mock.Mock(return_value=("tokens", None))
    refused = (
        block(other, "argmax"),
        block(sharded, "argmax"),
        block(plain, "argmax", tp_sync=ranks(agree=True)),
        block(plain, "argmax", base_logits=torch.zeros(REQUESTS, GAMMA, VOCAB + 1)),
    )
    with mock.patch.object(draft.logger, "warning") as warning:
        for each in refused * 2:
            assert steps(upstream, **each) == ("tokens", None)
    told = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    with mock.patch.object(draft.mode, "choice", return_value=Choice(False, "off")):
        steps(upstream, **block(plain, "argmax"))
    return {"upstream": upstream.call_count, "told": told}


def too_large() -> dict[str, Any]:
    """Draft with a cooperative launch that the driver rejects, and one that fails otherwise."""
    head, steps, found = heads()["vanilla"], draft.DraftSteps(), {}
    error = RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
    ours, theirs = block(head, "eager"), block(head, "eager")
    with (
        mock.patch.object(draft, "markov_triton", side_effect=error) as launch,
        mock.patch.object(draft.logger, "warning") as warning,
    ):
        drafted = [steps(draft_markov_block, **ours)[0] for _ in range(2)]
        expected = [draft_markov_block(**theirs)[0] for _ in range(2)]
        found["launches"] = launch.call_count
        found["told"] = [call.args[0] % call.args[1:] for call in warning.call_args_list]
        found["same"] = all(map(torch.equal, drafted, expected))
        launch.side_effect = RuntimeError("Triton Error [CUDA]: an illegal memory access")
        try:
            draft.DraftSteps()(draft_markov_block, **ours)
        except RuntimeError as other:
            found["other"] = str(other)
    return found


def reduced(way: str) -> list[str]:
    """In what blocks over a part of the vocabulary differ from SGLang's steps over it."""
    head = heads()["vanilla"]
    allowed = torch.arange(1, VOCAB, 3)
    restrict_vocabulary(head, allowed)
    model = SimpleNamespace(markov_head=head, lm_head=torch.nn.Linear(WIDTH, VOCAB, bias=False))
    found = head.dspark_reduced = ReducedVocabulary(model, allowed)
    ours, theirs = (block(head, way) for _ in range(2))
    for each in (ours, theirs):
        each["base_logits"] = each["base_logits"][:, :, allowed].contiguous()
    with mock.patch.object(draft, "markov_triton", wraps=draft.markov_triton) as launched:
        tokens, kept = draft.draft_steps(mock.Mock(), **ours)
    expected, theirs_kept = found.draft(**theirs)
    wrong = [] if torch.equal(tokens, expected) else ["tokens"]
    wrong += [] if torch.isin(tokens, allowed).all() else ["outside"]
    if kept is not None:
        wrong += ["logits"] if far(kept, theirs_kept) else []
        wrong += [] if bool((kept == -torch.inf).any()) else ["spread"]
    same_noise = torch.equal(ours["noise"].offset, theirs["noise"].offset)
    wrong += [] if same_noise else ["offset"]
    return wrong + ([] if launched.called != (way == "in the graph") else ["not by whom it should"])


def scratch_stays() -> bool:
    """Return whether a captured launch finds its counters unmoved after other launches."""
    head, steps = heads()["vanilla"], draft.DraftSteps()
    seen = []
    for requests in (4, 6, 4):
        whole = block(head, "argmax")
        part = {"base_logits", "anchor_tokens", "draft_hidden", "step_temperatures"}
        cut = {name: each[:requests] if name in part else each for name, each in whole.items()}
        with mock.patch.object(draft, "markov_triton", wraps=draft.markov_triton) as launched:
            steps(draft_markov_block, **cut)
        seen.append(launched.call_args.args[1])
    return seen[0] is seen[2] and seen[0] is not seen[1]


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    with torch.inference_mode():
        different = {
            f"{name}, {way}": differences(head, way, NARROW.get(name, torch.float32))
            for name, head in heads().items()
            for way in ("argmax", "eager", "in the graph")
        }
        different |= {
            f"reduced, {way}": reduced(way) for way in ("argmax", "eager", "in the graph")
        }
        extra = {"too large": too_large()}
        print(json.dumps({"different": different, "stays": scratch_stays(), **refusals()} | extra))


if __name__ == "__main__":
    patch_language_once()
    main()
