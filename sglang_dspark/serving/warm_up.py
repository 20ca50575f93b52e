"""Answer made-up requests before the server is ready, so that no kernel compiles while serving.

Triton kernels of SGLang and of this package compile when they are first used with a batch size, a
data type or an alignment, 0.1 to 0.9 s each, and every running request waits. Made-up requests use
all of a server's kernels: prefill, with and without a cached prefix, draft, verify, accept, commit.
Nothing is learned from their steps, and kernels that compile in them are not counted.

Upstream: sglang/srt/entrypoints/warmup.py calls a registered function before HTTP is served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from fastapi import HTTPException

from sglang_dspark.serving import upstream

logger = logging.getLogger(__name__)

NAME = "dspark"
PROMPT_TOKENS = 16
ANSWER_TOKENS = 24  # two to eight steps of a drafter that fits, 24 of one that does not
_IDS = "dspark-warm-up-"  # how the made-up requests' ids begin
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
    of two, and rows of an odd number of requests begin at other alignments."""
    sizes = {min(3, most), most}
    size = 1
    while size < most:
        sizes.add(size)
        size *= 2
    return sorted(sizes)


def bodies(most: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each made-up batch; two repeat prompts, so that prefixes are cached.

    most: running requests. vocabulary: of the target. A batch has all kinds of sampling; those with
    cuts are skipped where FlashInfer is missing, without which they end SGLang's own verify step.
    """
    sizes = batch_sizes(most)
    settings = _SETTINGS if find_spec("flashinfer") else _SETTINGS[:2]
    for number, size in enumerate([*sizes, sizes[0], sizes[-1]]):
        yield {
            "rid": [f"{_IDS}{number}-{r}" for r in range(size)],
            "input_ids": [_prompt(r, vocabulary) for r in range(size)],
            "sampling_params": [
                {
                    "max_new_tokens": ANSWER_TOKENS,
                    "ignore_eos": True,
                    **settings[r % len(settings)],
                }
                for r in range(size)
            ],
        }


def _prompt(number: int, vocabulary: int) -> list[int]:
    """Return a prompt that no other number has; its first tokens are the number's digits."""
    digits = [number % _TOKENS, number // _TOKENS]
    ids = [*digits, *range(PROMPT_TOKENS - len(digits))]
    return [(_FIRST_TOKEN + each) % vocabulary for each in ids]


async def answer_made_up(mode: str, manager: Any) -> None:
    """Answer every made-up batch through `manager`, upstream's `TokenizerManager`.

    mode: of disaggregation; servers of one half are not warmed up. A failure is logged and ends
    the warm-up, not the start.
    """
    if mode != "null" or upstream.get_serving().skip_server_warmup:
        return
    began, ranks = time.monotonic(), upstream.get_parallel().num_dp_ranks
    schedule = upstream.get_schedule()
    # Requests of a batch wait in the queue first, and a full one refuses the rest of them.
    running = min(schedule.max_running_requests, schedule.max_queued_requests or 1 << 30)
    try:
        for body in bodies(running * ranks, int(manager.model_config.vocab_size)):
            async for _ in manager.generate_request(upstream.GenerateReqInput(**body), None):
                pass
    except (ValueError, HTTPException) as error:  # as upstream refuses and aborts requests
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
