"""Attention backend, data type and graph sizes that the user does not name, by real ServerArgs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dspark.backends.cuda.features import GPUS, RAGGED_BACKENDS, default_backend
from sglang_dspark.serving.mode import COMPACT, VARIABLE
from tests.backends.cuda.test_features import arguments
from tests.integration import tiny_models

pytestmark = pytest.mark.xdist_group("imports")

A100, L40S, H100, B200, RTX5090 = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
SWITCHED = "sglang-dspark: attention backend {}, not SGLang's default flashinfer"


def case(
    capability: tuple[int, int], environment: dict[str, str] | None = None, **named: Any
) -> dict[str, Any]:
    """A server on a GPU of this capability with 80 GiB; named: what its user sets."""
    return {
        "capability": capability,
        "memory": 80,
        "environment": environment or {},
        "arguments": named,
    }


CASES = {
    "A100": case(A100),
    "L40S": case(L40S),
    "H100": case(H100),
    "B200": case(B200),
    "RTX 5090": case(RTX5090),
    "T4": case((7, 5)),
    "named": case(A100, attention_backend="flashinfer"),
    "prefill named": case(A100, prefill_attention_backend="flashinfer"),
    "decode named": case(A100, decode_attention_backend="flashinfer"),
    "draft named": case(A100, speculative_draft_attention_backend="flashinfer"),
    "static": case(A100, {VARIABLE: "static"}),
    "not scheduled anyway": case(A100, enable_lora=True),
    "FP8 cache on an A100": case(A100, kv_cache_dtype="fp8_e4m3"),
    "FP8 cache on an L40S": case(L40S, kv_cache_dtype="fp8_e4m3"),
    "page size on a B200": case(B200, page_size=1),
    "graph sizes named": case(H100, cuda_graph_max_bs_decode=256),
    "size list named": case(H100, cuda_graph_bs_decode=[1, 8, 96]),
    "requests named": case(H100, max_running_requests=128),
    "no graphs": case(H100, disable_cuda_graph=True),
    "warm-up named": case(H100, warmups="prefill_shapes"),
    "warm-up skipped": case(H100, skip_server_warmup=True),
    "two tokenizers": case(H100, tokenizer_worker_num=2),
    "dtype named": case(H100, dtype="float16"),
}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Resolve every case; by its name."""
    pair = tiny_models.build(tmp_path_factory.mktemp("pair"))
    for folder, dtype in ((pair.target, "bfloat16"), (pair.drafter, "float32")):
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | {"dtype": dtype}))
    program = [sys.executable, "-m", "tests.backends.cuda.resolved_arguments"]
    done = subprocess.run(
        [*program, str(pair.target), str(pair.drafter), json.dumps(list(CASES.values()))],
        env={**os.environ, VARIABLE: "", "SGLANG_DSPARK_CONFIG": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize(
    ("name", "backend"),
    [("A100", "triton"), ("L40S", "triton"), ("B200", "trtllm_mha"), ("RTX 5090", "triton")],
)
def test_a_gpu_with_another_default_is_scheduled(
    resolved: dict[str, Any], name: str, backend: str
) -> None:
    found = resolved[name]
    assert found["attention_backend"] == backend
    assert found["mode"] == COMPACT
    (line,) = [line for line in found["said"] if "attention backend" in line]
    assert line.startswith(SWITCHED.format(backend))


def test_trtllm_mha_gets_a_page_size_that_it_reads(resolved: dict[str, Any]) -> None:
    assert resolved["B200"]["page_size"] == 64
    assert resolved["A100"]["page_size"] == 1


def test_hopper_keeps_sglangs_default(resolved: dict[str, Any]) -> None:
    found = resolved["H100"]
    assert (found["attention_backend"], found["mode"]) == ("fa3", COMPACT)
    assert not [line for line in found["said"] if "attention" in line]


@pytest.mark.parametrize(
    "name",
    [
        "T4",
        "named",
        "prefill named",
        "decode named",
        "draft named",
        "static",
        "not scheduled anyway",
        "FP8 cache on an A100",
        "page size on a B200",
    ],
)
def test_what_the_user_names_or_the_gpu_cannot_read_stays(
    resolved: dict[str, Any], name: str
) -> None:
    found = resolved[name]
    assert found["attention_backend"] == "flashinfer"
    assert found["mode"] != COMPACT
    assert not [line for line in found["said"] if "not SGLang's default" in line]


def test_an_fp8_cache_is_read_from_sm_89_on(resolved: dict[str, Any]) -> None:
    assert resolved["FP8 cache on an L40S"]["attention_backend"] == "triton"


def test_the_drafter_is_loaded_in_the_targets_type(resolved: dict[str, Any]) -> None:
    """Its file says float32, for which SGLang's `auto` is float16; the target's says bfloat16."""
    assert (resolved["H100"]["dtype"], resolved["H100"]["draft_dtype"]) == (
        "bfloat16",
        "torch.bfloat16",
    )
    assert resolved["dtype named"]["draft_dtype"] == "torch.float16"


def test_the_drafter_inherits_the_backend(resolved: dict[str, Any]) -> None:
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES

    for name in ("A100", "B200"):
        assert resolved[name]["speculative_draft_attention_backend"] is None
        assert resolved[name]["attention_backend"] in DRAFT_ATTENTION_BACKEND_CHOICES


def test_the_table_declares_backends_with_ragged_windows() -> None:
    assert {gpu.backend for gpu in GPUS} <= RAGGED_BACKENDS
    assert [gpu.generation for gpu in GPUS] == sorted({gpu.generation for gpu in GPUS})


@pytest.mark.parametrize(
    ("named", "asymmetric", "expected"),
    [
        ({}, False, "trtllm_mha"),
        ({}, True, "fa4"),
        ({"page_size": 64}, True, None),
        *(({"page_size": size}, False, "trtllm_mha") for size in (16, 32, 64, 128)),
        *(({"page_size": size}, False, None) for size in (1, 8, 127, 256)),
        ({"enable_unified_memory": True}, False, None),
        ({"kv_cache_dtype": "fp8_e5m2"}, False, None),
        ({"enable_mis": True}, False, None),
    ],
)
def test_on_datacenter_blackwell(
    named: dict[str, Any], asymmetric: bool, expected: str | None
) -> None:
    args = arguments(attention_backend=None, **named)
    assert default_backend("flashinfer", args, B200, asymmetric=asymmetric) == expected


@pytest.mark.parametrize(("is_mla", "encodes"), [(True, False), (False, True)])
def test_latent_attention_and_encoders_keep_sglangs(is_mla: bool, encodes: bool) -> None:
    """Nothing else is read of them: a GPU that is not faked here would raise."""
    from sglang_dspark.patches.cuda.attention import choose_backend

    model = SimpleNamespace(is_encoder_decoder=encodes, has_asymmetric_kv=False)
    assert choose_backend(lambda *given: "flashinfer", None, is_mla, model) == "flashinfer"


def test_a_default_that_has_windows_stays() -> None:
    """SGLang's own choice without FlashInfer, or of a target with attention sinks."""
    args = arguments(attention_backend=None)
    assert default_backend("triton", args, B200, asymmetric=False) is None
    assert default_backend("flashinfer", args, A100, asymmetric=False) == "triton"


def test_graph_sizes_are_those_that_are_captured(resolved: dict[str, Any]) -> None:
    """SGLang's runner captures the sizes up to the requests that run, and that number."""
    every = resolved["graph sizes named"]["decode_sizes"]
    assert max(every) == 256
    assert resolved["H100"]["max_running_requests"] == 48
    assert resolved["H100"]["decode_sizes"] == [size for size in every if size <= 48]
    assert resolved["H100"]["largest_size"] == 48
    (line,) = resolved["H100"]["said"]
    assert line.startswith("sglang-dspark: decode graphs are sized for 48 running requests")


@pytest.mark.parametrize(
    ("name", "largest"), [("size list named", 96), ("requests named", 128), ("no graphs", 256)]
)
def test_sizes_that_follow_the_user_stay(resolved: dict[str, Any], name: str, largest: int) -> None:
    assert max(resolved[name]["decode_sizes"]) == largest
    assert not [line for line in resolved[name]["said"] if "decode graphs" in line]


@pytest.mark.parametrize(
    ("name", "warmups"),
    [("H100", "dspark"), ("static", "dspark"), ("warm-up named", "prefill_shapes,dspark"),
     ("warm-up skipped", None), ("two tokenizers", None)],
)  # fmt: skip
def test_our_warm_up_is_named_behind_the_users(
    resolved: dict[str, Any], name: str, warmups: str | None
) -> None:
    """With several tokenizer processes nothing is registered in the one that would answer."""
    assert resolved[name]["warmups"] == warmups
