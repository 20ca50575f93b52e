"""A tiny random target with its tokenizer, prompts of one and two turns, and their answers."""

import json
import resource
from contextlib import contextmanager

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.collect import answer, plan_answers
from sglang_dspark.training.config import RunConfig

TEMPLATE = (
    "{% for m in messages %}{{ '<a>' if m['role'] == 'assistant' else '<u>' }} "
    "{{ m['content'] }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    words = ["<u>", "<a>", "<e>", "<m>", *[f"w{i}" for i in range(60)]]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def config(target_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    lines = []
    for i in range(24):
        row = {"id": f"p{i}", "domain": ("math", "code", "chat")[i % 3]}
        turns = [f"w{i} w{i + 9}", f"w{i + 3}"]
        lines.append(json.dumps(row | ({"prompt": turns[0]} if i % 4 else {"turns": turns})))
    (root / "prompts.jsonl").write_text("\n".join(lines))
    raw = {
        "run_dir": root / "out",
        "data": {
            "target": target_dir,
            "prompts": [root / "prompts.jsonl"],
            "store": root / "store",
            "rows": 5,
            "max_new_tokens": 20,
            "max_prompt_tokens": 24,
            "max_tokens": 72,
            "threads": 1,
        },
        "drafter": {
            "gamma": 3,
            "layers": 1,
            "target_layer_ids": [0, 1],
            "markov_rank": 8,
            "draft_vocab": 40,
            "mask_token_id": 3,
        },
        "schedule": {
            "steps": 40,
            "anchors_per_sequence": 4,
            "warmup_steps": 4,
            "learning_rate": 3e-3,
            "log_every": 10,
            "checkpoint_every": 20,
            "threads": 1,
            "held_out_every": 8,
            "ema": 0.5,
            "device": "cpu",
            "validate_every": 20,
            "sequences_per_step": 4,
        },
    }
    cfg = RunConfig.model_validate(raw)
    generate(cfg)
    return cfg


def generate(cfg):
    """Answer what is left; how many prompts that were."""
    target = TargetModel.load(cfg.data.target, cfg.drafter.target_layer_ids)
    plan = plan_answers(cfg, target.config, lambda reason: None)
    answer(plan, cfg.data, target, 1e9, lambda *_: None)
    return len(plan.todo)


@contextmanager
def room_for(size):
    """Within, no file can grow beyond `size` bytes: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
