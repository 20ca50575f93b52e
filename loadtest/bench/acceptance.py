"""Repeat the reference engine's measurement on a running server: same prompts, same counts.

Each prompt is sent to SGLang's `/generate` as token ids, so that both decode the same input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sglang_dspark.evaluation.engine import DecodeSettings
from sglang_dspark.evaluation.served import ServedGeneration, counts_from_meta, with_one_gamma
from sglang_dspark.loadtest.client.client import Sampling, SGLangClient


def measure(
    url: str,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    on_finish: Callable[[int], None] | None = None,
) -> list[ServedGeneration]:
    """Send token-id prompts to a server, `settings.batch` at a time; return results in order.

    The server stops at its model's own end-of-sequence tokens. on_finish: called with the index
    of each finished prompt. Raises DSparkError if the server cannot be reached, refuses a
    request, or does not speculate.
    """
    return asyncio.run(_measure(url, prompts, settings, on_finish))


async def _measure(
    url: str,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    on_finish: Callable[[int], None] | None,
) -> list[ServedGeneration]:
    gate = asyncio.Semaphore(settings.batch)
    sampling = Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        extra={
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p,
        },
    )

    async def one(client: SGLangClient, index: int) -> ServedGeneration:
        async with gate:
            done = await client.generate(prompts[index], sampling, stream=False)
        if on_finish is not None:
            on_finish(index)
        return ServedGeneration(done.ids, counts_from_meta(done.meta, url))

    async with SGLangClient(url) as client:
        results = await asyncio.gather(*(one(client, index) for index in range(len(prompts))))
    return with_one_gamma(results)
