"""A tiny target that answers a prompt's last token with a given text, and a drafter that knows it.

Each script is a chain of tokens of its own. The target's next token follows from the last one alone
(`tiny_models.py`), so the first token of a chain, which the prompt ends with, decides the answer in
every API, also in those whose requests have no field for a grammar. All drafts are right: a window
holds `GAMMA` + 1 tokens of the text.

Equal pieces of text in two places are two tokens: a name in the vocabulary ends with its number,
which the tokenizer's decoder removes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.integration.tiny_models import (
    SPECIALS,
    build_target,
    normed_embedding,
    write_drafter,
)

GAMMA = 47  # a window holds two tool calls
HIDDEN = 256  # at which random embeddings are nearly orthogonal for some thousand tokens
EOS = SPECIALS.index("</s>")
LEAD = 10.0  # logit of the chain's next token; those of all others are noise around 0
# A request may switch reasoning off, as Qwen3's template lets it.
TEMPLATE = (
    "{% if enable_thinking is defined and enable_thinking is false %}/no_think {% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
# Markers that vocabularies have as one token, words with their space, brackets with the line breaks
# behind them, then single characters.
PIECES = re.compile(r"</?[a-z_]+>| ?\w+|[{}\[\]\",]\n+|.", re.DOTALL)


class ScriptedPair(NamedTuple):
    """Directories of a target and its drafter."""

    target: Path
    drafter: Path


def start_token(name: str) -> str:
    """Return the text that a prompt ends with to get the answer of this name."""
    return f"[[{name}]]"


def tokens_of(text: str) -> list[str]:
    """Cut a text as a vocabulary does; characters beyond ASCII are a token a byte."""
    found: list[str] = []
    for piece in PIECES.findall(text):
        if piece.isascii():
            found.append(piece)
        else:
            found += [f"<0x{byte:02X}>" for byte in piece.encode()]
    return found


def build(folder: Path, texts: Mapping[str, str], after_end: str) -> ScriptedPair:
    """Write target and drafter below `folder`.

    texts: answers by name. after_end: what the target says behind its EOS, which no client may see.
    """
    target, drafter = folder / "target", folder / "drafter"
    vocabulary = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    chains: list[list[int]] = []
    for text in (*texts.values(), after_end):
        cut = tokens_of(text)
        first = len(vocabulary)
        vocabulary += [f"{piece}⟦{first + at}⟧" for at, piece in enumerate(cut)]
        chains.append(list(range(first, len(vocabulary))))
    _save_tokenizer(target, vocabulary, list(texts))
    starts = range(len(vocabulary), len(vocabulary) + len(texts))
    links = [[start, *chain, EOS] for start, chain in zip(starts, chains, strict=False)]
    links.append([EOS, *chains[-1]])

    model = build_target(len(vocabulary) + len(texts), hidden=HIDDEN)
    _link(model.lm_head.weight, normed_embedding(model), links)
    model.save_pretrained(target, safe_serialization=True)
    write_drafter(drafter, model, gamma=GAMMA)
    return ScriptedPair(target, drafter)


def _link(head: torch.Tensor, embedding: torch.Tensor, links: Sequence[Sequence[int]]) -> None:
    """Set the LM head [V, d] so that each token of a chain predicts the next one.

    embedding: [V, d], normed; rows have the norm sqrt(d).
    """
    with torch.no_grad():
        head.mul_(0.1)
        for chain in links:
            for last, following in pairwise(chain):
                head[following] += LEAD / HIDDEN * embedding[last]
        chosen = (embedding @ head.T).argmax(dim=1)  # [V]
    for chain in links:
        assert chosen[chain[:-1]].tolist() == list(chain[1:])


def _save_tokenizer(folder: Path, vocabulary: Sequence[str], names: Sequence[str]) -> None:
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex("⟦[0-9]+⟧"), ""), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens([AddedToken(start_token(name), normalized=False) for name in names])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
