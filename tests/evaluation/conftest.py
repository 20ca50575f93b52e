"""A tiny Llama and a drafter that often, but not always, guesses it.

The target's head is a permutation of its embedding, so the next token is mostly a fixed function of
the last one, disturbed by its two random layers. The drafter's transition bias holds the same
permutation; its backbone is random. Real accepts and real rejections come out of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_dspark.drafter import DrafterConfig, DSparkDrafter, load_drafter, save_drafter
from sglang_dspark.evaluation.target import TargetModel

VOCAB, WIDTH, GAMMA, EOS = 128, 64, 3, 127
LAYERS = (0, 1)


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, on disk and loaded."""

    target_dir: Path
    drafter_dir: Path
    target: TargetModel
    drafter: DSparkDrafter


def _permutation() -> torch.Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))


def build_target(path: Path, layers: int = 2) -> None:
    """Write the tiny Llama, float32, with a word-level tokenizer `w0 w1 ...`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embedding = torch.nn.functional.normalize(torch.randn(VOCAB, WIDTH), dim=1)
        # Large against what the random layers add, so that the permutation mostly shows through.
        model.get_input_embeddings().weight.copy_(13 * embedding)
        model.get_output_embeddings().weight[_permutation()] = embedding
    model.save_pretrained(path)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{EOS}", unk_token="w0")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} w5 {% endfor %}"
    fast.save_pretrained(path)


def build_drafter(path: Path, target: TargetModel) -> None:
    """Write the drafter in the served format."""
    torch.manual_seed(2)
    config = DrafterConfig(
        hidden_size=WIDTH,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        gamma=GAMMA,
        target_layer_ids=LAYERS,
        num_target_layers=2,
        mask_token_id=3,
        markov_rank=WIDTH,
    )
    drafter = DSparkDrafter(config)
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.copy_(target.embed_weight)
        drafter.markov_head.markov_w2.weight.copy_(12 * target.head_weight)
        drafter.backbone.norm.weight.mul_(0.5)
    save_drafter(drafter, path)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("models")
    build_target(root / "target")
    target = TargetModel.load(root / "target", LAYERS)
    build_drafter(root / "drafter", target)
    drafter = load_drafter(root / "drafter", target.embed_weight, target.head_weight)
    return Pair(root / "target", root / "drafter", target, drafter)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    lengths = [1, 9, 4, 17, 2, 30, 7]
    return [torch.randint(0, VOCAB - 1, (n,), generator=generator).tolist() for n in lengths]
