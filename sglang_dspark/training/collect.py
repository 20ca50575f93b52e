"""Run the two stages before training: prompts that the target writes, and answers to all prompts.

The answers are written to a store. Both stages continue a stopped run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.common.files import parse_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import stop_token_ids
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.models.identity import target_sha256, tokenizer_sha256
from sglang_dspark.training.answer_processes import answer_in_processes, processes_for
from sglang_dspark.training.config import DataConfig, RunConfig
from sglang_dspark.training.files import disk_error
from sglang_dspark.training.plan import Skipped, StoreSize, longest, planned_prompts, store_size
from sglang_dspark.training.prompts import Prompt, require_chat_template, user_turn_prefix
from sglang_dspark.training.responses import ResponseGenerator
from sglang_dspark.training.store import StoreWriter

Progress = Callable[[int, int], None]  # done, total
_WORDS = 120  # tokens of a prompt that the target writes, at most
_LEAST_CHARACTERS = 12


def write_self_prompts(data: DataConfig, target: TargetModel, count: int, show: Progress) -> int:
    """Sample `count` user turns into `data.self_prompts`; return how many different ones it has.

    Tried prompts are appended to a `.part` file in the order in which they end. A later run samples
    the rest, and the final file equals that of a run that was never stopped.
    """
    if data.self_prompts is None:
        raise DSparkError("set data.self_prompts to the file to write")
    tokenizer = AutoTokenizer.from_pretrained(str(data.target))
    require_chat_template(tokenizer, data.target)
    prefix, stop = user_turn_prefix(tokenizer), stop_token_ids(data.target, tokenizer)
    part = data.self_prompts.with_name(data.self_prompts.name + ".part")
    try:
        tried = _tried(part)
        left = [i for i in range(count) if i not in tried]
        wanted = (Prompt(f"self-{i}", "chat", prefix, 1.0, _WORDS) for i in left)
        generator = ResponseGenerator(
            target, data.rows, 192, stop, keep_states=False, seed=data.seed
        )
        with part.open("a", encoding="utf-8") as out:
            answers = generator.run(wanted, lambda _: None)
            for number, response in enumerate(answers, 1 + count - len(left)):
                show(number, count)
                text = usable_text(tokenizer, stop, response.tokens[response.prompt_len :].tolist())
                out.write(_line(response.id, [] if text is None else [text]))
                out.flush()
        texts = _different(_tried(part), count)
        write_prompt_rows(data.self_prompts, texts)
        part.unlink()
    except OSError as error:
        raise disk_error(data.self_prompts, error) from None
    return len(texts)


def usable_text(tokenizer: Any, stop: frozenset[int], ids: Sequence[int]) -> str | None:
    """Return the user turn that a target wrote; None if it did not end or is too short."""
    text: str = tokenizer.decode(ids[:-1]).strip()
    return text if ids and ids[-1] in stop and len(text) >= _LEAST_CHARACTERS else None


def write_prompt_rows(path: Path, texts: Mapping[str, int]) -> None:
    """Write a prompt file of different user turns, each with the number of its id."""
    with replacing(path, alone=True) as whole:
        lines = [_line(f"self-{i}", [text]) for text, i in texts.items()]
        whole.write_text("".join(lines), encoding="utf-8")


def _line(prompt_id: str, turns: list[str]) -> str:
    return json.dumps({"id": prompt_id, "domain": "chat", "source": "self", "turns": turns}) + "\n"


def _tried(part: Path) -> dict[int, list[str]]:
    """Return the turns of every tried prompt by its number, empty for one that cannot be used.

    A line that a killed run left unfinished is removed from the file.
    """
    with reading(part, "collection of prompts", "delete it to begin anew"):
        text = part.read_text(encoding="utf-8") if part.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        rows = [parse_json(line) for line in lines]
        tried = {int(row["id"].split("-")[1]): list(row["turns"]) for row in rows}
    with replacing(part, alone=True) as whole:
        whole.write_text("".join(lines), encoding="utf-8")
    return tried


def _different(tried: dict[int, list[str]], count: int) -> dict[str, int]:
    """Return the different turns of the first `count` prompts, each with its first number."""
    texts: dict[str, int] = {}
    for number in range(count):
        for text in tried[number]:
            texts.setdefault(text, number)
    return texts


@dataclass(frozen=True)
class Answering:
    """Prompts left to answer, and the most that the whole plan needs on disk."""

    todo: list[Prompt]
    writer: StoreWriter
    size: StoreSize
    tokenizer: Any


def plan_answers(cfg: RunConfig, config: Any, skipped: Skipped) -> Answering:
    """Read the prompts and open the store; `config` is the target's (Transformers).

    skipped: called for every skipped prompt. Raises DSparkError if the store is of another target
    or other layers.
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
    """Answer the remaining prompts, for at most `minutes`; return the number of tokens made.

    Answers are stored shard by shard. On a CPU `data.threads` are processes (answer_processes.py).
    """
    made, deadline = 0, time.monotonic() + 60 * minutes
    stop = stop_token_ids(data.target, plan.tokenizer)

    def start(rows: int) -> ResponseGenerator:
        return ResponseGenerator(
            target, rows, longest(data), stop, keep_states=data.cache, seed=data.seed
        )

    def tick(n: int) -> None:
        nonlocal made
        made += n

    def more() -> bool:
        return time.monotonic() < deadline

    processes = min(processes_for(target.device, data.threads), data.rows)
    if processes > 1:
        answers = answer_in_processes(start, plan.todo, more, data.rows, processes, tick)
    else:
        answers = start(data.rows).run(takewhile(lambda _: more(), plan.todo), tick)
    try:
        for number, response in enumerate(answers, 1):
            plan.writer.add(response)
            show(number, len(plan.todo))
    finally:
        plan.writer.flush()
    return made
