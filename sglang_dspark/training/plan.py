"""Order the prompts to be answered.

Domains are interleaved by their shares, so that stopping early still leaves a balanced set.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoTokenizer

from sglang_dspark.common.files import brief, fault
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import (
    calibration_prompts,
    demo_prompts,
    evaluation_prompts,
    stop_token_ids,
)
from sglang_dspark.training.config import DataConfig
from sglang_dspark.training.prompts import (
    Prompt,
    PromptRow,
    answer_ids,
    chat_ids,
    later_ids,
    read_prompts,
    require_chat_template,
)

Skipped = Callable[[str], None]


def _rows(data: DataConfig, skipped: Skipped | None) -> list[PromptRow]:
    files = [*data.prompts]
    if data.self_prompts and data.self_prompts.exists():
        files.append(data.self_prompts)
    if not files:
        raise DSparkError(
            "no prompts: name files in data.prompts, or set data.self_prompts and run "
            "`dspark train prompts`"
        )
    own = [*demo_prompts(), *evaluation_prompts(), *calibration_prompts()]
    asked = {_plain(turn) for prompt in own for turn in prompt.turns[::2]}
    kept: dict[str, PromptRow] = {}
    for file in files:
        for row in read_prompts(file, strict=data.strict, skipped=skipped):
            if not any(_plain(turn) in asked for turn in row.asked):
                _require_new(row, kept.setdefault(row.id, row))
            elif skipped:
                skipped(f"{row.where}: is one of the package's own prompts")
    return list(kept.values())


def _require_new(row: PromptRow, first: PromptRow) -> None:
    """Raise DSparkError if two rows share an id, by which a store identifies answers."""
    if row is not first:
        raise DSparkError(
            f"{first.where} and {row.where} have the same id {brief(row.id, 40)}: give rows ids of "
            "their own, or files other names, which rows without an id get theirs from"
        )


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def prompt_token_counts(data: DataConfig, vocab_size: int) -> Tensor:
    """Count each token in the user turns of the prompts: [V] int64."""
    tokenizer = AutoTokenizer.from_pretrained(str(data.target))
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in _rows(data, None):
        for turn in row.asked:
            ids = tokenizer(turn, add_special_tokens=False).input_ids
            counts += torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)
    return counts


def planned_prompts(
    data: DataConfig, tokenizer: Any, skipped: Skipped | None = None
) -> list[Prompt]:
    """Return every prompt of the config's files once, in a seeded order with the domains' shares.

    skipped: called with every skipped row and the reason. If the config is strict, raises
    DSparkError at the first row that the chat template cannot write.
    """
    ordered = _ordered(data, skipped)
    require_chat_template(tokenizer, data.target)
    stop_ids = stop_token_ids(data.target, tokenizer)
    planned = []
    for number, row in enumerate(ordered):
        temperature = data.temperatures[number % len(data.temperatures)]
        try:
            planned.append(_prompt(row, data, tokenizer, stop_ids, temperature))
        except (TemplateError, ValueError) as error:
            reason = f"{row.where}: {fault(error)}"
            if data.strict and isinstance(error, TemplateError):
                raise DSparkError(f"{reason}; correct the row, or leave --strict out") from None
            if skipped:
                skipped(reason)
    return planned


def _ordered(data: DataConfig, skipped: Skipped | None) -> list[PromptRow]:
    """Return the rows of all files, domains interleaved."""
    by_domain: dict[str, list[PromptRow]] = {}
    for row in _rows(data, skipped):
        by_domain.setdefault(row.domain, []).append(row)
    rng = random.Random(data.seed)
    keyed: list[tuple[float, PromptRow]] = []
    for domain, rows in sorted(by_domain.items()):
        rng.shuffle(rows)
        share = data.shares.get(domain, 0.0)
        if share > 0:
            keyed += [((i + rng.random()) / share, row) for i, row in enumerate(rows)]
        elif skipped:
            skipped(f"{len(rows)} prompts of domain {domain}: data.shares gives it none")
    keyed.sort(key=lambda pair: pair[0])
    return [row for _, row in keyed]


def _prompt(
    row: PromptRow, data: DataConfig, tokenizer: Any, stop_ids: frozenset[int], temperature: float
) -> Prompt:
    """Return the row in token ids.

    Raises ValueError if it is too long, jinja2's error if the template rejects it.
    """
    ids = chat_ids(tokenizer, row.opening)
    later = later_ids(tokenizer, row.turns)
    asked = len(ids) + sum(map(len, later))
    if asked > data.max_prompt_tokens:
        raise ValueError(f"{asked} tokens, data.max_prompt_tokens is {data.max_prompt_tokens}")
    answer: tuple[int, ...] = ()
    if data.answers == "given" and row.answer is not None:
        answer = answer_ids(tokenizer, row.opening, row.answer, stop_ids)[: data.max_new_tokens]
    return Prompt(row.id, row.domain, ids, temperature, data.max_new_tokens, later, answer)


def longest(data: DataConfig) -> int:
    """Return the tokens of the longest conversation that the config allows."""
    return max(data.max_prompt_tokens + data.max_new_tokens + 1, data.max_tokens)


@dataclass(frozen=True)
class StoreSize:
    """Most bytes of a plan on disk, and the bytes that stored logits would need."""

    tokens: int
    bytes_per_token: int
    logit_bytes_per_token: int

    @property
    def total(self) -> int:
        """Return the bytes on disk if every answer is as long as allowed."""
        return self.tokens * self.bytes_per_token


def store_size(data: DataConfig, target: Any, layers: int, prompts: list[Prompt]) -> StoreSize:
    """Return the size of the answers to `prompts` in the store (training/store.py has the formats).

    target: its Transformers config; layers: number of layers whose states are stored. Full logits
    would be bfloat16 over the vocabulary, in addition to the features.
    """
    token, features = 4, 2 * layers * target.hidden_size
    kept = features + 2 * target.hidden_size + 4 if data.cache else 0
    most = sum(
        min(
            len(p.ids) + sum(map(len, p.later)) + (1 + len(p.later)) * p.max_new_tokens,
            longest(data),
        )
        for p in prompts
    )
    return StoreSize(most, token + kept, token + features + 2 * target.vocab_size)
