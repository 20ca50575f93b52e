"""The two stages before training: prompts that the target writes itself, and its answers to all
prompts in a store. Both go on where a stopped run left off.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from sglang_dspark.common.files import parse_json, reading
from sglang_dspark.common.writing import replacing
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import stop_token_ids
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.models.identity import target_sha256, tokenizer_sha256
from sglang_dspark.training.config import DataConfig, RunConfig
from sglang_dspark.training.files import disk_error
from sglang_dspark.training.plan import Skipped, StoreSize, longest, planned_prompts, store_size
from sglang_dspark.training.prompts import Prompt, user_turn_prefix
from sglang_dspark.training.responses import ResponseGenerator
from sglang_dspark.training.store import StoreWriter

Progress = Callable[[int, int], None]  # done, total
_WORDS = 120  # tokens of a prompt that the target writes, at most
_LEAST_CHARACTERS = 12


def write_self_prompts(data: DataConfig, target: TargetModel, count: int, show: Progress) -> int:
    """Sample `count` user turns into `data.self_prompts`; how many different ones it holds then.

    They gather in a `.part` file that a later run continues, renamed when complete.
    """
    if data.self_prompts is None:
        raise DSparkError("set data.self_prompts to the file to write")
    tokenizer = AutoTokenizer.from_pretrained(str(data.target))
    part = data.self_prompts.with_name(data.self_prompts.name + ".part")
    lines = [line for line in _lines(part) if line.endswith("\n")]
    with reading(part, "collection of prompts", "delete it to begin anew"):
        rows = [parse_json(line) for line in lines]
        seen = {row["turns"][0] for row in rows}
        tried = 1 + max((int(row["id"].split("-")[1]) for row in rows), default=-1)
    prefix, stop = user_turn_prefix(tokenizer), stop_token_ids(data.target, tokenizer)
    wanted = (Prompt(f"self-{i}", "chat", prefix, 1.0, _WORDS) for i in range(tried, count))
    generator = ResponseGenerator(
        target, data.rows, 192, stop, keep_states=False, seed=data.seed + tried
    )
    try:
        with replacing(part, alone=True) as whole:
            whole.write_text("".join(lines), encoding="utf-8")
        with part.open("a", encoding="utf-8") as out:
            for number, response in enumerate(generator.run(wanted, lambda _: None), tried + 1):
                show(number, count)
                ended = int(response.tokens[-1]) in stop
                text = tokenizer.decode(response.tokens[response.prompt_len : -1]).strip()
                if ended and len(text) >= _LEAST_CHARACTERS and text not in seen:
                    seen.add(text)
                    row = {"id": response.id, "domain": "chat", "source": "self", "turns": [text]}
                    out.write(json.dumps(row) + "\n")
                    out.flush()
        os.replace(part, data.self_prompts)
    except OSError as error:
        raise disk_error(data.self_prompts, error) from None
    return len(seen)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines(keepends=True) if file.exists() else []


@dataclass(frozen=True)
class Answering:
    """What is left to answer, and what the whole plan takes on disk at most."""

    todo: list[Prompt]
    writer: StoreWriter
    size: StoreSize
    tokenizer: Any


def plan_answers(cfg: RunConfig, config: Any, skipped: Skipped) -> Answering:
    """Read the prompts and open the store; `config` is the target's (Transformers).

    skipped: told of every prompt left out. Raises DSparkError when the store is another target's,
    or a layer is not one of the target's.
    """
    data, layer_ids = cfg.data, cfg.drafter.target_layer_ids
    meta = {
        "target_sha256": target_sha256(data.target),
        "tokenizer_sha256": tokenizer_sha256(data.target),
        "layer_ids": list(layer_ids),
        "cached": data.cache,
        "answers": data.answers,
        "temperatures": list(data.temperatures),
        "half_products": data.half_products,
    }
    tokenizer = AutoTokenizer.from_pretrained(str(data.target))
    planned = planned_prompts(data, tokenizer, skipped)
    writer = StoreWriter(data.store, meta)
    size = store_size(data, config, len(layer_ids), planned)
    return Answering([p for p in planned if p.id not in writer.done], writer, size, tokenizer)


def answer(
    plan: Answering, data: DataConfig, target: TargetModel, minutes: float, show: Progress
) -> int:
    """Answer what is left, for `minutes` at most; tokens made. Kept shard by shard."""
    made, deadline = 0, time.monotonic() + 60 * minutes
    queue = (p for p in plan.todo if time.monotonic() < deadline)
    stop = stop_token_ids(data.target, plan.tokenizer)
    generator = ResponseGenerator(
        target,
        data.rows,
        longest(data),
        stop,
        keep_states=data.cache,
        seed=data.seed + len(plan.writer.done),
    )

    def tick(n: int) -> None:
        nonlocal made
        made += n

    try:
        for number, response in enumerate(generator.run(queue, tick), 1):
            plan.writer.add(response)
            show(number, len(plan.todo))
    finally:
        plan.writer.flush()
    return made
