"""Check the trained drafter in a server as a client sees it: the last stage of `dspark train`.

An SGLang server that drafts with it answers a few prompts greedily. The answers must be
those of the target alone (reference engine, no drafter). A first difference is allowed if the
target's own two logits are closer than `NEAR_TIE`, because floating-point sums depend on how many
rows are computed together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.loadtest.client.metrics import Completion

HOST = "127.0.0.1"
NEAR_TIE = 1e-3  # logits
_READY_S = 600.0


@dataclass(frozen=True)
class ServedCheck:
    """Result of serving.

    equal, near_ties: answers like the target's own, and those that leave it at a near tie; tau:
    tokens a verify step, bonus included; tokens_per_s: one user's speed.
    """

    prompts: int
    equal: int
    near_ties: int
    tokens: int
    tau: float
    tokens_per_s: float


def serve_and_check(
    console: Console,
    target: Path,
    drafter: Path,
    *,
    port: int,
    per_domain: int,
    max_new_tokens: int,
    run_dir: Path,
) -> ServedCheck:
    """Start a server with the drafter, send the first demo prompts of each domain, stop it.

    port: 0 selects any free one. Raises DSparkError if the server does not start or an answer
    is not the target's.
    """
    import torch

    from sglang_dspark.cli._progress import stages
    from sglang_dspark.cli._workload import open_tokenizer
    from sglang_dspark.evaluation.prompts import demo_prompts, encode, limit_per_domain
    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.loadtest.servers.server import ServerProcess, stop_on_signals
    from sglang_dspark.loadtest.servers.workload import dspark_server
    from sglang_dspark.ports import free_port, require_free_port

    port = port or free_port(HOST)
    require_free_port(HOST, port)
    tokenizer = open_tokenizer(target)
    ids = [encode(tokenizer, p) for p in limit_per_domain(demo_prompts(), per_domain)]
    model = TargetModel.load(target)
    expected = plain_answers(model, ids, max_new_tokens)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = dspark_server(target, drafter, port, device)
    with stop_on_signals(), ServerProcess(spec, run_dir) as process:
        with stages(console) as show:
            process.start()
            process.wait_ready(_READY_S, lambda _s: show("starting the server", 0, 0))
        answers = asyncio.run(ask(spec.url, ids, max_new_tokens))
    console.print(f"serve it: {spec.shell_line()}", highlight=False, soft_wrap=True)
    return compare(model, ids, expected, answers)


def plain_answers(
    model: TargetModel, ids: Sequence[Sequence[int]], max_new_tokens: int
) -> list[tuple[int, ...]]:
    """Decode the target's own greedy answers; ignore stop tokens."""
    from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine

    settings = DecodeSettings(max_new_tokens=max_new_tokens, batch=len(ids))
    return [g.tokens for g in ReferenceEngine(model, None, settings).run(ids)]


async def ask(url: str, ids: Sequence[Sequence[int]], max_new_tokens: int) -> list[Completion]:
    """Send one prompt after the other, greedy; ignore stop tokens."""
    from sglang_dspark.loadtest.client.client import Sampling, SGLangClient

    sampling = Sampling(max_new_tokens=max_new_tokens, ignore_eos=True)
    async with SGLangClient(url) as client:
        await client.complete(list(ids[0]), Sampling(max_new_tokens=8))  # warm-up, not counted
        return [await client.complete(list(prompt), sampling) for prompt in ids]


def compare(
    model: TargetModel,
    ids: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    answers: Sequence[Completion],
) -> ServedCheck:
    """Count equal answers. Raises DSparkError for a difference other than at a near tie."""
    from sglang_dspark.loadtest.client.metrics import SpecStats, per_user_speed

    near_ties = 0
    for number, (prompt, own, answer) in enumerate(zip(ids, expected, answers, strict=True)):
        pairs = enumerate(zip_longest(own, answer.ids))
        parting = next(((i, one, other) for i, (one, other) in pairs if one != other), None)
        if parting is None:
            continue
        at, one, other = parting
        known = one is not None and other is not None
        if not known or _gap(model, [*prompt, *own[:at]], one, other) >= NEAR_TIE:
            raise DSparkError(
                f"the server's answer to demo prompt {number} differs from the target's own at "
                f"token {at}: {other} instead of {one}; please report it"
            )
        near_ties += 1
    spec = SpecStats.total(answer.spec for answer in answers if answer.spec is not None)
    return ServedCheck(
        prompts=len(answers),
        equal=len(answers) - near_ties,
        near_ties=near_ties,
        tokens=sum(answer.tokens for answer in answers),
        tau=spec.tau,
        tokens_per_s=per_user_speed(answers),
    )


def _gap(model: TargetModel, prefix: Sequence[int], one: int, other: int) -> float:
    """Return the distance of two tokens' logits after `prefix`."""
    import torch

    cache = model.new_cache(1, len(prefix))
    tokens = torch.tensor([list(prefix)])
    out = model.forward(tokens, torch.zeros(1, dtype=torch.long), cache)
    logits = model.logits(out.hidden[0, -1])
    return float((logits[one] - logits[other]).abs())


def as_json(check: ServedCheck, drafter_sha256: str) -> dict[str, Any]:
    """Convert the result to JSON for the run directory."""
    return {**asdict(check), "drafter_sha256": drafter_sha256}
