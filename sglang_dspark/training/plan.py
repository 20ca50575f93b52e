"""The order in which prompts are answered: domains interleaved by their shares, repeated prompts
only where the answer is sampled, so that stopping early still leaves a balanced set.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from sglang_dspark.training.config import DataConfig
from sglang_dspark.training.prompts import Prompt, chat_ids, read_prompts


def _rows(data: DataConfig) -> list[dict[str, str]]:
    files = [*data.prompts]
    if data.self_prompts and data.self_prompts.exists():
        files.append(data.self_prompts)
    return [row for file in files for row in read_prompts(file)]


def prompt_token_counts(data: DataConfig, vocab_size: int) -> Tensor:
    """How often each token occurs in the prompts' own words: [V] int64."""
    tokenizer = AutoTokenizer.from_pretrained(str(data.target))
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in _rows(data):
        ids = tokenizer(row["text"], add_special_tokens=False).input_ids
        counts += torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)
    return counts


def planned_prompts(data: DataConfig, tokenizer: Any) -> list[Prompt]:
    """Every prompt of the config's files once, in a seeded order with the domains' shares."""
    by_domain: dict[str, list[dict[str, str]]] = {}
    for row in _rows(data):
        by_domain.setdefault(row["domain"], []).append(row)
    rng = random.Random(data.seed)
    keyed: list[tuple[float, dict[str, str]]] = []
    for domain, rows in sorted(by_domain.items()):
        rng.shuffle(rows)
        share = data.shares.get(domain, 0.0)
        if share > 0:
            keyed += [((i + rng.random()) / share, row) for i, row in enumerate(rows)]
    keyed.sort(key=lambda pair: pair[0])
    planned = []
    for number, (_, row) in enumerate(keyed):
        ids = chat_ids(tokenizer, row["text"])
        if len(ids) <= data.max_prompt_tokens:
            temperature = data.temperatures[number % len(data.temperatures)]
            planned.append(Prompt(row["id"], row["domain"], ids, temperature, data.max_new_tokens))
    return planned
