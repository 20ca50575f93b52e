"""The engine's measurement through a running server: same prompts, same counts.

Each prompt goes to SGLang's `/generate` as token ids. The answer's `meta_info` (0.5.23) gives
`spec_verify_ct`, `spec_num_proposed_drafts`, `spec_correct_drafts_histogram` and
`completion_tokens`: all that `statistics.acceptance` asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import DecodeSettings
from sglang_dspark.evaluation.statistics import RequestCounts
from sglang_dspark.loadtest.client import Sampling, SGLangClient


@dataclass(frozen=True)
class ServedGeneration:
    """One served request: output tokens and its acceptance counts."""

    tokens: tuple[int, ...]
    counts: RequestCounts


def measure(
    url: str,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    on_finish: Callable[[int], None] | None = None,
) -> list[ServedGeneration]:
    """Send token-id prompts to a server, `settings.batch` at a time; results in their order.

    The server stops at its model's own end-of-sequence tokens. on_finish: called with the index
    of each finished prompt. Raises DSparkError when the server cannot be reached, refuses a
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
    return _same_gamma(results)


def counts_from_meta(meta: Mapping[str, Any], url: str) -> RequestCounts:
    """Acceptance counts of one answer's `meta_info`.

    An answer that the prefill finished has no verify steps: an empty histogram. Raises
    DSparkError when the server does not speculate or the counts contradict each other.
    """
    completion = int(meta["completion_tokens"])
    if "spec_verify_ct" not in meta:
        if completion > 1:
            raise DSparkError(
                f"the server at {url} does not speculate (no spec_verify_ct in meta_info): start "
                "it with --speculative-algorithm DSPARK"
            )
        return RequestCounts(completion, ())
    steps = int(meta["spec_verify_ct"])
    gamma = int(meta["spec_num_proposed_drafts"]) // steps
    histogram = list(meta.get("spec_correct_drafts_histogram") or ())
    histogram += [0] * (gamma + 1 - len(histogram))
    counts = RequestCounts(completion, tuple(histogram))
    if counts.steps != steps or counts.accepted != int(meta["spec_num_correct_drafts"]):
        raise DSparkError(
            f"the server at {url} contradicts itself: {steps} verify steps and "
            f"{meta['spec_num_correct_drafts']} accepted drafts, histogram {histogram}"
        )
    return counts


def _same_gamma(results: list[ServedGeneration]) -> list[ServedGeneration]:
    """Give answers without a verify step a histogram as wide as the others'."""
    width = max(len(result.counts.histogram) for result in results)
    return [
        ServedGeneration(
            result.tokens,
            RequestCounts(result.counts.completion_tokens, result.counts.histogram or (0,) * width),
        )
        for result in results
    ]
