"""Closed-loop load: a fixed number of users who send their next prompt when an answer is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_dspark.loadtest.client import Sampling, SGLangClient
from sglang_dspark.loadtest.metrics import Completion


@dataclass(frozen=True)
class Round:
    """One pass over the prompts: answers in the prompts' order, and its length in seconds."""

    users: int
    completions: tuple[Completion, ...]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all users per second of the round, prefill included."""
        return sum(done.tokens for done in self.completions) / self.seconds


async def closed_loop(
    client: SGLangClient,
    prompts: Sequence[str],
    users: int,
    sampling: Sampling,
    on_done: Callable[[Completion], None] | None = None,
) -> Round:
    """Answer every prompt once with at most `users` requests under way.

    Raises DSparkError as the client does, after ending the other requests.
    """
    answers: list[Completion | None] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def user() -> None:
        for index, prompt in waiting:
            done = await client.complete(prompt, sampling)
            answers[index] = done
            if on_done is not None:
                on_done(done)

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(users, len(prompts))):
                group.create_task(user())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first user's failure ended the others
    seconds = time.perf_counter() - began
    return Round(users, tuple(done for done in answers if done is not None), seconds)
