"""Build the load of a soak: prompts of all kinds, all request options, some requests aborted.

Math, code and chat; greedy, sampled, seeded, with stop strings, several answers, a grammar. Some
requests are aborted and some clients disconnect. Arrivals do not wait for answers: independent
ones, and bursts in between. The load of a third of the time is sent three times, each with texts
that differ only in their number, so that the last third can be compared with the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.loadtest.client.cell import CellPlan, CellPrompt
from sglang_dspark.loadtest.client.schedule import Arrival, Bursts, Schedule

THIRDS = 3
BURST_PART = 0.2  # of the requests, which arrive in bursts
BURST_EVERY_S = 60.0
FEWEST_BURSTS = 2  # in a third, however short
BROKEN_OFF = 0.1  # of the requests: half are aborted, half left
LOW_TOKENS, HIGH_TOKENS = 16, 96
PATIENCE_S = 600.0  # longest silence; a queue is no error
WAYS: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "seed": 7},
    {"stop": [".", "\n\n"]},
    {"temperature": 0.7, "n": 2},
    {"temperature": 0.0, "regex": "[A-Za-z ,]{8,40}"},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
    {"frequency_penalty": 0.3},
)


@dataclass(frozen=True)
class SoakLoad:
    """rate: requests/s on average, bursts included; seconds: of the whole soak."""

    rate: float
    seconds: float
    seed: int

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.third_s < 5:
            raise DSparkError("a soak needs a load, and a quarter of a minute at least")

    @property
    def third_s(self) -> float:
        """Return the seconds of a third."""
        return self.seconds / THIRDS

    @property
    def burst_every_s(self) -> float:
        """Return the seconds from burst to burst."""
        return min(BURST_EVERY_S, self.third_s / FEWEST_BURSTS)

    @property
    def burst_size(self) -> int:
        """Return the number of requests of a burst."""
        return max(1, round(BURST_PART * self.rate * self.burst_every_s))

    def times(self) -> list[float]:
        """Draw the arrivals of one third, s, ascending."""
        generator = np.random.default_rng(self.seed)
        count = int(self.third_s / self.burst_every_s)
        bursts = Bursts(size=self.burst_size, every_s=self.burst_every_s, count=count)
        at_once = bursts.times(generator) + self.burst_every_s / 2
        alone = max(1, math.floor(self.rate * self.third_s) - len(at_once))
        return np.sort([*at_once, *generator.uniform(0, self.third_s, alone)]).tolist()


def soak_plan(
    load: SoakLoad, prompts: Sequence[EvalPrompt], render: Callable[[EvalPrompt], str]
) -> CellPlan:
    """Plan the requests of a soak, for locust. render: converts a prompt to text."""
    times = load.times()
    lengths = _lengths(len(times), load.seed)
    arrivals, asked = [], []
    for third in range(THIRDS):
        for place, (at, tokens) in enumerate(zip(times, lengths, strict=True)):
            number = third * len(times) + place
            prompt = prompts[place % len(prompts)]
            asked.append(_prompt(prompt, render, place, number, tokens))
            arrivals.append(Arrival(number, third * load.third_s + at, number, tokens))
    return CellPlan(
        "completions",
        tuple(asked),
        Schedule(tuple(arrivals), None),
        ignore_eos=False,
        silence_s=PATIENCE_S,
        limit_s=load.seconds + PATIENCE_S,
    )


def capacity_plan(
    users: int, requests: int, prompts: Sequence[EvalPrompt], render: Callable[[EvalPrompt], str]
) -> CellPlan:
    """Plan a closed loop of the same requests, without aborts and disconnects.

    Requests have no `rid`: the loop runs twice, and SGLang aborts a `rid` 2 s after its stream.
    """
    lengths = _lengths(requests, requests)
    asked = []
    for n, tokens in enumerate(lengths):
        prompt = _prompt(prompts[n % len(prompts)], render, n, -1 - n, tokens)
        unnamed = {key: value for key, value in prompt.extra.items() if key != "rid"}
        asked.append(replace(prompt, extra=unnamed, ends=""))
    arrivals = tuple(Arrival(n, None, n, tokens) for n, tokens in enumerate(lengths))
    return CellPlan("completions", tuple(asked), Schedule(arrivals, users), ignore_eos=False)


def _lengths(count: int, seed: int) -> list[int]:
    generator = np.random.default_rng([seed, 1])
    return [int(n) for n in generator.integers(LOW_TOKENS, HIGH_TOKENS + 1, count)]


def _prompt(
    prompt: EvalPrompt, render: Callable[[EvalPrompt], str], place: int, number: int, tokens: int
) -> CellPrompt:
    """Build a request. place: in its third, which decides all but the number in the text."""
    first, *others = prompt.turns
    text = render(replace(prompt, turns=(f"({number}) {first}", *others)))
    way = dict(WAYS[place % len(WAYS)])
    broken = _broken_off(place) if way.get("n", 1) == 1 else ""
    extra = {**way, "rid": f"soak-{number}"} if broken else way
    made = CellPrompt(f"{prompt.id}-{number}", prompt.domain, text, extra)
    after = 1 + place % max(1, tokens // 2)
    if broken == "abort":
        return replace(made, ends="abort", ends_after=after)
    return replace(made, ends="leave", ends_after=after) if broken else made


def _broken_off(place: int) -> str:
    every = round(1 / BROKEN_OFF)
    if place % every != every - 1:
        return ""
    return "abort" if place // every % 2 else "leave"
