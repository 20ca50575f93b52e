"""Compare sampled requests of every kind on two servers: the share of the most likely token.

At these temperatures the made-up target's most likely token (`models.py`) has a known share of all
draws, with drafts and without: speculation must not change a distribution. `z` is the difference of
both shares in standard errors; a large one fails the stage. Each batch has one kind of request; the
last batch has all.
"""

from __future__ import annotations

import math
import sys
from itertools import cycle, islice
from typing import Any

import httpx

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench.paired import Plan
from sglang_dspark.loadtest.servers.server import ServerProcess
from tools.gpu.kit.device import say
from tools.gpu.kit.servers import named

# The logit of the table's token is 20, the others' deviation 1.25 (shape qwen3-4b).
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.5},
    "top-k": {"temperature": 6.0, "top_k": 8},
    "top-p": {"temperature": 1.5, "top_p": 0.9},
    "top-k, top-p": {"temperature": 6.0, "top_k": 8, "top_p": 0.9},
    "min-p": {"temperature": 6.0, "min_p": 0.08},
    "penalties": {"temperature": 6.0, "top_k": 8, "frequency_penalty": 0.5},
    "seeds": {"temperature": 6.0, "top_k": 8, "sampling_seed": 7},
}
MIXED = "all kinds in one batch"
ANSWER_S = 120.0
REQUESTS, TOKENS = 64, 64
MOST_Z = 5.0  # exceeded by chance in one of 200,000 runs of all kinds


def sampled(plain: ServerProcess, scheduled: ServerProcess, plan: Plan, follows: Any) -> bool:
    """Print a row for each kind; return whether both servers' distributions agree in all.

    The row of a kind that failed has the reason."""
    whole = True
    for kind in (*KINDS, MIXED):
        row: dict[str, Any] = {"sampled": kind}
        try:
            for name, server in (("plain", plain), ("dspark", scheduled)):
                row[name] = drawn(server, kind, plan, follows)
            row["z"] = deviation(row["plain"], row["dspark"])
            whole &= obeys(kind, row["plain"], row["dspark"])
        except DSparkError as error:
            row["failed"], whole = str(error), False
        say(row=row)
    return whole


def drawn(server: ServerProcess, kind: str, plan: Plan, follows: Any) -> list[int]:
    """Count [tokens of the table, all tokens] of a batch on a server frozen before and after.

    Raises DSparkError if it is not answered.
    """
    prompts = [list(plan.prompts[i % len(plan.prompts)]) for i in range(REQUESTS)]
    asked = list(islice(cycle(KINDS.values() if kind == MIXED else [KINDS[kind]]), REQUESTS))
    body = {
        "input_ids": prompts,
        "sampling_params": [
            {"max_new_tokens": TOKENS, "ignore_eos": True, **each} for each in asked
        ],
    }
    server.resume()
    try:
        answers = post(f"{server.spec.url}/generate", body)
    finally:
        server.pause()
    ids = [answer["output_ids"] for answer in answers]
    if [len(each) for each in ids] != [TOKENS] * REQUESTS:
        raise DSparkError(f"answered {sum(map(len, ids))} tokens, not {REQUESTS} times {TOKENS}")
    agreed = sum(
        named(follows, prompt[-1], each) for prompt, each in zip(prompts, ids, strict=True)
    )
    return [agreed, REQUESTS * TOKENS]


def deviation(one: list[int], other: list[int]) -> float:
    """Compute the difference of shares [some, all] in standard errors; 0 if both are 0 or 1."""
    (a, n), (b, m) = one, other
    share = (a + b) / (n + m)
    error = math.sqrt(share * (1 - share) * (1 / n + 1 / m))
    return (b / m - a / n) / error if error else 0.0


def obeys(kind: str, plain: list[int], drafted: list[int]) -> bool:
    """Return whether both servers' shares are right; print a line on stderr if not.

    Greedy tokens must all be the table's, others within `MOST_Z` standard errors of plain
    decoding."""
    z = deviation(plain, drafted)
    wrong = None
    if kind == "greedy" and not plain[0] == drafted[0] == REQUESTS * TOKENS:
        wrong = f"{plain[0]} and {drafted[0]} of {REQUESTS * TOKENS} tokens are the table's"
    elif not abs(z) <= MOST_Z:
        wrong = f"{z:.1f} standard errors from plain decoding"
    if wrong is not None:
        print(f"sampled: {kind}: {wrong}", file=sys.stderr, flush=True)
    return wrong is None


def post(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Send a batch to /generate and return the answers. Raises DSparkError without answers."""
    with httpx.Client(trust_env=False, timeout=ANSWER_S) as client:
        try:
            answer = client.post(url, json=body)
        except httpx.TransportError as error:
            raise DSparkError(f"no answer ({error})") from None
    if answer.status_code != 200:
        raise DSparkError(f"answered {answer.status_code}: {answer.text[:300]}")
    found: list[dict[str, Any]] = answer.json()
    return found
