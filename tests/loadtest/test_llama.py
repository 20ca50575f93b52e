"""llama.cpp beside our servers: what it answers, what is timed, what is made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_dspark.cli._bench_llama import _specs
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench.llama import (
    Answered,
    LlamaCpp,
    Plan,
    Speed,
    as_metrics,
    measure,
    quantised,
    speed_of,
)
from sglang_dspark.serving.config import load_config
from tests.ports import free_ports

HEADS, HIDDEN, VOCABULARY = 2, 256, 320
PROMPT = [5, 99, 17, 203, 41]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
    )
    made = LlamaForCausalLM(config).eval()
    for weight in made.parameters():  # what float16 holds, and logits that lie apart
        weight.data = (3 * weight.data).half().float()
    return made


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as GGUF, float32."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>"] + [b"t%d" % n for n in range(3, VOCABULARY)])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3] + [1] * (VOCABULARY - 3))
    for name, tensor in model.state_dict().items():
        writer.add_tensor(gguf_name(name), turned(name, tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """Of a tensor of transformers' Llama."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for theirs, there in parts.items():
        name = name.replace(theirs, there)
    return name


def turned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Rows of queries and keys in GGUF's order: pairs that RoPE rotates lie together."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    halves = tensor.reshape(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN)
    return halves.transpose(1, 2).reshape(HIDDEN, HIDDEN).contiguous()


@pytest.fixture(scope="module")
def arm(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCpp]:
    started = LlamaCpp("f16", quantised(file, "f16", tmp_path_factory.mktemp("f16")), 1)
    yield started
    started.close()


def test_llama_cpp_answers_as_transformers_do(model: LlamaForCausalLM, arm: LlamaCpp) -> None:
    """Twice: what one answer left in the cache is not in the next."""
    expected = list(PROMPT)
    with torch.no_grad():
        for _ in range(24):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    for _ in range(2):
        assert arm.tokens_of(PROMPT, 24) == expected[len(PROMPT) :]


def test_all_arms_answer_all_prompts_in_every_repeat(
    file: Path, arm: LlamaCpp, tmp_path: Path
) -> None:
    plan = Plan((tuple(PROMPT), (7, 8, 9)), tokens=16, repeats=3, threads=1)
    other = LlamaCpp("q8_0", quantised(file, "q8_0", tmp_path), 1)
    seen: list[str] = []
    try:
        answers = asyncio.run(other.answers(plan.prompts, plan.tokens))
        found = asyncio.run(measure([arm, other], plan, lambda name, _: seen.append(name)))
    finally:
        other.close()
    assert [each.tokens for each in answers] == [16, 16]
    assert all(each.first_s > 0 and each.rest_s > 0 for each in answers)
    assert sorted(seen) == 3 * ["llama.cpp f16"] + 3 * ["llama.cpp q8_0"]
    assert seen[:2] != seen[2:4] or seen[2:4] != seen[4:6], "each repeat in the same order"
    assert all(len(speeds) == 3 and min(s.whole for s in speeds) > 0 for speeds in found.values())


def test_a_speed_counts_the_prefill_and_the_decode_speed_does_not() -> None:
    speed = speed_of([Answered(11, 1.0, 2.0), Answered(21, 3.0, 2.0)])
    assert speed == Speed(whole=32 / 8, decode=30 / 4)


def test_ratios_are_of_ours_over_theirs_in_pairs() -> None:
    found = {
        "dspark-int8": [Speed(4.0, 8.0), Speed(9.0, 6.0), Speed(16.0, 4.0)],
        "llama.cpp q8_0": [Speed(2.0, 4.0), Speed(3.0, 3.0), Speed(4.0, 2.0)],
    }
    metrics = as_metrics(found, Plan(((1,),), 8, 3, 1), {"served": "a with b"})
    (ratio,) = metrics["ratios"]
    assert (ratio["arm"], ratio["over"]) == ("dspark-int8", "llama.cpp q8_0")
    assert ratio["whole"] == pytest.approx(np.cbrt(2 * 3 * 4))
    low, high = ratio["whole_ci95"]
    assert low < ratio["whole"] < high
    assert ratio["decode"] == pytest.approx(2.0)
    assert [row["tokens_per_s"] for row in metrics["arms"]] == [9.0, 3.0]


def test_a_file_that_is_cut_off_is_one_line(file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:4096])
    with pytest.raises(DSparkError, match=r"made no q8_0 of .*broken\.gguf"):
        quantised(broken, "q8_0", tmp_path)
    with pytest.raises(DSparkError, match=r"the process of llama\.cpp f16 ended with status"):
        LlamaCpp("f16", broken, 1)


def test_our_servers_compute_with_as_many_threads(tmp_path: Path) -> None:
    specs = _specs(tmp_path, tmp_path, ["int8"], free_ports(2), tmp_path, threads=3)
    assert [spec.name for spec in specs] == ["plain-int8", "dspark-int8"]
    for spec in specs:
        named = spec.arguments[spec.arguments.index("--dspark-config") + 1]
        config = load_config(Path(named)).config
        assert (config.cpu.weights, config.cpu.activations, config.cpu.threads) == (
            "int8", "narrow", 3,
        )  # fmt: skip
