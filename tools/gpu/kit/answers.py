"""Let a plain SGLang server of the target write prompts and answer them, into the trainer's store.

Calls send and return token ids, many requests each, so answers are not detokenised and tokenised
again. The store keeps only tokens; training computes the target's states in each step. Earlier
answers are kept: a later call continues with the rest.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import httpx
import torch
from transformers import AutoConfig, AutoTokenizer

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import stop_token_ids
from sglang_dspark.loadtest.servers.server import ServerProcess
from sglang_dspark.training.collect import plan_answers, usable_text, write_prompt_rows
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.prompts import Prompt, require_chat_template, user_turn_prefix
from sglang_dspark.training.store import Response
from tools.gpu.kit.servers import server_of

USERS = {"cuda": 256, "cpu": 8}  # running requests of the server
CLIENTS = 4  # calls in flight, of a batch each, so that the server never idles
BATCH = {"cuda": 128, "cpu": 8}
OWN_PROMPTS = 16_000  # most prompts that the target writes
_WORDS = 120  # most tokens of a prompt that the target writes
_OWN_SHARE = 0.25  # share of the time for answers in which prompts are written
_CALL_S = 120.0
# Without these SGLang may apply the cuts of the model's generation_config.
_WHOLE = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One prompt for the server. ids: of the prompt; tokens: of its answer, at most."""

    ids: Sequence[int]
    temperature: float
    tokens: int


def answered(
    cfg: RunConfig, device: str, logs: Path, ready_s: float, answers_s: float
) -> dict[str, Any]:
    """Start a plain server, answer unanswered prompts for `answers_s` seconds, and stop it.

    Returns counts and speeds. Raises DSparkError if the server is not ready within `ready_s` or
    does not answer, and prints the end of its log on stderr.
    """
    users = USERS[device]
    server = ServerProcess(server_of("plain", cfg.data.target, {}, device, (users,), logs), logs)
    try:
        ready = server.start().wait_ready(ready_s)
        ends = time.monotonic() + answers_s
        found = with_server(cfg, server.spec.url, lambda: ends - time.monotonic(), BATCH[device])
    except DSparkError:
        print(server.log_tail(60), file=sys.stderr, flush=True)
        raise
    finally:
        server.stop()
    return {"ready_s": round(ready, 1), **found}


def with_server(
    cfg: RunConfig, url: str, left: Callable[[], float], batch: int = BATCH["cuda"]
) -> dict[str, Any]:
    """Write the run's own prompts if they are missing, and answer those that its store lacks.

    left: returns the seconds left. Calls in flight are awaited.
    """
    found: dict[str, Any] = {}
    own = cfg.data.self_prompts
    if own is not None and not own.is_file():
        share = _OWN_SHARE * left()
        ends = time.monotonic() + share
        found["prompts_written"] = write_prompts(cfg, url, lambda: ends - time.monotonic(), batch)
    skipped: list[str] = []
    plan = plan_answers(cfg, AutoConfig.from_pretrained(str(cfg.data.target)), skipped.append)
    todo = [prompt for prompt in plan.todo if not prompt.later]  # single-turn
    began, tokens, lock = time.monotonic(), 0, Lock()

    def keep(prompts: tuple[Prompt, ...], answers: list[list[int]]) -> None:
        nonlocal tokens
        with lock:
            for prompt, ids in zip(prompts, answers, strict=True):
                if ids:
                    plan.writer.add(response(prompt, ids))
                    tokens += len(ids)

    def answer(prompts: tuple[Prompt, ...]) -> None:
        keep(prompts, post(url, [Call(p.ids, p.temperature, p.max_new_tokens) for p in prompts]))

    try:
        while_time(in_batches(todo, batch), answer, left)
    finally:
        plan.writer.flush()
    seconds = time.monotonic() - began
    return {
        **found,
        "asked": len(todo),
        "answers": len(plan.writer.done),
        "skipped": len(skipped) + len(plan.todo) - len(todo),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
    }


def write_prompts(cfg: RunConfig, url: str, left: Callable[[], float], batch: int) -> int:
    """Let the target write user turns into `data.self_prompts`; count the distinct ones."""
    tokenizer = AutoTokenizer.from_pretrained(str(cfg.data.target))
    require_chat_template(tokenizer, cfg.data.target)
    stop = stop_token_ids(cfg.data.target, tokenizer)
    call = Call(user_turn_prefix(tokenizer), 1.0, _WORDS)
    texts: list[str] = []  # appended to by several threads, which is atomic

    def write(calls: tuple[Call, ...]) -> None:
        found = (usable_text(tokenizer, stop, ids) for ids in post(url, calls))
        texts.extend(text for text in found if text is not None)

    while_time(in_batches([call] * OWN_PROMPTS, batch), write, left)
    assert cfg.data.self_prompts is not None
    different = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    write_prompt_rows(cfg.data.self_prompts, different)
    return len(different)


def in_batches(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Yield tuples of `size` items; the last may be shorter."""
    source = iter(items)
    while found := tuple(islice(source, size)):
        yield found


def response(prompt: Prompt, ids: Sequence[int]) -> Response:
    """Build the store's record of an answer, without states."""
    tokens = torch.tensor([*prompt.ids, *ids])
    none = torch.empty(len(tokens), 0, dtype=torch.bfloat16)
    zeros = torch.zeros(len(tokens))
    size = len(prompt.ids)
    return Response(prompt.id, prompt.domain, prompt.temperature, size, tokens, none, none, zeros)


def while_time(
    items: Iterable[T], use: Callable[[T], None], left: Callable[[], float], clients: int = CLIENTS
) -> None:
    """Call `use` on the items in order from several threads until the time is up.

    Raises what `use` raises; then no thread begins another item.
    """
    source, lock, failed = iter(items), Lock(), False

    def following() -> Iterator[T]:
        while left() > 0 and not failed:
            with lock:
                found = list(islice(source, 1))
            if not found:
                return
            yield found[0]

    def work() -> None:
        nonlocal failed
        try:
            for item in following():
                use(item)
        except BaseException:
            failed = True
            raise

    with ThreadPoolExecutor(clients) as pool:
        for each in [pool.submit(work) for _ in range(clients)]:
            each.result()


def post(url: str, calls: Sequence[Call]) -> list[list[int]]:
    """Return the server's tokens for each prompt, the stop token included.

    Raises DSparkError if it does not answer each of them.
    """
    body = {
        "input_ids": [list(call.ids) for call in calls],
        "sampling_params": [
            {"temperature": call.temperature, "max_new_tokens": call.tokens, **_WHOLE}
            for call in calls
        ],
    }
    try:
        with httpx.Client(trust_env=False, timeout=_CALL_S) as client:
            answer = client.post(f"{url}/generate", json=body)
            answer.raise_for_status()
            found = [each["output_ids"] for each in answer.json()]
    except (httpx.HTTPError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise DSparkError(f"the server at {url} did not answer: {error}") from None
    if len(found) != len(calls):
        raise DSparkError(f"the server at {url} answered {len(found)} of {len(calls)} prompts")
    return found
