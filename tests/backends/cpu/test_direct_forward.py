"""Verify windows around SGLang's runner against upstream's model: same numbers, same cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from sglang_dspark.backends.cpu import csrc
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError
from sglang_dspark.backends.cpu.layers import direct_forward
from sglang_dspark.backends.cpu.packed_weights import EmbeddingMethod
from sglang_dspark.backends.cpu.verify_forward import packed_forward
from tests.backends.cpu.attention_world import Case, World, ragged_pass, verify_pass
from tests.backends.cpu.test_layer_stack import one_rank, our_kernels

__all__ = ["one_rank", "our_kernels"]
pytestmark = pytest.mark.skipif(
    csrc.why_not() is not None, reason="no fused multiply-add: the fast path does not apply"
)
CASES = {
    "whole window": (Case((70,), (6,)), verify_pass),
    "packed windows": (Case((7, 30, 3), (6, 2, 4)), ragged_pass),
    "no drafts": (Case((5, 40), (1, 1)), ragged_pass),
}


CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@pytest.fixture(scope="module", params=list(CLASSES))
def target(one_rank: None, request: pytest.FixtureRequest) -> Any:
    """Three layers and a tied head of upstream's own classes."""
    torch.manual_seed(0)
    config_class, model_class = CLASSES[request.param]
    config = config_class(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3).requires_grad_(False)
    model.capture_aux_hidden_states = True
    model.model.layers_to_capture = [1, 2]
    return model


def runner_of(world: World, model: Any) -> SimpleNamespace:
    """A runner without hooks around upstream's model and our attention backend."""
    eager = EagerRunner.__new__(EagerRunner)
    eager.enable_pdmux = False
    world.kv_pool = MHATokenToKVPool(
        size=world.kv_pool.size,
        page_size=1,
        dtype=torch.float32,
        head_num=1,
        head_dim=16,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*world.kv_pool.k_buffer, *world.kv_pool.v_buffer):
        buffer.normal_()
    return SimpleNamespace(
        **dict.fromkeys(direct_forward.OPTIONAL_HOOKS),
        model=model,
        attn_backend=DsparkCpuAttnBackend(world.runner()),
        enable_elastic_ep=False,
        eager_runner=eager,
        kv_index_translator=SimpleNamespace(space=lambda kind: SimpleNamespace(write=None)),
        forward_pass_id=0,
    )


def scheduled(world: World, make_pass: Any) -> tuple[Any, SimpleNamespace]:
    """Upstream's batch of a pass, and the scheduler's batch it is made of."""
    forward_batch = make_pass(world)
    spec = forward_batch.spec_info
    spans = zip(world.case.prefix, world.case.lens, strict=True)
    spec.positions = torch.cat([torch.arange(first, last) for first, last in spans])
    spec.draft_token = forward_batch.input_ids = torch.arange(spec.positions.numel()) % 64
    forward_batch.positions = spec.positions
    forward_batch.capture_hidden_mode = spec.capture_hidden_mode
    batch = SimpleNamespace(
        input_embeds=None,
        out_cache_loc=forward_batch.out_cache_loc,
        req_pool_indices=forward_batch.req_pool_indices,
        seq_lens=forward_batch.seq_lens,
    )
    return forward_batch, batch


def verify(runner: Any, batch: Any, spec: Any) -> Any:
    with torch.inference_mode():
        return packed_forward(runner, batch, spec, batch.out_cache_loc)


@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize("name", list(CASES))
def test_upstreams_model_and_head_to_rounding(
    target: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case, make_pass = CASES[name]
    found = []
    monkeypatch.setattr(target.lm_head, "quant_method", EmbeddingMethod())
    for short in (True, False):
        world = World(case)
        runner = runner_of(world, target)
        forward_batch, batch = scheduled(world, make_pass)
        if short:
            before = dict(vars(batch))
            output = verify(runner, batch, forward_batch.spec_info)
            assert vars(batch) == before
            assert runner.forward_pass_id == 1
        else:
            runner.attn_backend.init_forward_metadata(forward_batch)
            previous = set_forward_context(ForwardContext(attn_backend=runner.attn_backend))
            with torch.inference_mode():
                output = target(forward_batch.input_ids, forward_batch.positions, forward_batch)
            set_forward_context(previous)
        pool = world.kv_pool
        found.append(
            [output.next_token_logits, output.hidden_states, *pool.k_buffer, *pool.v_buffer]
        )
    assert len(found[0]) == len(found[1])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_embeddings_as_inputs_keep_the_runner(target: Any) -> None:
    world = World(CASES["whole window"][0])
    runner = runner_of(world, target)
    forward_batch, batch = scheduled(world, verify_pass)
    batch.input_embeds = torch.zeros(1)
    assert verify(runner, batch, forward_batch.spec_info) is None
    assert runner.forward_pass_id == 0


@pytest.mark.parametrize("hook", direct_forward.OPTIONAL_HOOKS)
def test_runners_with_hooks_keep_upstreams_path(target: Any, hook: str) -> None:
    world = World(CASES["whole window"][0])
    runner = runner_of(world, target)
    forward_batch, batch = scheduled(world, verify_pass)
    setattr(runner, hook, object())
    assert verify(runner, batch, forward_batch.spec_info) is None
    setattr(runner, hook, None)
    assert verify(runner, batch, forward_batch.spec_info) is not None


def test_hooks_and_scales_keep_upstreams_path(target: Any) -> None:
    direct_forward.require_plain_target(target)
    handle = target.model.register_forward_hook(lambda *seen: None)
    with pytest.raises(UnsupportedError, match="a module has hooks"):
        direct_forward.require_plain_target(target)
    handle.remove()
    target.logits_processor.logit_scale = 2.0
    with pytest.raises(UnsupportedError, match="its logits are scaled"):
        direct_forward.require_plain_target(target)
    target.logits_processor.logit_scale = None
    direct_forward.require_plain_target(target)


def test_a_profiler_gets_sglangs_spans(target: Any) -> None:
    runner = runner_of(World(CASES["whole window"][0]), target)
    require_model = direct_forward.require_plain_target
    with torch.inference_mode():
        assert direct_forward.supports_pass(runner, require_model, ())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert not direct_forward.supports_pass(runner, require_model, ())
