"""Answer made-up requests before the server is ready, so that no kernel compiles while serving.

Triton kernels of SGLang and of this package compile when they are first used with a batch size, a
data type or an alignment, 0.1 to 0.9 s each, and every running request waits. Made-up requests use
all of a server's kernels: prefill, with and without a cached prefix, draft, verify, accept, commit.
Nothing is learned from their steps, and kernels that compile in them are not counted.

Upstream: sglang/srt/entrypoints/warmup.py calls a registered function before HTTP is served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from fastapi import HTTPException

from sglang_dspark.serving import upstream
from sglang_dspark.serving.mode import choice

logger = logging.getLogger(__name__)

NAME = "dspark"
PROMPT_TOKENS = 16
ANSWER_TOKENS = 24  # two to eight steps of a drafter that fits, 24 of one that does not
# Prompts that start while others are answered. Slots of the KV cache are handed out in order, 8
# bytes each, and Triton compiles a kernel again for a list of them that begins at an odd place. A
# health check sends one token.
_STAGGERED = (17, 33, 1, 18, 21)
_IDS = "dspark-warm-up-"  # prefix of the made-up requests' ids
_FIRST_TOKEN, _TOKENS = 100, 800  # token ids of prompts, below any special ones of large models
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
)


def is_made_up(reqs: Sequence[Any]) -> bool:
    """Return whether all requests of a batch are the warm-up's own."""
    return all(str(req.rid).startswith(_IDS) for req in reqs)


def batch_sizes(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 8, 16, ... and `most`: kernels round the number of requests up to a power
    of two, and rows of an odd number of requests start at other alignments."""
    sizes = {min(3, most), most}
    size = 1
    while size < most:
        sizes.add(size)
        size *= 2
    return sorted(sizes)


def bodies(most: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each made-up batch; two repeat prompts, so that prefixes are cached.

    most: running requests. vocabulary: of the target. A batch has all kinds of sampling. SGLang's
    own verify step requires FlashInfer for cuts, and for greedy next to sampled requests: without
    it no request has cuts, and where drafts are not scheduled every batch has one kind.
    """
    sizes = batch_sizes(most)
    settings = _SETTINGS if find_spec("flashinfer") else _SETTINGS[:2]
    mixed = len(settings) == len(_SETTINGS) or choice().ours
    groups = [settings] if mixed else [(kind,) for kind in settings]
    batches = [(size, kinds) for size in (*sizes, sizes[0], sizes[-1]) for kinds in groups]
    for number, (size, kinds) in enumerate(batches):
        yield {
            "rid": [f"{_IDS}{number}-{r}" for r in range(size)],
            "input_ids": [_prompt(r, vocabulary) for r in range(size)],
            "sampling_params": [
                _sampling(ANSWER_TOKENS, kinds[r % len(kinds)]) for r in range(size)
            ],
        }


def staggered(ranks: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments of batches, each to start while the previous one is answered.

    ranks: replicas, to which SGLang assigns requests in turn; a batch has one for each.
    """
    last = _TOKENS * _TOKENS - 1  # counted down from here: digits that no request in `bodies` has
    for number, length in enumerate(_STAGGERED):
        prompts = [_prompt(last - number * ranks - r, vocabulary, length) for r in range(ranks)]
        yield {
            "rid": [f"{_IDS}staggered-{number}-{r}" for r in range(ranks)],
            "input_ids": prompts,
            "sampling_params": [_sampling(2 * ANSWER_TOKENS, _SETTINGS[0])] * ranks,
            "stream": True,
        }


def _sampling(tokens: int, kind: dict[str, Any]) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "ignore_eos": True, **kind}


def _prompt(number: int, vocabulary: int, length: int = PROMPT_TOKENS) -> list[int]:
    """Return a prompt that no other number has; its first tokens are the number's digits."""
    ids = [number % _TOKENS, number // _TOKENS, *range(length)][:length]
    return [(_FIRST_TOKEN + each) % vocabulary for each in ids]


async def answer_made_up(mode: str, manager: Any) -> None:
    """Answer every made-up batch through `manager`, upstream's `TokenizerManager`.

    mode: of disaggregation; a server of one half is not warmed up. A failure is logged and ends
    the warm-up, not the start.
    """
    if mode != "null" or upstream.get_serving().skip_server_warmup:
        return
    began, ranks = time.monotonic(), upstream.get_parallel().num_dp_ranks
    schedule = upstream.get_schedule()
    # Requests of a batch first wait in the queue; a full queue refuses the rest of them.
    running = min(schedule.max_running_requests, schedule.max_queued_requests or 1 << 30)
    try:
        vocabulary = int(manager.model_config.vocab_size)
        for body in bodies(running * ranks, vocabulary):
            await _answer(manager, body)
        await _answer_staggered(manager, ranks, vocabulary)
    except (ValueError, HTTPException) as error:  # upstream refuses or aborts requests
        logger.warning(
            "sglang-dspark: kernels will be compiled while serving: a made-up request failed (%s)",
            error,
        )
        return
    logger.info(
        "sglang-dspark: warmed up with batches of 1 to %d made-up requests in %.1f s",
        running,
        time.monotonic() - began,
    )


async def _answer(manager: Any, body: dict[str, Any], begun: asyncio.Event | None = None) -> None:
    """Answer one body; `begun` is set with the first output, or with a failure.

    Raises ValueError where upstream aborts a streamed request, which it reports as an output.
    """
    try:
        async for output in manager.generate_request(upstream.GenerateReqInput(**body), None):
            for part in output if isinstance(output, list) else [output]:
                ended = part.get("meta_info", {}).get("finish_reason") or {}
                if ended.get("type") == "abort":
                    raise ValueError(ended.get("message"))
            if begun is not None:
                begun.set()
    finally:
        if begun is not None:
            begun.set()


async def _answer_staggered(manager: Any, ranks: int, vocabulary: int) -> None:
    """Answer each batch next to the previous one; if one fails, cancel the others."""
    answers = []
    try:
        for body in staggered(ranks, vocabulary):
            begun = asyncio.Event()
            answers.append(asyncio.create_task(_answer(manager, body, begun)))
            await begun.wait()
        await asyncio.gather(*answers)
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
