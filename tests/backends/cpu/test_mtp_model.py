"""The MTP draft's layers by the fast path against upstream's forward: same numbers and cache."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context
from sglang.srt.models.llama_eagle import LlamaModel
from transformers import LlamaConfig

from sglang_dspark.backends.cpu import csrc
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError
from sglang_dspark.backends.cpu.layers import layer_spec, layer_stack
from sglang_dspark.backends.cpu.packed_weights import adopt_plain_layers
from sglang_dspark.patches.cpu.mtp import forward_model
from tests.backends.cpu.attention_world import Case, World, decode_pass, extend_pass
from tests.backends.cpu.test_layer_stack import one_rank, our_kernels  # noqa: F401

pytestmark = pytest.mark.skipif(
    csrc.why_not() is not None, reason="no fused multiply-add: the fast path does not apply"
)
WIDTH = 48
CASES = {
    "decode": (Case((5, 40, 1), (1, 1, 1)), decode_pass),
    "after verification": (Case((70, 3), (2, 2)), extend_pass),
}


@pytest.fixture(scope="module", params=[1, 2])
def mtp(one_rank: None, request: pytest.FixtureRequest) -> LlamaModel:  # noqa: F811
    """A draft of one layer, as MTP-1's, and of two, where the second has a norm of its input."""
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=80,
        num_hidden_layers=request.param,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    model = LlamaModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3).requires_grad_(parameter.dim() == 1)
    adopt_plain_layers(model)  # upstream's product, in our kernel's arithmetic
    return model


def one_pass(model: LlamaModel, case: Case, make_pass: Any, *, short: bool) -> tuple[Tensor, Any]:
    """Hidden states [n, d] of one pass, and the cache it wrote."""
    torch.manual_seed(3)
    world = World(case)
    world.kv_pool = pool = MHATokenToKVPool(
        size=world.kv_pool.size,
        page_size=1,
        dtype=torch.float32,
        head_num=1,
        head_dim=16,
        layer_num=len(model.layers),
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    backend = DsparkCpuAttnBackend(world.runner())
    batch = make_pass(world)
    spans = zip(case.prefix, case.lens, strict=True)
    positions = torch.cat([torch.arange(first, last) for first, last in spans])
    tokens = torch.arange(positions.numel()) % 64
    batch.spec_info = SimpleNamespace(hidden_states=torch.randn(positions.numel(), WIDTH))
    upstream = partial(LlamaModel.forward, model)
    backend.init_forward_metadata(batch)
    previous = set_forward_context(ForwardContext(attn_backend=backend))
    try:
        with torch.inference_mode():
            if short:
                hidden = forward_model(LlamaModel.forward, model, tokens, positions, batch)
            else:
                hidden = upstream(tokens, positions, batch)
    finally:
        set_forward_context(previous)
    return hidden, [*pool.k_buffer, *pool.v_buffer]


@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize("name", list(CASES))
def test_same_numbers_as_upstreams_forward(
    mtp: LlamaModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case, make_pass = CASES[name]
    theirs = one_pass(mtp, case, make_pass, short=False)
    passes = []
    run = layer_stack.run
    monkeypatch.setattr(layer_stack, "run", lambda *given: passes.append(run(*given)) or passes[-1])
    ours = one_pass(mtp, case, make_pass, short=True)
    assert [each is not None for each in passes] == [True]
    torch.testing.assert_close([ours[0], *ours[1]], [theirs[0], *theirs[1]], rtol=2e-5, atol=2e-5)


def test_a_first_layer_with_a_norm_of_its_input_does_not_fit(
    mtp: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = mtp.layers[0]
    layer_spec.eagle_layer_of(layer)
    monkeypatch.setitem(layer._modules, "input_layernorm", layer.post_attention_layernorm)
    with pytest.raises(UnsupportedError, match="alone has no norm of its input"):
        layer_spec.eagle_layer_of(layer)
