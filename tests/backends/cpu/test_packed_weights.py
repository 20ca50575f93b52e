"""Test which weights of a model are packed, and that upstream's modules work with them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dspark.backends.cpu import attach, csrc, fast_paths, linear, packed_weights
from sglang_dspark.backends.cpu.linear import Processor
from sglang_dspark.backends.cpu.weight_formats import (
    BFLOAT16,
    BYTES,
    FORMATS,
    dense,
    format_of,
    half_rows,
    is_packed,
    pack,
    rounded_groups,
    rounded_rows,
)
from sglang_dspark.serving import config

pytestmark = pytest.mark.skipif(csrc.why_not() is not None, reason="no fused multiply-add")


class LlamaForCausalLM(nn.Module):
    """SGLang's modules under the name of a model that is packed: one product, one embedding, both
    of which take the formats, a product that does not, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        from sglang.srt.layers.quantization.unquant import (
            UnquantizedEmbeddingMethod,
            UnquantizedLinearMethod,
        )

        for name, method, n, k in (
            ("proj", UnquantizedLinearMethod(), 48, 128),
            ("embed", UnquantizedEmbeddingMethod(), 64, 128),
            ("odd", UnquantizedLinearMethod(), 48, 80),
        ):
            layer = nn.Module()
            method.create_weights(layer, k, [n], k, n, torch.float32)
            layer.quant_method = method  # type: ignore[assignment]
            layer.weight.data.normal_(generator=torch.Generator().manual_seed(k))
            self.add_module(name, layer)
        self.norm = nn.LayerNorm(128)


class OtherForCausalLM(LlamaForCausalLM):
    """The same under another name."""


def runner_of(model: nn.Module, **fields: Any) -> Any:
    arguments = SimpleNamespace(
        enable_lora=fields.pop("lora", False),
        tp_size=fields.pop("ranks", 1),
        speculative_token_map=fields.pop("token_map", None),
    )
    given = {"dtype": torch.float32, "is_draft_worker": False} | fields
    return SimpleNamespace(model=model, server_args=arguments, **given)


@pytest.fixture(params=["auto", "narrow", "wide"])
def activations(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["bfloat16", "int8"])
def form(
    request: pytest.FixtureRequest,
    activations: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    file = tmp_path / "dspark.json"
    file.write_text(json.dumps({"cpu": {"weights": request.param, "activations": activations}}))
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(file))
    monkeypatch.setattr(fast_paths, "_logged", set())
    linear.prepare.cache_clear()
    yield str(request.param)
    linear.prepare.cache_clear()


def test_rows_are_as_wide_as_configured(form: str, activations: str) -> None:
    able = Processor.host().multiplies(BYTES if form == "int8" else BFLOAT16)
    wide, narrow = ("16-bit", "8-bit") if form == "int8" else ("float32", "bfloat16")
    kept = linear.served(FORMATS[form])
    asked = activations == "narrow" if form == "int8" else activations != "wide"
    assert linear.activations_for(kept) == (narrow if able and asked else wide)
    assert linear.activations_for(FORMATS["float32"]) == "float32"


def test_products_and_embeddings_are_packed(form: str, caplog: pytest.LogCaptureFixture) -> None:
    model = LlamaForCausalLM()
    before = {name: each.clone() for name, each in model.named_parameters()}
    with caplog.at_level(logging.INFO):
        packed_weights.pack_target(runner_of(model))
    kept = linear.served(FORMATS[form])
    assert format_of(model.proj.weight) is format_of(model.embed.weight) is kept
    assert packed_weights.holds(model.proj)
    assert not packed_weights.holds(model.odd)
    for name in ("odd.weight", "norm.weight", "norm.bias"):
        assert torch.equal(model.get_parameter(name), before[name])
    (line,) = caplog.messages
    # (48 + 64) x 128 weights and 48 x 80 that stay float32
    assert line == (
        f"sglang-dspark: weights of LlamaForCausalLM are kept as {form}: "
        f"{'0.044' if form == 'bfloat16' else '0.0306'} MB instead of 0.0727; "
        f"they meet {linear.activations_for(kept)} rows"
    )


def test_upstreams_modules_go_on(form: str) -> None:
    from sglang.srt.models.dspark import project_through_lm_head

    model: Any = LlamaForCausalLM()
    tokens = torch.tensor([[3, 63, 3], [0, 1, 2]])
    packed_weights.pack_target(runner_of(model))
    packed_weights.adopt(model)
    embed = model.embed.quant_method.embedding(model.embed, tokens)
    assert torch.equal(embed, dense(model.embed.weight)[tokens])
    with torch.inference_mode():
        for rows in (4, linear.MAX_ROWS + 1):
            x = torch.randn(rows, 128)
            found = model.proj.quant_method.apply(model.proj, x)
            expected = seen_by(form, x) @ dense(model.proj.weight).T
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        head = project_through_lm_head(embed[0], model.embed)
    seen = seen_by(form, embed[0])
    torch.testing.assert_close(head, seen @ dense(model.embed.weight).T, rtol=1e-4, atol=1e-3)


def seen_by(form: str, x: torch.Tensor) -> torch.Tensor:
    """Round rows as a product with weights of a format does, by the kind of activations served."""
    ways = {"float32": lambda x: x, "bfloat16": half_rows}
    ways |= {"16-bit": rounded_rows, "8-bit": rounded_groups}
    return ways[linear.activations_for(linear.served(FORMATS[form]))](x)


def test_a_model_loaded_in_bfloat16_looks_up_bfloat16() -> None:
    """Its weights were not packed here, and its activations are bfloat16."""
    model: Any = LlamaForCausalLM().bfloat16()
    assert is_packed(model.embed.weight)
    packed_weights.adopt(model)
    found = model.embed.quant_method.embedding(model.embed, torch.tensor([1]))
    assert found.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("model", "fields", "why"),
    [
        (OtherForCausalLM, {}, "only LlamaForCausalLM, "),
        (LlamaForCausalLM, {"dtype": torch.bfloat16}, "the server computes in torch.bfloat16"),
        (LlamaForCausalLM, {"lora": True}, "LoRA adds to float32 weights"),
        (LlamaForCausalLM, {"ranks": 2}, "weights are split over ranks"),
    ],
)
def test_other_models_keep_theirs_and_say_why(
    form: str, model: Any, fields: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = model()
    with caplog.at_level(logging.INFO):
        packed_weights.pack_target(runner_of(served, **fields))
    assert not any(is_packed(weight) for weight in served.parameters())
    assert f"off: {form} weights of {model.__name__}: {why}" in caplog.messages[0]


def test_a_token_map_takes_rows_that_int8_has_not(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Upstream's EAGLE clones the LM head and indexes it."""
    model: Any = LlamaForCausalLM()
    with caplog.at_level(logging.INFO):
        packed_weights.pack_target(runner_of(model, token_map="token_map.pt"))
    if form == "int8":
        assert model.embed.weight.dtype is torch.float32
        assert "--speculative-token-map takes rows out of the LM head" in caplog.messages[0]
    else:
        rows = torch.arange(0, 64, 2)
        taken = model.embed.weight.clone()[rows]
        assert torch.equal(dense(taken), dense(model.embed.weight)[rows])
        odd, x = taken[:20].clone(), torch.randn(2, 128)  # no format takes twenty rows
        head = SimpleNamespace(weight=odd)
        with torch.inference_mode():
            found = packed_weights.EmbeddingMethod().apply(head, x)
        torch.testing.assert_close(found, x @ odd.float().T)


def test_a_draft_worker_is_left_to_its_own_hook(form: str) -> None:
    model = LlamaForCausalLM()
    packed_weights.pack_target(runner_of(model, is_draft_worker=True))
    assert not packed_weights.holds(model.proj)


class LlamaForCausalLMEagle(nn.Module):
    """An MTP draft: layers, and what joins the target's features with a token."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([LlamaForCausalLM()])
        self.model.fc = nn.Linear(128, 64)


def test_the_layers_of_an_mtp_draft_are_packed_too(form: str) -> None:
    model: Any = LlamaForCausalLMEagle()
    packed_weights.pack_target(runner_of(model, is_draft_worker=True))
    assert format_of(model.model.layers[0].proj.weight) is linear.served(FORMATS[form])
    assert model.model.fc.weight.dtype is torch.float32


def test_without_a_word_weights_stay_float32_where_bfloat16_would_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = rounded(LlamaForCausalLM())
    model.embed.weight.data[63, 127] = 1 + 2**-8  # one number of all
    with caplog.at_level(logging.INFO):
        packed_weights.pack_target(runner_of(model))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert packed_weights.form_in(model) is FORMATS["float32"]
    assert not caplog.messages


def rounded(model: nn.Module) -> Any:
    """As from a checkpoint in bfloat16."""
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def test_without_a_word_weights_of_a_bfloat16_checkpoint_are_kept_so() -> None:
    model = rounded(LlamaForCausalLM())
    before = model.proj.weight.clone()
    packed_weights.pack_target(runner_of(model))
    assert format_of(model.proj.weight) is format_of(model.embed.weight) is FORMATS["bfloat16"]
    assert packed_weights.form_in(model) is FORMATS["bfloat16"]
    assert torch.equal(dense(model.proj.weight), before)


def test_without_our_kernel_they_stay_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "dspark.json"
    file.write_text(json.dumps({"cpu": {"matrix_kernel": False}}))
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(file))
    model = rounded(LlamaForCausalLM())
    packed_weights.pack_target(runner_of(model))
    assert packed_weights.form_in(model) is FORMATS["float32"]


def kept_for(target: nn.Module, draft: nn.Module, patch: pytest.MonkeyPatch) -> str:
    """Return the part of the key of step times that names kernels and formats."""
    patch.setattr(attach, "profile_key", lambda worker, device, backend: backend)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=target))
    return str(attach._key(SimpleNamespace(target_worker=runner, draft_model=draft)))


def test_kept_step_times_are_those_of_kernel_and_formats(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = LlamaForCausalLM(), LlamaForCausalLM()
    plain = kept_for(target, draft, monkeypatch)
    packed_weights.pack_target(runner_of(target))
    packed = kept_for(target, draft, monkeypatch)
    monkeypatch.setattr(attach, "REVISION", "another")
    assert len({plain, packed, kept_for(target, draft, monkeypatch)}) == 3
    assert f"weights {form} x {linear.activations_for(linear.served(FORMATS[form]))}" in packed


def test_a_copy_is_packed_as_configured(form: str) -> None:
    weight = torch.randn(32, 64)
    assert torch.equal(
        dense(packed_weights.packed_copy(weight)), dense(pack(weight, FORMATS[form]))
    )
    odd = torch.randn(24, 64)
    assert packed_weights.packed_copy(odd) is odd


def test_a_copy_loses_no_bits_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.CONFIG_VARIABLE, raising=False)
    weight = torch.randn(32, 64)
    assert packed_weights.packed_copy(weight) is weight
    kept = packed_weights.packed_copy(weight.bfloat16().float())
    assert kept.dtype is torch.bfloat16
    assert torch.equal(dense(kept), weight.bfloat16().float())


def test_new_weights_for_int8_ones_are_refused(form: str) -> None:
    """Copied into bytes they would be noise; bfloat16 takes them as it takes any."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    model = LlamaForCausalLM()
    refusal = weight_updater._unsupported_derived_weight_cache_error
    assert refusal(model) is None
    packed_weights.pack_target(runner_of(model))
    if form == "int8":
        assert "cannot be exchanged in a running server" in str(refusal(model))
    else:
        assert refusal(model) is None
        model.proj.weight.data.copy_(torch.full((48, 128), 0.5))
        assert torch.equal(dense(model.proj.weight), torch.full((48, 128), 0.5))
