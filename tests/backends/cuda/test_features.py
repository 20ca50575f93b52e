"""Test the table of GPU features: each row alone turns scheduling off."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dspark.backends.cuda import features
from sglang_dspark.backends.cuda.features import FEATURES, Start, obstacle


def arguments(**changed: Any) -> SimpleNamespace:
    """Resolved arguments of a server on one H100, as SGLang fills them in."""
    usual = {
        "attention_backend": "fa3",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "speculative_draft_attention_backend": None,
        "speculative_attention_mode": "prefill",
        "tp_size": 1,
        "pp_size": 1,
        "enable_dp_attention": False,
        "enable_lora": None,
        "enable_two_batch_overlap": False,
        "disaggregation_mode": "null",
        "dcp_size": 1,
        "enable_deterministic_inference": False,
        "rl_on_policy_target": None,
        "enable_mis": False,
        "enable_unified_memory": False,
        "kv_cache_dtype": "auto",
        "page_size": None,
        "linear_attn_backend": "triton",
        "linear_attn_decode_backend": None,
        "linear_attn_verify_backend": None,
        "enable_linear_replayssm_spec": False,
    }
    return SimpleNamespace(**(usual | changed))


ATTENTION = next(each.name for each in FEATURES if each.name.startswith("attention backends"))
USUAL = Start(arguments(), recurrent=False, variables={})
DELTA_RULE = replace(USUAL, recurrent=True, delta_rule=True)
ROWS = {  # feature's name: a start that has it and nothing else
    ATTENTION: replace(USUAL, args=arguments(attention_backend="flashinfer")),
    "trtllm_mha on Hopper and on consumer Blackwell": replace(
        USUAL, args=arguments(attention_backend="trtllm_mha")
    ),
    "triton with deterministic inference": replace(
        USUAL,
        args=arguments(attention_backend="triton", enable_deterministic_inference=True),
    ),
    "decode context parallelism": replace(USUAL, args=arguments(dcp_size=2)),
    "pipeline parallelism": replace(USUAL, args=arguments(pp_size=2)),
    "data-parallel attention": replace(USUAL, args=arguments(enable_dp_attention=True)),
    "LoRA": replace(USUAL, args=arguments(enable_lora=True)),
    "two-batch overlap": replace(USUAL, args=arguments(enable_two_batch_overlap=True)),
    "prefill and decode on different servers": replace(
        USUAL, args=arguments(disaggregation_mode="decode")
    ),
    "a target with a recurrent state other than GDN's (Mamba, KDA, Lightning)": replace(
        USUAL, recurrent=True
    ),
    "GDN verified by another kernel than Triton's, or with its replay": replace(
        DELTA_RULE, args=arguments(enable_linear_replayssm_spec=True)
    ),
    "a target with attention of its own (MiniMax-M3, Dots 3)": replace(USUAL, own_attention=True),
    "SGLANG_DSPARK_DEFER_CONTEXT_KV": replace(
        USUAL, variables={"SGLANG_DSPARK_DEFER_CONTEXT_KV": "1"}
    ),
    "SGLANG_SIMULATE_ACC_LEN": replace(USUAL, variables={"SGLANG_SIMULATE_ACC_LEN": "2.5"}),
    "schedule.threshold, schedule.algorithm early-stop": replace(USUAL, by_lengths=True),
}


def test_every_row_of_the_table_is_tried() -> None:
    assert set(ROWS) == {feature.name for feature in FEATURES}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_falls_back_with_its_own_line(feature: features.Feature) -> None:
    assert obstacle(ROWS[feature.name]) == feature.why
    assert "\n" not in feature.why


def test_ranks_that_agree_are_scheduled() -> None:
    assert obstacle(replace(USUAL, args=arguments(tp_size=8))) is None


def test_other_targets_may_have_any_kernel_of_gdn() -> None:
    other = replace(USUAL, args=arguments(linear_attn_verify_backend="flashinfer"))
    assert obstacle(other) is None


@pytest.mark.parametrize(
    ("changed", "scheduled"),
    [
        ({}, True),
        ({"linear_attn_decode_backend": "cutedsl"}, True),
        ({"linear_attn_decode_backend": "flashinfer"}, False),
        ({"linear_attn_backend": "flashinfer"}, False),
        (
            {"linear_attn_decode_backend": "flashinfer", "linear_attn_verify_backend": "triton"},
            True,
        ),
        ({"linear_attn_verify_backend": "nv_cutedsl"}, False),
    ],
)
def test_gdn_is_scheduled_where_triton_verifies(changed: dict[str, str], scheduled: bool) -> None:
    start = replace(DELTA_RULE, args=arguments(**changed))
    assert (obstacle(start) is None) == scheduled


@pytest.mark.parametrize(("generation", "scheduled"), [(9, False), (10, True), (12, False)])
def test_trtllm_mha_is_scheduled_on_datacenter_blackwell(generation: int, scheduled: bool) -> None:
    start = replace(USUAL, args=arguments(attention_backend="trtllm_mha"), generation=generation)
    assert (obstacle(start) is None) == scheduled


@pytest.mark.parametrize("backend", sorted(features.RAGGED_BACKENDS))
def test_a_usual_start_is_scheduled(backend: str) -> None:
    start = replace(USUAL, args=arguments(attention_backend=backend), generation=10)
    assert obstacle(start) is None


def test_tritons_deterministic_kernel_serves_on_policy_training_too() -> None:
    on_policy = arguments(attention_backend="triton", rl_on_policy_target="fsdp")
    assert "deterministic" in str(obstacle(replace(USUAL, args=on_policy)))
    other = arguments(attention_backend="fa3", enable_deterministic_inference=True)
    assert obstacle(replace(USUAL, args=other)) is None


def test_settings_that_mean_off_block_nothing() -> None:
    off = {"SGLANG_DSPARK_DEFER_CONTEXT_KV": "0", "SGLANG_SIMULATE_ACC_LEN": "-1"}
    assert obstacle(replace(USUAL, variables=off)) is None


@pytest.mark.parametrize(
    ("mode", "prefill", "decode", "expected"),
    [
        ("prefill", "flashinfer", "fa3", "flashinfer"),
        ("decode", "flashinfer", "fa3", "fa3"),
        ("decode", None, None, "triton"),
    ],
)
def test_the_verify_pass_has_the_backend_of_its_mode(
    mode: str, prefill: str | None, decode: str | None, expected: str
) -> None:
    args = arguments(
        attention_backend="triton",
        prefill_attention_backend=prefill,
        decode_attention_backend=decode,
        speculative_attention_mode=mode,
    )
    assert features.verify_backend(args) == expected


def test_sglang_has_the_arguments_that_are_read() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.server_args import ServerArgs

    missing = set(vars(arguments())) - set(ServerArgs.__annotations__)
    assert missing == set()
