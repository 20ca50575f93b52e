"""Run one of two gloo ranks for the test of experts on several ranks.

Each rank is a process: `python -m tests.backends.cpu.moe_ranks RANK FOLDER`. It builds the served
draft model under SGLang's own groups, alone and as one of two, and writes the draft block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context
from sglang.srt.runtime_context import get_context, get_parallel
from torch import Tensor

from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.moe.moe_config import DSparkMoEConfig
from sglang_dspark.backends.moe.moe_model import DSparkMoEModel
from sglang_dspark.drafter import DSparkDrafter
from sglang_dspark.drafter.checkpoint import own_tensors
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.quantisation.checkpoint import UNQUANTISED, quantise_tensors
from tests.backends.cpu.attention_world import Case, World, verify_pass
from tests.drafter.helpers import tiny_config

LAYOUTS = {"alone": (1, 1), "tp": (2, 1), "ep": (2, 2)}  # name -> tp, ep
CASE = Case((30, 3, 0), (4, 4, 4), heads=4, kv_heads=2, dim=16)
VOCAB = 61
PATIENCE = 120  # seconds that a rank waits for the other
BASE = {"hidden_size": 64, "head_dim": 16, "residual_streams": 2, "window": 16}
EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 3,  # two of them are never on one rank
    "moe_intermediate_size": 256,
    "num_shared_experts": 1,
    "routed_scaling": 2.0,
}
SHAPES = {
    "bf16": EXPERTS,
    "fp8": EXPERTS | {"expert_format": "fp8"},
    "mxfp4": EXPERTS | {"expert_format": "mxfp4"},
    "nvfp4": EXPERTS | {"expert_format": "nvfp4"},
    "dense": {},
}


@contextmanager
def groups(rank: int, tp: int, ep: int, store: Path) -> Iterator[None]:
    """SGLang's groups for tp ranks, of which this is one."""
    init_distributed_environment(
        world_size=tp,
        rank=rank,
        distributed_init_method=f"file://{store}",
        local_rank=rank,
        backend="gloo",
        timeout=PATIENCE,
    )
    one = ("pp", "attn_dp", "attn_cp", "moe_dp", "attn_dcp")
    sizes = {f"{name}_size": 1 for name in one} | {"tp_size": tp, "attn_tp_size": tp}
    sizes |= {"moe_ep_size": ep, "moe_tp_size": tp // ep, "shared_experts_tp_size": 1}
    ranks = {f"{name}_rank": 0 for name in one} | {"tp_rank": rank, "attn_tp_rank": rank}
    ranks |= {"moe_ep_rank": rank // (tp // ep), "moe_tp_rank": rank % (tp // ep)}
    with get_context().override_server_args(), get_parallel().override(**sizes, **ranks):
        initialize_model_parallel(backend="gloo")
        yield
    destroy_model_parallel()
    destroy_distributed_environment()


def weights_of(c: DrafterConfig) -> dict[str, Tensor]:
    """A drafter's file, the same in every process."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(c)
    for layer in drafter.backbone.layers:
        if c.num_experts:
            layer.mlp.gate.e_score_correction_bias.normal_(std=0.1)
    tensors = {name: t.clone() for name, t in own_tensors(drafter, torch.float32).items()}
    return tensors if c.expert_format == UNQUANTISED else quantise_tensors(tensors, c.expert_format)


def built(c: DrafterConfig, file: dict[str, Tensor] | None = None) -> DSparkMoEModel:
    """The served model with the weights of this rank, and the target's embedding and LM head.

    file: by default `weights_of`."""
    model = DSparkMoEModel(DSparkMoEConfig(**c.to_json()))
    model.load_weights(iter((weights_of(c) if file is None else file).items()))
    shared = {"embed_tokens": VocabParallelEmbedding, "lm_head": ParallelLMHead}
    made = {}
    for name, kind in shared.items():
        made[name] = kind(VOCAB, c.hidden_size)
        whole = torch.randn(VOCAB, c.hidden_size, generator=torch.Generator().manual_seed(1))
        made[name].weight.weight_loader(made[name].weight, whole)
    model.attach_shared_modules(**made)
    return model


def world_of(tp: int, rank: int, layers: int) -> World:
    """Requests whose caches hold this rank's heads of the same random keys and values."""
    heads = CASE.kv_heads // tp
    world = World(CASE)
    world.kv_pool = MHATokenToKVPool(
        size=world.kv_pool.size,
        page_size=1,
        dtype=torch.float32,
        head_num=heads,
        head_dim=CASE.dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    generator = torch.Generator().manual_seed(2)
    for buffer in (*world.kv_pool.k_buffer, *world.kv_pool.v_buffer):
        whole = torch.randn(len(buffer), CASE.kv_heads, CASE.dim, generator=generator)
        buffer.copy_(whole[:, heads * rank : heads * (rank + 1)])
    return world


@torch.inference_mode()
def drafted(model: DSparkMoEModel, tp: int, rank: int) -> dict[str, Tensor]:
    """One pass over the draft blocks: h [n, d] and base logits [n, V]."""
    world = world_of(tp, rank, len(model.layers))
    backend: Any = DsparkCpuAttnBackend(world.runner())
    batch = verify_pass(world)
    spans = zip(CASE.prefix, CASE.lens, strict=True)
    positions = torch.cat([torch.arange(first, last) for first, last in spans])
    backend.init_forward_metadata(batch)
    previous = set_forward_context(ForwardContext(attn_backend=backend))
    try:
        hidden = model(torch.arange(len(positions)) * 5 % VOCAB, positions, batch).hidden_states
    finally:
        set_forward_context(previous)
    return {"hidden": hidden, "logits": model.compute_base_logits(hidden)[0]}


def main(rank: int, folder: Path) -> None:
    """Every layout and shape; results in RANK.safetensors."""
    found = {}
    for layout, (tp, ep) in LAYOUTS.items():
        own = rank if tp > 1 else 0
        store = folder / (layout if tp > 1 else f"{layout}-{rank}")
        with groups(own, tp, ep, store):
            for name, fields in SHAPES.items():
                model = built(tiny_config(**BASE, **fields))
                for part, tensor in drafted(model, tp, own).items():
                    found[f"{layout} {name} {part}"] = tensor.contiguous()
                if name == "bf16":
                    gate = model.layers[0].mlp.experts.gate_proj
                    found[f"{layout} shape"] = torch.tensor(gate.shape)
    save_file(found, folder / f"{rank}.safetensors")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
