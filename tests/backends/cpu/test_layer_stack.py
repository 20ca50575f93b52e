"""The fast path of target and draft layers against upstream's forward: over our operators the
same bits, over torch's to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.llama import LlamaModel
from sglang.srt.models.qwen2 import Qwen2Model
from sglang.srt.models.qwen3 import Qwen3Model
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from sglang_dspark.backends.cpu import csrc, fused_ops, linear
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError
from sglang_dspark.backends.cpu.layers import layer_spec, layer_stack
from sglang_dspark.backends.cpu.layers.layer_stack import (
    forget,
    forward_draft,
    forward_target,
    stack_of_model,
)
from sglang_dspark.backends.cpu.packed_weights import LinearMethod
from sglang_dspark.serving.weight_updates import begin_update
from tests.backends.cpu.attention_world import (
    Case,
    World,
    decode_pass,
    extend_pass,
    ragged_pass,
    verify_pass,
)

pytestmark = pytest.mark.skipif(
    csrc.why_not() is not None, reason="no fused multiply-add: the fast path does not apply"
)
Model = LlamaModel | Qwen2Model | Qwen3Model | DFlashDraftModel
LAYERS = 3
HIDDEN = 192  # several vectors of a sum
CAPTURED = [1, 2]
CASES = {
    "decode": (Case((5,), (1,)), decode_pass),
    "decode, several requests": (Case((5, 40, 1), (1, 1, 1)), decode_pass),
    "verify window": (Case((70,), (6,)), verify_pass),
    "ragged verify windows": (Case((7, 30, 3), (6, 2, 4)), ragged_pass),
    "short prefill": (Case((0, 4), (9, 3)), extend_pass),
    "prefill in blocks": (Case((0, 4), (100, 3)), extend_pass),
}
LONG = (Case((0, 4), (linear.MAX_ROWS - 2, 3)), extend_pass)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """SGLang's groups for a single process, which its linear layers and boundaries need."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )
    from sglang.srt.runtime_context import get_context, get_parallel

    widths = ("tp", "pp", "moe_ep", "attn_dp", "attn_cp", "moe_dp", "attn_dcp", "attn_tp", "moe_tp")
    ones = {f"{width}_size": 1 for width in (*widths, "shared_experts_tp")}
    ranks = {f"{width}_rank": 0 for width in widths}
    store = tmp_path_factory.mktemp("group") / "store"
    init_distributed_environment(
        world_size=1,
        rank=0,
        distributed_init_method=f"file://{store}",
        local_rank=0,
        backend="gloo",
    )
    with get_context().override_server_args(), get_parallel().override(**ones, **ranks):
        initialize_model_parallel(backend="gloo")
        yield
    destroy_model_parallel()
    destroy_distributed_environment()


def filled(model: Any) -> Any:
    """With random weights, and features captured."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3).requires_grad_(parameter.dim() == 1)
    model.layers_to_capture = CAPTURED
    return model


@pytest.fixture(scope="module")
def model(one_rank: None) -> LlamaModel:
    """Three layers of upstream's own classes, 3 heads over 1 KV head as SmolLM2's 9 over 3."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        pad_token_id=0,
    )
    return filled(LlamaModel(config))


@pytest.fixture(scope="module")
def qwen(one_rank: None) -> Qwen3Model:
    """The same of Qwen3: norms of query and key heads, heads wider than a third of a row."""
    torch.manual_seed(2)
    config = Qwen3Config(
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
    )
    return filled(Qwen3Model(config))


@pytest.fixture(scope="module")
def qwen2(one_rank: None) -> Qwen2Model:
    """The same of Qwen2: queries, keys and values have a bias."""
    torch.manual_seed(3)
    config = Qwen2Config(
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=10,
        num_key_value_heads=1,
        vocab_size=64,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
    )
    return filled(Qwen2Model(config))


@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("which", ["qwen", "qwen2"])
def test_layers_of_qwen_are_upstreams(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model: Model = request.getfixturevalue(which)
    case, make_pass = CASES[name]
    upstream = outcome(model, case, make_pass, monkeypatch, short=False)
    short = outcome(model, case, make_pass, monkeypatch, short=True)
    assert (short.short_passes, upstream.short_passes) == (1, 0)
    assert len(short.captured) == len(CAPTURED)
    assert_same(short, upstream)


@pytest.fixture(scope="module")
def draft(one_rank: None) -> DFlashDraftModel:
    """A DFlash-style draft of three layers: norms of query and key heads, bidirectional blocks."""
    torch.manual_seed(1)
    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        dflash_config={"target_layer_ids": [0, 1], "mask_token_id": 3},
        num_target_layers=LAYERS,
        block_size=6,
    )
    model = DFlashDraftModel(config)
    model.embed_tokens = torch.nn.Embedding(64, HIDDEN)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3).requires_grad_(parameter.dim() == 1)
    return model


@pytest.fixture
def our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's layer over our operators, which is what a server without the fast path runs."""
    monkeypatch.setattr(UnquantizedLinearMethod, "apply", LinearMethod.apply)
    monkeypatch.setattr(RMSNorm, "forward", fused_ops.rms_norm)
    monkeypatch.setattr(SiluAndMul, "forward", fused_ops.silu_and_mul)
    monkeypatch.setattr(RotaryEmbedding, "forward", fused_ops.rotary)


@dataclass
class Outcome:
    """Outcome of a pass: final hidden states, captures, cache, passes by the fast path."""

    hidden: Tensor
    captured: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    short_passes: int


def outcome(
    model: Model, case: Case, make_pass: Any, monkeypatch: pytest.MonkeyPatch, *, short: bool
) -> Outcome:
    """One pass of the model over a cache with random prefixes."""
    world = World(case)
    world.kv_pool = MHATokenToKVPool(
        size=world.kv_pool.size,
        page_size=1,
        dtype=torch.float32,
        head_num=1,
        head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*world.kv_pool.k_buffer, *world.kv_pool.v_buffer):
        buffer.normal_()
    backend = DsparkCpuAttnBackend(world.runner())
    batch: ForwardBatch = make_pass(world)
    spans = zip(case.prefix, case.lens, strict=True)
    positions = torch.cat([torch.arange(first, last) for first, last in spans])
    tokens = torch.arange(positions.numel()) % 64
    taken = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        done = short_run(*args, **kwargs)
        taken += done is not None
        return done

    short_run = layer_stack.run
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(layer_stack, "run", counting)
        if short:
            hook = forward_draft if isinstance(model, DFlashDraftModel) else forward_target
            patch.setattr(model, "forward", partial(hook, type(model).forward, model))
        backend.init_forward_metadata(batch)
        previous = set_forward_context(ForwardContext(attn_backend=backend))
        try:
            result = model(tokens, positions, batch)
        finally:
            set_forward_context(previous)
    hidden, captured = (result.hidden_states, []) if isinstance(model, DFlashDraftModel) else result
    assert batch.residual_stream is None
    pool = world.kv_pool
    return Outcome(hidden, list(captured), pool.k_buffer, pool.v_buffer, taken)


def assert_same(short: Outcome, upstream: Outcome) -> None:
    mine = [short.hidden, *short.captured, *short.keys, *short.values]
    theirs = [upstream.hidden, *upstream.captured, *upstream.keys, *upstream.values]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def same_both_ways(
    model: Model, case: Case, make_pass: Any, monkeypatch: pytest.MonkeyPatch
) -> Outcome:
    """The fast path's outcome, which is upstream's, of a model whose layers were changed."""
    vars(model).pop("dspark_layer_stack", None)
    short = outcome(model, case, make_pass, monkeypatch, short=True)
    upstream = outcome(model, case, make_pass, monkeypatch, short=False)
    vars(model).pop("dspark_layer_stack", None)
    assert short.short_passes == 1
    assert_same(short, upstream)
    return short


@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize("name", list(CASES))
def test_same_numbers_as_upstreams_forward_over_our_operators(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case, make_pass = CASES[name]
    upstream = outcome(model, case, make_pass, monkeypatch, short=False)
    short = outcome(model, case, make_pass, monkeypatch, short=True)
    assert (short.short_passes, upstream.short_passes) == (1, 0)
    assert len(short.captured) == len(CAPTURED)
    assert_same(short, upstream)


@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize("name", ["verify window", "prefill in blocks"])
def test_layers_that_see_a_window(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case, make_pass = CASES[name]
    whole = outcome(model, case, make_pass, monkeypatch, short=True)
    with monkeypatch.context() as patch:
        for layer in model.layers:
            patch.setattr(layer.self_attn.attn, "sliding_window_size", 20)
        short = same_both_ways(model, case, make_pass, monkeypatch)
    assert not torch.equal(short.hidden, whole.hidden)


@pytest.mark.usefixtures("our_kernels")
def test_each_norm_has_its_own_epsilon(qwen: Qwen3Model, monkeypatch: pytest.MonkeyPatch) -> None:
    case, make_pass = CASES["verify window"]
    with monkeypatch.context() as patch:
        for layer in qwen.layers:
            patch.setattr(layer.input_layernorm, "variance_epsilon", 1.0)
            patch.setattr(layer.post_attention_layernorm, "variance_epsilon", 2.0)
            patch.setattr(layer.self_attn.q_norm, "variance_epsilon", 3.0)
            patch.setattr(layer.self_attn.k_norm, "variance_epsilon", 4.0)
        same_both_ways(qwen, case, make_pass, monkeypatch)


def test_close_to_upstreams_own_operators(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, make_pass = CASES["verify window"]
    upstream = outcome(model, case, make_pass, monkeypatch, short=False)
    short = outcome(model, case, make_pass, monkeypatch, short=True)
    torch.testing.assert_close(short.hidden, upstream.hidden, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("our_kernels")
def test_a_bias_of_values_counts(qwen2: Qwen2Model, monkeypatch: pytest.MonkeyPatch) -> None:
    case, make_pass = CASES["verify window"]
    before = outcome(qwen2, case, make_pass, monkeypatch, short=True)
    bias = qwen2.layers[1].self_attn.qkv_proj.bias
    saved = bias.detach().clone()
    with torch.no_grad():
        bias[-1] += 1.0  # the last dimension of the values
    after = outcome(qwen2, case, make_pass, monkeypatch, short=True)
    with torch.no_grad():
        bias.copy_(saved)
    assert not torch.equal(after.hidden, before.hidden)


@pytest.mark.usefixtures("our_kernels")
def test_many_rows_keep_upstreams_forward(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = outcome(model, *LONG, monkeypatch, short=True)
    assert short.short_passes == 0
    assert_same(short, outcome(model, *LONG, monkeypatch, short=False))


@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize("name", ["verify window", "several windows"])
def test_draft_layers_are_upstreams(
    draft: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = {"verify window": Case((70,), (6,)), "several windows": Case((7, 0, 30), (6, 6, 6))}[
        name
    ]
    upstream = outcome(draft, case, verify_pass, monkeypatch, short=False)
    short = outcome(draft, case, verify_pass, monkeypatch, short=True)
    assert (short.short_passes, upstream.short_passes) == (1, 0)
    assert_same(short, upstream)


@pytest.mark.usefixtures("our_kernels")
def test_the_embedding_of_the_first_layer_can_be_captured(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, make_pass = CASES["decode"]
    monkeypatch.setattr(model, "layers_to_capture", [0, 2])
    short = outcome(model, case, make_pass, monkeypatch, short=True)
    assert len(short.captured) == 2
    assert_same(short, outcome(model, case, make_pass, monkeypatch, short=False))


@pytest.mark.usefixtures("our_kernels")
def test_one_layer_that_does_not_fit_keeps_upstreams_forward_for_all(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, make_pass = CASES["decode"]
    vars(model).pop("dspark_layer_stack", None)
    wide = torch.nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)
    monkeypatch.setitem(model.layers[1].mlp.down_proj._parameters, "bias", wide)
    mixed = outcome(model, case, make_pass, monkeypatch, short=True)
    assert mixed.short_passes == 0
    assert_same(mixed, outcome(model, case, make_pass, monkeypatch, short=False))
    vars(model).pop("dspark_layer_stack")


@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize("how", ["in place", "data", "parameter"])
def test_updated_weights_are_used(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    case, make_pass = CASES["decode"]
    forget(model)
    before = outcome(model, case, make_pass, monkeypatch, short=True)
    projection = model.layers[1].mlp.down_proj
    old = projection.weight
    new = torch.randn(old.shape)
    saved = old.detach().clone()
    if how == "in place":
        with torch.no_grad():
            old.copy_(new)
    elif how == "data":
        old.data = new
    else:
        projection.weight = torch.nn.Parameter(new, requires_grad=False)
    if how != "in place":
        stale = outcome(model, case, make_pass, monkeypatch, short=True)
        assert torch.equal(stale.hidden, before.hidden), "old memory is kept until the event"
        update(model)
    after = outcome(model, case, make_pass, monkeypatch, short=True)
    assert after.short_passes == 1
    assert not torch.equal(after.hidden, before.hidden)
    assert_same(after, outcome(model, case, make_pass, monkeypatch, short=False))
    projection.weight = torch.nn.Parameter(saved, requires_grad=False)
    forget(model)


def update(model: Any) -> None:
    """Do what SGLang does before it loads new weights into the target."""
    begin_update([("target", SimpleNamespace(model=model))])


def test_an_update_of_another_model_changes_nothing(model: LlamaModel) -> None:
    stack = stack_of_model(model, layer_spec.target_layer_of)
    update(torch.nn.Linear(2, 2))
    assert stack_of_model(model, layer_spec.target_layer_of) is stack
    update(SimpleNamespace(model=model))  # the model inside of a target
    assert stack_of_model(model, layer_spec.target_layer_of) is not stack


def unfit(model: LlamaModel, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make layer 0 one that the fast path does not serve."""
    layer: Any = model.layers[0]
    attention = layer.self_attn
    if case == "bias":
        monkeypatch.setitem(vars(layer.mlp.down_proj), "bias", torch.zeros(HIDDEN))
    elif case == "bias of other width":
        monkeypatch.setitem(vars(attention.qkv_proj), "bias", torch.zeros(7))
    elif case == "wrapped projection":
        wrapped = torch.nn.Sequential(attention.qkv_proj)
        monkeypatch.setitem(vars(attention), "qkv_proj", wrapped)
    elif case == "half precision":
        half = attention.o_proj.weight.bfloat16()
        monkeypatch.setitem(vars(attention.o_proj), "weight", half)
    elif case == "adjacent rotary":
        monkeypatch.setattr(attention.rotary_emb, "is_neox_style", False)
    elif case == "capped logits":
        monkeypatch.setattr(attention.attn, "logit_cap", 30.0)
    elif case == "hook":
        hooks = {0: lambda *_: None}
        monkeypatch.setattr(layer.mlp, "_forward_hooks", hooks)
    elif case == "two ranks":
        two = type("P", (), {"tp_size": 2})
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: two)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("bias", "down_proj has a bias"),
        ("bias of other width", r"the bias of qkv_proj is torch.float32 \[7\]"),
        ("wrapped projection", "its qkv_proj is torch.*Sequential, not QKVParallelLinear"),
        ("half precision", "its weights are not all of one format"),
        ("adjacent rotary", "its rotary embedding turns adjacent pairs"),
        ("capped logits", "its attention's logits are capped"),
        ("hook", "a module has hooks"),
        ("two ranks", "its layers are split over 2 ranks"),
    ],
)
def test_other_layers_do_not_fit_and_say_why(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, case: str, why: str
) -> None:
    layer_stack.stack_of(model, layer_spec.target_layer_of)
    unfit(model, case, monkeypatch)
    with pytest.raises(UnsupportedError, match=f"^layer 0: {why}"):
        layer_stack.stack_of(model, layer_spec.target_layer_of)


def test_a_moved_cache_is_noticed(model: LlamaModel) -> None:
    stack = layer_stack.stack_of(model, layer_spec.target_layer_of)
    pool = World(Case((5,), (1,))).kv_pool
    pool.k_buffer, pool.v_buffer = pool.k_buffer * LAYERS, pool.v_buffer * LAYERS
    found = stack.for_pool(pool)
    assert stack.for_pool(pool) is found
    pool.v_buffer[1] = pool.v_buffer[1].clone()
    moved = stack.for_pool(pool)
    assert moved is not found
    assert moved.layers[1].attention.values == pool.v_buffer[1].data_ptr()
