"""Run the end of a verify graph by our operators, in Triton's interpreter, and by upstream's code.

A process of its own: the interpreter is chosen before Triton is imported. Prints JSON.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import dspark
from sglang.srt.speculative.dspark_components.dspark_verify import (
    CommitInjectCtx,
    DsparkVerifyEpilogue,
)
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from torch import Tensor

from sglang_dspark.backends.cuda import graph_epilogue
from sglang_dspark.backends.cuda.commit import ContextRows
from sglang_dspark.serving import mode
from tests.backends.cuda.interpreted_commit import dense, pool
from tests.backends.cuda.test_commit import injector_of
from tests.kernels.interpreter import patch_language_once

SLOTS, GAMMA, VOCAB = 8, 5, 23
PASSES = 2 * SLOTS  # each number of requests twice
OUTS = ("correct_len", "bonus", "commit_lens", "new_seq_lens", "cap_trim_lens")


def epilogue(cache: Any, *, translating: bool = False) -> Any:
    """Of a server with one rank, over a draft model and this cache."""
    alone = SpecTpSync(SimpleNamespace(world_size=1, rank_in_group=0))
    injector = injector_of(dense(), cache)
    injector.draft_model_runner.kv_index_translator = SimpleNamespace(is_translating=translating)
    context = CommitInjectCtx(
        draft_model=injector.draft_model,
        block_pos_offsets=torch.arange(GAMMA + 1),
        resolve_pool=lambda: cache,
        resolve_req_to_token=lambda: None,
        kv_injector=injector,
    )
    return DsparkVerifyEpilogue(
        max_bs=SLOTS,
        verify_num_draft_tokens=GAMMA + 1,
        device="cpu",
        tp_sync=alone,
        commit_ctx=context,
    )


def replay(
    hook: Any, made: Any, seed: int, requests: int, graph: int = SLOTS
) -> tuple[dict[str, list[Any]], ContextRows]:
    """Run `hook` on a pass of `requests` in a graph of more; outcomes, and the requests' rows.

    Drafts are the target's choice two times of three; none is token 0, which the choice of the
    zeros behind a request's rows is. Two rows fill the graph's size.
    """
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, GAMMA + 2, (requests,), generator=generator)
    total = int(lens.sum())
    logits = torch.randn(total + 2, VOCAB, generator=generator)
    logits[:, 0] = -5.0
    ids = logits.argmax(-1).roll(1)
    luck = torch.rand(len(ids), generator=generator)
    ids = torch.where(luck < 0.67, ids, 1 + ids % (VOCAB - 1))
    made.begin_step(lens, armed=False)
    drafts = torch.zeros(requests, GAMMA + 1, dtype=torch.int64)
    drafts[torch.arange(GAMMA + 1) < lens[:, None]] = ids[:total]
    made.draft_tokens_buf[: requests * GAMMA] = drafts[:, 1:].flatten()
    slots = 1 + torch.randperm(total, generator=generator)
    features = made.commit_ctx.draft_model.fc.in_features
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=graph,
        input_ids=ids,
        seq_lens=torch.randint(1, 99, (SLOTS,), generator=generator),
        req_pool_indices=torch.arange(SLOTS),
        positions=torch.randint(0, 90, (total + 2,), generator=generator),
        out_cache_loc=torch.nn.functional.pad(slots, (0, 2)),
    )
    out = LogitsProcessorOutput(
        next_token_logits=logits,
        hidden_states=torch.randn(total + 2, features, generator=generator),
    )
    own = SimpleNamespace(is_translating=False)
    target = SimpleNamespace(is_draft_worker=False, kv_index_translator=own)
    runner = SimpleNamespace(ragged_verify_mode=True, model_runner=target)
    hook(made, runner, out, batch, total + 2)
    outs = made.read_accept(requests)
    kept = torch.arange(GAMMA + 1) < outs.commit_lens[:, None]
    found = {name: getattr(outs, name).tolist() for name in OUTS}
    rows = ContextRows(out.hidden_states[:total], batch.positions[:total], slots)
    return {**found, "tokens": torch.where(kept, outs.out_tokens, 0).tolist()}, rows


def ours(made: Any, *given: Any) -> None:
    """AROUND hook in place of the method."""
    graph_epilogue.run(DsparkVerifyEpilogue.capture_hook, made, *given)


def main() -> dict[str, Any]:
    """Outcomes that differ, the largest difference in a cache, and what upstream is left to do."""
    different, kept, off, tails = [], 0, 0.0, set[int]()
    mine, theirs = epilogue(cache := pool()), epilogue(pool())
    launch = mock.patch.object(
        graph_epilogue, "accept_greedy_triton", wraps=graph_epilogue.accept_greedy_triton
    )
    with launch as launched:
        for seed in range(PASSES):
            requests = 1 + seed % SLOTS
            # Its torch form knows no empty slots.
            hook = DsparkVerifyEpilogue.capture_hook
            expected, _ = replay(hook, theirs, seed, requests, graph=requests)
            for buffer in (*cache.k_buffer, *cache.v_buffer):
                buffer.fill_(-7.0)
            found, rows = replay(ours, mine, seed, requests)
            off = max(off, difference(cache, mine.commit_ctx.draft_model, rows))
            kept += sum(found["correct_len"])
            different += [f"{seed} {name}" for name in found if found[name] != expected[name]]
            tails.add(id(mine.__dict__[graph_epilogue._TAIL]))
        ran = launched.call_count
        refused = {
            "simulated": refusal(simulated_correct_len=torch.ones(1, dtype=torch.int64)),
            "tensor-parallel": refusal(_tp_sync=_Ranks()),
            "SGLANG_OPT_DSV41": refusal(block_accept_lens_buf=torch.zeros(SLOTS).int()),
        }
        by_upstream = launched.call_count == ran
    return {
        "different": different,
        "ran": ran,
        "kept": kept,
        "off": off,
        "tails": len(tails),
        "windows": mine.strided_logits is not None,
        "commits": graph_epilogue.commits(mine),
        "translated": translated(),
        "refused": refused,
        "by_upstream": by_upstream,
    }


def difference(cache: Any, model: Any, rows: ContextRows) -> float:
    """The largest difference from a cache that SGLang's calls wrote these rows to; slot 0 is no
    token's."""
    other, worst = pool(), 0.0
    injector_of(model, other).inject_target_hidden(
        target_hidden=rows.hidden, cache_loc=rows.slots, positions=rows.positions
    )
    for name in ("k_buffer", "v_buffer"):
        for mine, theirs in zip(getattr(cache, name), getattr(other, name), strict=True):
            worst = max(worst, float((mine[1:] - theirs[1:]).abs().max()))
    return worst


class _Ranks:
    """Of several ranks, each told that it is the leader."""

    def enabled(self, site: Any) -> bool:
        return bool(site is SpecTpSyncSite.DSPARK_ACCEPT_GRAPH)

    def sync(self, site: Any, values: Tensor) -> Tensor:
        return values


def refusal(**changed: Any) -> dict[str, Any]:
    """Replay two passes where upstream accepts; return log lines, and whether the graph commits."""
    made = epilogue(pool())
    for name, value in changed.items():
        setattr(made, name, value)
    with mock.patch.object(graph_epilogue.logger, "warning") as warning:
        replay(ours, made, 1, 2, graph=2)
        replay(ours, made, 2, 3, graph=3)
    told = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return {"told": told, "commits": graph_epilogue.commits(made)}


def translated() -> dict[str, bool]:
    """Replay a pass whose rows have other slots in the draft's cache; return what was written."""
    made = epilogue(cache := pool(), translating=True)
    replay(ours, made, 1, 2)
    return {
        "commits": graph_epilogue.commits(made),
        "untouched": all(bool((each == -7).all()) for each in cache.k_buffer),
    }


if __name__ == "__main__":
    patch_language_once()
    torch.cuda.is_current_stream_capturing = lambda: False  # raises where there is no CUDA
    mode.choice = lambda: SimpleNamespace(ours=True)  # type: ignore[assignment,return-value]
    plain = {"can_dflash_slice_qkv_weight": lambda projection: (True, "")}
    with torch.inference_mode(), mock.patch.multiple(dspark, **plain):
        print(json.dumps(main()))
