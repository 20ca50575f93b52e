"""The demo's figures: the same prompts answered with and without drafts, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.loadtest.client.metrics import (
    Completion,
    SpecStats,
    median,
    per_user_speed,
)

OVERALL = "overall"


@dataclass(frozen=True)
class Pair:
    """One prompt and its two answers."""

    prompt: EvalPrompt
    dspark: Completion
    plain: Completion

    def first_difference(self) -> int | None:
        """Return the index of the first token that differs; None if the answers are equal."""
        ours, theirs = self.dspark.ids, self.plain.ids
        for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                return index
        return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


@dataclass(frozen=True)
class Summary:
    """One table row. Speeds in tokens/s per user after the first token; TTFT medians in ms."""

    domain: str
    prompts: int
    plain_tokens_per_s: float
    dspark_tokens_per_s: float
    plain_ttft_ms: float
    dspark_ttft_ms: float
    tau: float
    acceptance: tuple[float, ...]  # [gamma]: share of steps whose first k drafts were accepted
    identical: int

    @property
    def speedup(self) -> float:
        """Return DSPARK's speed over the plain server's."""
        return self.dspark_tokens_per_s / self.plain_tokens_per_s


def summarise(pairs: Sequence[Pair], gamma: int) -> list[Summary]:
    """Summarise each domain in a row, in the order of the prompts, and all in a last row."""
    domains = dict.fromkeys(pair.prompt.domain for pair in pairs)
    groups = {name: [p for p in pairs if p.prompt.domain == name] for name in domains}
    return [_row(name, group, gamma) for name, group in {**groups, OVERALL: list(pairs)}.items()]


def as_metrics(pairs: Sequence[Pair], gamma: int) -> dict[str, Any]:
    """Build the JSON-ready figures of a demo run, with each answer."""
    rows = {row.domain: {**asdict(row), "speedup": row.speedup} for row in summarise(pairs, gamma)}
    return {
        "gamma": gamma,
        "tau_demo": rows[OVERALL]["tau"],
        "speedup_vs_plain": rows[OVERALL]["speedup"],
        "merged_steps": sum(merged_steps(pair.dspark) for pair in pairs),
        "domains": rows,
        "answers": [
            {
                "id": pair.prompt.id,
                "tokens": pair.dspark.tokens,
                "steps": pair.dspark.decode_steps,
                "first_difference": pair.first_difference(),
                "text": pair.dspark.text,
            }
            for pair in pairs
        ],
    }


def merged_steps(done: Completion) -> int:
    """Count the steps whose tokens arrived in one chunk with another step's."""
    return max(0, done.decode_steps - (len(done.chunks) - 1))


def _row(domain: str, pairs: Sequence[Pair], gamma: int) -> Summary:
    ours, plain = [p.dspark for p in pairs], [p.plain for p in pairs]
    spec = SpecStats.total(done.spec for done in ours if done.spec is not None)
    return Summary(
        domain=domain,
        prompts=len(pairs),
        plain_tokens_per_s=per_user_speed(plain),
        dspark_tokens_per_s=per_user_speed(ours),
        plain_ttft_ms=1e3 * median([done.ttft for done in plain]),
        dspark_ttft_ms=1e3 * median([done.ttft for done in ours]),
        tau=spec.tau,
        acceptance=tuple(spec.acceptance(gamma)),
        identical=sum(pair.first_difference() is None for pair in pairs),
    )
