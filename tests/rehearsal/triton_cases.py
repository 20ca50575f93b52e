"""Verify passes of SGLang's Triton attention backend in Triton's interpreter, against dense rows.

Run as a program with TRITON_INTERPRET=1 and a number of cases: one line of JSON a case. `eager`,
`graph`: largest difference of what our class makes of a pass's metadata, and of a graph's buffers
with empty slots beside the batch's, on our kernel. `unwritten`: rows of a graph without empty slots
that the kernel left as they were, NaN. `extend`: the first cases on SGLang's kernel. `upstream`:
the same on SGLang's class.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from torch import Tensor
from transformers import LlamaConfig

from sglang_dspark.patches import registry
from sglang_dspark.patches.cuda.triton_attention import TritonAttention
from tests.backends.cpu.attention_world import Case, World, ragged_pass
from tests.kernels.interpreter import patch_language_once

GAMMA = 5
SPARE_SEATS = 2  # of a graph, beyond the batch's
UNPATCHED = 10  # first cases that are tried on upstream's class and kernel as well


def random_case(random_: random.Random, seed: int) -> Case:
    """One to five requests with windows of 1 to gamma + 1 tokens behind 0 to 70 of context."""
    requests = random_.randint(1, 5)
    heads, kv_heads = random_.choice([(1, 1), (3, 1), (4, 2)])
    return Case(
        prefix=tuple(random_.choice([0, 1, random_.randint(2, 70)]) for _ in range(requests)),
        window=tuple(random_.randint(1, GAMMA + 1) for _ in range(requests)),
        heads=heads,
        kv_heads=kv_heads,
        dim=16,
        value_dim=16,
        seed=seed,
    )


def empty_slots(case: Case) -> int:
    """Of the graph: as many as the tier may leave, zero to SPARE_SEATS."""
    tokens = tier(sum(case.window))
    return min(case.seed % (SPARE_SEATS + 1), tokens - len(case.window))


def tier(tokens: int) -> int:
    """Tokens of the smallest graph that holds them."""
    return (GAMMA + 1) * -(-tokens // (GAMMA + 1))


def backend_of(world: World, *, patched: bool = True, our_kernel: bool = True) -> TritonAttnBackend:
    """The backend over the world's pools, sized as a target's runner sizes it."""
    case = world.case
    config = SimpleNamespace(
        attention_arch=None,
        get_max_num_attention_heads=lambda: case.heads,
        get_num_kv_heads=lambda tp_size, dcp_size: case.kv_heads,
        v_head_dim=case.value_dim,
        swa_v_head_dim=case.value_dim,
        head_dim=case.dim,
        context_len=world.req_pool.req_to_token.shape[1],
        is_encoder_decoder=False,
        hf_config=LlamaConfig(),
        linear_attn_registry_result=None,
    )
    runner = world.runner()
    runner.__dict__.update(
        model_config=config,
        sliding_window_size=None,
        token_to_kv_pool_allocator=None,
        page_size=1,
        gpu_id=0,
        is_draft_worker=False,
        kv_cache_dtype=case.dtype,
        decode_num_tokens_per_req=lambda: GAMMA + 1,
        kv_index_translator=KVIndexTranslator(
            req_to_token=world.req_pool.req_to_token,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=world.kv_pool,
            page_size=1,
            device="cpu",
        ),
    )
    made = registry.derive(TritonAttnBackend, TritonAttention) if patched else TritonAttnBackend
    backend = made(runner)
    if not our_kernel:
        theirs = TritonAttnBackend._forward_extend_kernel
        backend._forward_extend_kernel = partial(theirs, backend)
    return backend


def difference(world: World, out: Tensor) -> float:
    """Largest absolute difference of the windows' rows from dense attention."""
    rows = out[: sum(world.case.window)]
    worst = (rows.double() - world.expected()).abs().max().item()
    return worst if worst == worst else float("inf")  # NaN: a row of no request was read


def verify_batch(world: World, backend: TritonAttnBackend) -> Any:
    """A ragged verify pass as the runner gets it."""
    batch = ragged_pass(world)
    backend.kv_index_translator.bind_own_plan(batch)
    return batch


def attend(world: World, backend: TritonAttnBackend, batch: Any, tokens: int) -> Tensor:
    """The planned pass over `tokens` rows, those behind the windows of no request: its output, NaN
    where the kernel wrote none."""
    spare = tokens - len(batch.input_ids)
    queries, k, v = (
        torch.cat([rows, torch.randn(spare, *rows.shape[1:])])
        for rows in (world.queries, world.new_rows(world.keys), world.new_rows(world.values))
    )
    padding = torch.zeros(spare, dtype=torch.int64)
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, padding])
    batch._attn_output = torch.full_like(queries, torch.nan)
    out: Tensor = backend.forward(queries, k, v, world.layer(), batch)
    return out


def eager(world: World, **options: bool) -> float:
    """A pass without a graph; unpatched, it takes each window for gamma + 1 rows wide."""
    backend = backend_of(world, **options)
    batch = verify_batch(world, backend)
    backend.init_forward_metadata(batch)
    return difference(world, attend(world, backend, batch, batch.batch_size * (GAMMA + 1)))


def in_graph(world: World) -> tuple[float, int]:
    """A pass in the buffers of a graph of the smallest tier that holds it, with spare slots: its
    difference, and how many rows were not written."""
    backend = backend_of(world)
    batch = verify_batch(world, backend)
    tokens = tier(len(batch.input_ids))
    info = batch.spec_info
    info.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=info.ragged_verify_layout.verify_lens, graph_num_tokens=tokens
    )
    slots = batch.batch_size + empty_slots(world.case)
    empty = torch.zeros(empty_slots(world.case), dtype=torch.int64)
    view = SimpleNamespace(
        batch_size=slots,
        forward_mode=batch.forward_mode,
        req_pool_indices=torch.cat([batch.req_pool_indices, empty]),
        seq_lens=torch.cat([batch.seq_lens, empty + 1]),
        spec_info=info,
        kv_loc_plan=batch.kv_loc_plan,
        encoder_lens=None,
        out_cache_loc=None,
    )
    backend.init_cuda_graph_state(slots, tokens)
    backend.init_forward_metadata_out_graph(view, in_capture=True)
    out = attend(world, backend, batch, tokens)
    return difference(world, out), int(out.isnan().flatten(1).any(1).sum())


def main(count: int) -> None:
    """Print the differences of `count` cases."""
    random_ = random.Random(0)
    with (
        get_context().override_server_args(speculative_num_draft_tokens=GAMMA + 1),
        get_parallel().override(attn_dcp_rank=0, attn_tp_rank=0),
    ):
        for seed in range(count):
            case = random_case(random_, seed)
            graph, unwritten = in_graph(World(case))
            said: dict[str, Any] = {
                "windows": case.window,
                "empty_slots": empty_slots(case),
                "eager": eager(World(case)),
                "graph": graph,
            }
            if said["empty_slots"] == 0:  # an empty slot reads a cache that holds NaN
                said |= {"spare": tier(sum(case.window)) - sum(case.window), "unwritten": unwritten}
            if seed < UNPATCHED:
                said["upstream"] = eager(World(case), patched=False)
                said["extend"] = eager(World(case), our_kernel=False)
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    patch_language_once()
    main(int(sys.argv[1]))
