"""The CPU's operators of gated delta rule layers, against Transformers' and SGLang's kernels."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from sglang_dspark.backends.cpu import delta_rule
from sglang_dspark.backends.cpu.csrc import library, operator
from sglang_dspark.patches.cpu.delta_rule import gated_norm
from tests.backends.cpu.delta_rule_shapes import (
    KEY,
    KEY_HEADS,
    LENGTHS,
    SLOTS,
    VALUE_HEADS,
    WIDTH,
    Case,
    bounds,
)
from tests.backends.cpu.operator_levels import LEVELS
from tests.kernels.processes import output_of


def run(case: Case, lengths: list[int], kept: Tensor | None = None) -> Tensor:
    return delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
        **case.inputs(lengths), initial_state_source=case.states, intermediate_states_buffer=kept
    )


@pytest.mark.parametrize("seed", range(3))
def test_prompts_are_read_as_by_transformers(seed: int) -> None:
    case = Case(seed)
    decay, rate = delta_rule.fused_gdn_gating_cpu(case.a_log, case.a, case.b, case.dt_bias)
    before = case.states.clone()
    out, *_ = delta_rule.chunk_gated_delta_rule_cpu(
        case.q, case.k, case.v, decay, rate, initial_state=case.states,
        initial_state_indices=case.slots, cu_seqlens=bounds(LENGTHS),
    )  # fmt: skip
    groups = VALUE_HEADS // KEY_HEADS
    begin = 0
    for slot, length in zip(SLOTS, LENGTHS, strict=True):
        part = slice(begin, begin + length)
        begin += length
        expected, state = theirs.torch_chunk_gated_delta_rule(
            case.q[:, part].repeat_interleave(groups, 2),
            case.k[:, part].repeat_interleave(groups, 2),
            case.v[:, part],
            decay[:, part].log(),
            rate[:, part],
            initial_state=before[slot].mT[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out[:, part], expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(case.states[slot], state[0].mT, atol=2e-5, rtol=2e-5)
    others = [slot for slot in range(len(before)) if slot not in SLOTS]
    assert torch.equal(case.states[others], before[others])


@pytest.mark.skipif(library() is None, reason="torch has other bits for windows than for tokens")
def test_a_window_is_its_tokens_one_by_one() -> None:
    """Bit for bit; the states behind each token are kept, and the states themselves stay."""
    windows, single = Case(5), Case(5)
    places = windows.places = [2, 0, 3]
    kept = torch.full((len(LENGTHS) + 1, WIDTH, *windows.states.shape[1:]), torch.nan)
    before = windows.states.clone()
    out = run(windows, LENGTHS, kept)
    assert torch.equal(windows.states, before)
    begin = 0
    for row, length in enumerate(LENGTHS):
        for step in range(length):
            alone = single.token(row, begin + step)
            assert torch.equal(run(alone, [1])[0, 0], out[0, begin + step])
            assert torch.equal(kept[places[row], step], single.states[SLOTS[row]])
        begin += length
        assert kept[places[row], length:].isnan().all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_computes_what_torch_does(
    level: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for found in (partial(operator, level=level), operator, lambda *what: None):
        case = Case(7)
        monkeypatch.setattr(delta_rule, "operator", found)
        monkeypatch.setattr(delta_rule, "pool_threads", lambda wanted: threads)
        kept = torch.zeros(len(LENGTHS), WIDTH, *case.states.shape[1:])
        outputs.append((run(case, LENGTHS, kept), kept, run(case, LENGTHS), case.states))
    named, chosen, by_torch = outputs
    for mine, host, other in zip(named, chosen, by_torch, strict=True):
        assert torch.equal(mine, host)
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(library() is None, reason="torch has other bits for windows than for tokens")
@pytest.mark.parametrize("bias", [True, False])
def test_the_convolution_goes_on_where_a_prompt_ended(bias: bool) -> None:
    """A prompt in two parts, then windows, then tokens: as one convolution over all of them."""
    torch.manual_seed(1)
    rows, dim, width = 23, 37, 4
    x, weight = torch.randn(dim, rows), torch.randn(dim, width)
    added = torch.randn(dim) if bias else None
    whole = torch.nn.functional.conv1d(
        torch.nn.functional.pad(x, (width - 1, 0))[None], weight[:, None], added, groups=dim
    )
    expected = torch.nn.functional.silu(whole)[0]
    states = torch.full((3, dim, width - 1), 7.0)
    slot, found = torch.tensor([1]), []
    for begin, end in ((0, 2), (2, 11)):
        found.append(
            delta_rule.causal_conv1d_fn_cpu(
                x[:, begin:end],
                weight,
                added,
                conv_states=states,
                cache_indices=slot,
                has_initial_state=torch.tensor([begin > 0]),
                query_start_loc=torch.tensor([0, end - begin]),
            )
        )
    kept = torch.full((2, 7, dim, width - 1), 5.0)  # wider than the window
    before = states.clone()
    window = delta_rule.causal_conv1d_update_cpu(
        x[None, :, 11:17], states, weight, added, "silu", conv_state_indices=slot,
        intermediate_conv_window=kept, intermediate_state_indices=torch.tensor([1]),
    )  # fmt: skip
    assert torch.equal(states, before)
    torch.testing.assert_close(torch.cat((*found, window[0]), 1), expected[:, :17])
    for step in range(11, rows):
        token = delta_rule.causal_conv1d_update_cpu(
            x[None, :, step], states, weight, added, "silu", conv_state_indices=slot
        )
        torch.testing.assert_close(token[0], expected[:, step])
        if step < 17:
            assert torch.equal(token[0], window[0, :, step - 11])
            assert torch.equal(states[1], kept[1, step - 11])
    assert (states[[0, 2]] == 7.0).all()
    assert (kept[1, 6] == 5.0).all()


@pytest.mark.parametrize("tokens", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept_in", [torch.bfloat16, torch.float32])
def test_other_dtypes_are_convolved_in_windows_as_token_by_token(
    tokens: torch.dtype, kept_in: torch.dtype
) -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(1, 8, 3).to(tokens), torch.randn(8, 4).to(tokens)
    states, slot = torch.randn(2, 8, 3).to(kept_in), torch.tensor([1])
    kept = torch.zeros(1, 3, 8, 3, dtype=kept_in)
    window = delta_rule.causal_conv1d_update_cpu(
        x[..., :1], states, weight, None, "silu", conv_state_indices=slot,
        intermediate_conv_window=kept, intermediate_state_indices=torch.tensor([0]),
    )  # fmt: skip
    token = delta_rule.causal_conv1d_update_cpu(
        x[..., 0], states, weight, None, "silu", conv_state_indices=slot
    )
    assert window.dtype == token.dtype == tokens
    assert torch.equal(window[..., 0], token)
    assert torch.equal(kept[0, 0], states[1])


@pytest.mark.parametrize("change", ["bfloat16 states", "strided states", "wide keys"])
def test_what_the_library_does_not_support_is_torchs(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for found in (operator, lambda *what: None):
        case = Case(7, key=600 if change == "wide keys" else KEY)
        if change == "bfloat16 states":
            case.states = case.states.bfloat16()
        elif change == "strided states":
            case.states = case.states.transpose(0, 1).contiguous().transpose(0, 1)
        monkeypatch.setattr(delta_rule, "operator", found)
        outputs.append((run(case, LENGTHS), case.states))
    for mine, other in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_gates_are_torchs() -> None:
    a = torch.tensor([[-90.0, -3.0, 0.5, 19.0, 21.0, 60.0, 100.0]])
    b, a_log, bias = torch.randn(1, 7), torch.randn(7), torch.randn(7)
    decay, rate = delta_rule.fused_gdn_gating_cpu(a_log, a, b, bias)
    expected = (-a_log.exp() * torch.nn.functional.softplus(a + bias)).exp()
    torch.testing.assert_close(decay[0], expected, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(rate[0], b.sigmoid(), atol=1e-7, rtol=1e-6)


def test_states_behind_the_accepted_tokens_are_stored() -> None:
    torch.manual_seed(2)
    caches = SimpleNamespace(
        temporal=torch.zeros(2, 6, 3, 4, 4),
        conv=[torch.zeros(2, 6, 8, 3)],
        intermediate_ssm=torch.randn(2, 4, 5, 3, 4, 4),
        intermediate_conv_window=[torch.randn(2, 4, 5, 8, 3)],
    )
    delta_rule.copy_states(caches, torch.tensor([4, 2, 5, -1]), torch.tensor([3, -1, 0, 1]))
    for states, behind in (
        (caches.temporal, caches.intermediate_ssm),
        (caches.conv[0], caches.intermediate_conv_window[0]),
    ):
        assert torch.equal(states[:, 4], behind[:, 0, 3])
        assert torch.equal(states[:, 5], behind[:, 2, 0])
        assert not states[:, :4].any()


def test_norms_and_splits_are_transformers() -> None:
    torch.manual_seed(3)
    heads, size, rows = 3, 8, 5
    norm, gated = theirs.Qwen3_5RMSNorm(size), theirs.Qwen3_5RMSNormGated(size, eps=1e-6)
    with torch.no_grad():
        norm.weight.normal_()
        gated.weight.normal_()
    x, gate = torch.randn(rows, size), torch.randn(rows, size)
    found = delta_rule.fused_rmsnorm_gated_cpu(x, gated.weight, gate, 1e-6)
    torch.testing.assert_close(found, gated(x, gate))
    both, k = torch.randn(rows, heads * 2 * size), torch.randn(rows, size)
    query, key, kept = delta_rule.fused_qk_gemma_rmsnorm_with_gate_cpu(
        both, k, norm.weight, norm.weight, 1e-6, size, heads
    )
    q, g = both.view(rows, heads, 2 * size).chunk(2, -1)
    torch.testing.assert_close(query.view(rows, heads, size), norm(q))
    torch.testing.assert_close(key, norm(k))
    assert torch.equal(kept.view(rows, heads, size), g)
    plain = delta_rule.fused_qk_gemma_rmsnorm_cpu(
        q.reshape(rows, -1), k, norm.weight, norm.weight, 1e-6, size
    )
    assert torch.equal(plain[0], query)
    assert torch.equal(plain[1], key)
    other = theirs.Qwen3_5RMSNormGated(size, eps=0.5)
    layer = RMSNorm(size, eps=0.5)
    torch.testing.assert_close(gated_norm(layer, x, gate), other(x, gate))


def test_a_gated_norm_has_its_own_activation_or_is_refused() -> None:
    torch.manual_seed(4)
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    normed = torch.nn.functional.rms_norm(x, (8,), eps=1e-5)
    found = gated_norm(RMSNorm(8, activation="sigmoid"), x, gate)
    torch.testing.assert_close(found, normed * gate.sigmoid())
    for other, given in (
        (RMSNorm(8), None), (RMSNorm(8, group_size=4), gate),
        (RMSNorm(8, norm_before_gate=False), gate),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="on a CPU a gated norm"):
            gated_norm(other, x, given)


def test_projections_are_split_and_outputs_are_gated() -> None:
    torch.manual_seed(6)
    qkvz, ba = torch.randn(3, 2 * 2 * 4 + 2 * 6 * 5), torch.randn(3, 12)
    mixed, z, b, a = delta_rule.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, 2, 6, 4, 5)
    assert torch.equal(mixed, qkvz[:, :46])
    assert torch.equal(z, qkvz[:, 46:].view(3, 6, 5))
    assert torch.equal(b, ba[:, :6])
    assert torch.equal(a, ba[:, 6:])
    x, gate = torch.randn(3, 4), torch.randn(3, 4)
    expected = x * gate.sigmoid()
    delta_rule.fused_sigmoid_mul_cpu(x, gate)
    assert torch.equal(x, expected)


def test_sglangs_kernels_compute_the_same() -> None:
    """SGLang's Triton kernels, interpreted: recurrence and convolution of windows."""
    report = json.loads(output_of("tests.backends.cpu.interpreted_delta_rule"))
    assert report["outputs"] < 1e-5
    assert report["states"] < 1e-5
    assert report["convolved"] < 1e-5
    assert report["inputs"] == 0
