"""Build a target of a real model's shape without its weights, and drafters that know its answers.

Such a pair shows speed at a given acceptance, "golden acceptance": every pass costs the same as the
real model's, and the share of right drafts is set, not learned.

The target's layers are random and of full cost, but their outputs are too small to matter: the next
token depends on the last one alone, by a table. Embedding and LM head hold the table: token x has
a direction, and the LM head's row of the token behind x has the same. The table is one cycle
through all tokens, so all are equally frequent for any prompts.

The drafters hold the table too, with errors behind some tokens, which set the acceptance.
Some of the tokens are doubtful: behind them a draft is right less often than behind the others.
DSPARK's confidence head knows the doubtful ones, so its confidence is calibrated and has a spread.

Drafters with a reduced vocabulary, like trained ones, draft only some of the tokens; answers are
then cycles through these.

Such a target cannot reveal a wrong KV row: no token depends on one. A target with `attends` above 0
can. Its attention heads read few rows each, and add directions of the table as large as the last
token's. Then a token depends on all tokens before it, and the table is right in most places only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sglang_dspark.drafter.checkpoint import save_drafter
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.heads import restrict_vocabulary
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.families.mtp.checkpoint import save_mtp
from sglang_dspark.families.mtp.model import MTPConfig, MTPDrafter

SPECIALS = ("<s>", "</s>", "<pad>", "<mask>")
DTYPE = torch.bfloat16  # of the weights
_PEAK = 20.0  # logit of the token that follows; another's is seldom above a third of it
_SAYS = 1e-4  # scale of a layer's output, relative to a random model's
_SHARPNESS = 4.0  # with `attends`, deviation of attention scores, so that few rows get the weight
_POSITIONS = 8192
# A prompt ends with the user's text: its last token alone decides the answer, which would be the
# same for all prompts behind "assistant: ".
_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}\n{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}{% endfor %}"
)


@dataclass(frozen=True)
class Shape:
    """Shape of a target and its drafters, which share heads and widths.

    draft_layers, gamma and rank are DSPARK's: layers, block, and rank of its Markov head. One
    column of the rank carries the confidence, and one more a reduced vocabulary.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_layers: int
    gamma: int
    rank: int


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, draft_layers=2, gamma=7, rank=64),
    "qwen3-1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151_936, draft_layers=3, gamma=7, rank=64),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, 151_936, draft_layers=5, gamma=7, rank=256),
    "tiny": Shape(64, 4, 4, 2, 16, 128, 512, draft_layers=1, gamma=5, rank=32),
}


@dataclass(frozen=True)
class Acceptance:
    """Acceptance to simulate.

    doubtful: share of the tokens. right, otherwise: share of right drafts behind these and behind
    the others, at every position whose earlier drafts are right.
    """

    doubtful: float
    right: float
    otherwise: float

    @property
    def mean(self) -> float:
        """Return the share of right drafts, the same at every position."""
        return self.doubtful * self.right + (1 - self.doubtful) * self.otherwise


@dataclass(frozen=True)
class Table:
    """Facts that target and drafters share.

    directions [V, n]: unit rows. follows [V] int64: the token behind each, -1 behind tokens that
    only prompts contain. wrong [V] bool: the draft behind it is wrong. confidence [V]: its logit.
    drafted [V'] int64, ascending: tokens that can be drafted, None for all.
    """

    directions: Tensor
    follows: Tensor
    wrong: Tensor
    confidence: Tensor
    drafted: Tensor | None = None


def table(
    shape: Shape, acceptance: Acceptance, draft_vocab: int | None = None, seed: int = 0
) -> Table:
    """Build a table, the same for the same arguments. draft_vocab: how many tokens can be drafted.

    draft_vocab None: all. Raises ValueError if the shape has fewer words.
    """
    draws = torch.Generator().manual_seed(seed)
    count = shape.vocab
    directions = torch.randn(count, shape.rank - 1 - (draft_vocab is not None), generator=draws)
    directions /= directions.norm(dim=1, keepdim=True)
    words = len(SPECIALS) + torch.randperm(count - len(SPECIALS), generator=draws)
    if draft_vocab is not None and draft_vocab > len(words):
        raise ValueError(f"draft_vocab {draft_vocab} is more than the shape's {len(words)} words")
    cycle = words[:draft_vocab]
    follows = torch.arange(count)
    follows[words] = -1
    follows[cycle] = cycle.roll(-1)
    doubtful = torch.rand(count, generator=draws) < acceptance.doubtful
    right = torch.where(doubtful, acceptance.right, acceptance.otherwise)
    wrong = torch.rand(count, generator=draws) >= right
    drafted = None if draft_vocab is None else cycle.sort().values
    return Table(directions, follows, wrong, torch.logit(right), drafted)


def write_models(
    folder: Path,
    shape: Shape,
    acceptance: Acceptance,
    device: str,
    draft_vocab: int | None = None,
    attends: float = 0.0,
) -> None:
    """Write `target`, `dspark`, `mtp` and `follows.npy`, the token behind each.

    Weights are bfloat16, as in nearly all checkpoints. device: draws weights of the models' size;
    tables are built on the CPU. attends: size of what attention adds in all layers together, as a
    multiple of the embedding's; 0: too small to matter. Drafters know the table alone, so above 0
    they are right less often than `acceptance` says.
    """
    torch.manual_seed(0)
    known = table(shape, acceptance, draft_vocab)
    with torch.no_grad():
        embedding, head, basis = _embedding(known, shape)
        target = _target(shape, embedding, head, device)
        if attends:
            _let_attention_decide(target, basis, attends)
        target.save_pretrained(folder / "target")
        write_dspark(folder / "dspark", shape, known, device)
        _mtp(folder / "mtp", shape, embedding, known.drafted, device)
    _tokenizer(folder / "target", shape.vocab)
    np.save(folder / "follows.npy", known.follows.numpy())


def _embedding(known: Table, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return embedding and LM head [V, d], and the space of the table's directions [d-1, n].

    The embedding's last column is for MTP: 1 where its draft is to be wrong.
    """
    width = known.directions.shape[1]
    basis = torch.linalg.qr(torch.randn(shape.hidden - 1, width)).Q  # [d-1, n]
    spread = known.directions @ basis.T  # [V, d-1] unit rows
    embedding = torch.zeros(shape.vocab, shape.hidden)
    embedding[:, :-1] = spread * shape.hidden**0.5
    embedding[:, -1] = known.wrong.float()
    head = torch.zeros_like(embedding)
    cycle = _cycle(known)
    head[known.follows[cycle], :-1] = spread[cycle] * (_PEAK / shape.hidden**0.5)
    head[: len(SPECIALS)] = 0.0  # special tokens never win, so no answer ends early
    return embedding, head, basis


def _target(shape: Shape, embedding: Tensor, head: Tensor, device: str) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=False,  # a tied table would repeat each token
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype=DTYPE,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(DTYPE)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_SAYS)
        layer.mlp.down_proj.weight.mul_(_SAYS)
    model.model.embed_tokens.weight.copy_(embedding)
    model.lm_head.weight.copy_(head)
    return model


def _let_attention_decide(model: Qwen3ForCausalLM, basis: Tensor, attends: float) -> None:
    """Make attention add table directions of `attends` times the embedding's norm in all layers.

    basis: [d-1, n]. Components outside these directions would change the scale of logits, not
    their order.
    """
    config, layers = model.config, model.model.layers
    width = config.num_attention_heads * config.head_dim
    # A value's standard deviation is initializer_range * sqrt(d); heads, layers and directions add
    # as random numbers do. The embedding's norm is sqrt(d), so d cancels.
    deviation = attends / config.initializer_range / (basis.shape[1] * width * len(layers)) ** 0.5
    for layer in layers:
        projection = layer.self_attn.o_proj.weight
        spread = basis.to(projection.device)
        drawn = torch.randn(spread.shape[1], width, device=spread.device)
        projection.zero_()[:-1] = deviation * (spread @ drawn)  # the last row, MTP's, stays zero
        layer.self_attn.q_norm.weight.fill_(_SHARPNESS)


@torch.no_grad()
def write_dspark(folder: Path, shape: Shape, known: Table, device: str) -> None:
    """Write a DSPARK drafter that drafts by this table."""
    layers = torch.linspace(1, shape.layers - 3, min(5, shape.layers - 3)).round().long().tolist()
    config = DrafterConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.draft_layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        gamma=shape.gamma,
        target_layer_ids=tuple(layers),
        num_target_layers=shape.layers,
        mask_token_id=SPECIALS.index("<mask>"),
        markov_rank=shape.rank,
        max_position_embeddings=_POSITIONS,
    )
    with torch.device(device):
        drafter = DSparkDrafter(config)
    weights = drafter.state_dict()
    weights["backbone.norm.weight"].zero_()  # base logits are zero: the Markov head decides
    said, width = known.directions.clone(), known.directions.shape[1]
    wrong = known.wrong.nonzero()[:, 0]
    said[wrong] = known.directions[wrong.roll(1)]  # a wrong draft is another token's successor
    latent, out = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    latent[:, :width].copy_(said)
    latent[:, width].copy_(known.confidence)
    out.zero_()
    cycle = _cycle(known)
    out[known.follows[cycle].to(out.device), :width] = (_PEAK * known.directions[cycle]).to(out)
    out[: len(SPECIALS)] = 0.0
    weights["confidence_head.proj.weight"].zero_()[:, width - shape.rank] = 1.0
    weights["confidence_head.proj.bias"].zero_()
    if known.drafted is not None:
        restrict_vocabulary(drafter.markov_head, known.drafted.to(out.device))
    save_drafter(drafter, folder, DTYPE)


def _cycle(known: Table) -> Tensor:
    """Return the tokens [n] whose successors form the answers: those that can be drafted."""
    return torch.arange(len(known.follows)) if known.drafted is None else known.drafted


def _mtp(
    folder: Path, shape: Shape, embedding: Tensor, drafted: Tensor | None, device: str
) -> None:
    config = MTPConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        gamma=1,
        draft_vocab_size=shape.vocab if drafted is None else len(drafted),
        max_position_embeddings=_POSITIONS,
    )
    with torch.device(device):
        drafter = MTPDrafter(config, drafted)
    drafter.fc.weight.zero_()[:, : shape.hidden] = torch.eye(shape.hidden)
    drafter.fc.weight[:, shape.hidden - 1] = 4 * embedding[-1]  # outweighs the token's direction
    drafter.fc.bias.zero_()
    for name, weight in drafter.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(_SAYS)
    save_mtp(drafter, folder, DTYPE)


def _tokenizer(folder: Path, count: int) -> None:
    """Write a tokenizer of bytes, and made-up words for other ids, so that every answer is text."""
    known = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = known + [f"<{number}>" for number in range(len(known), count)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
