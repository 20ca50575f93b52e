"""Compare the client's totals with the server's own counters.

SGLang serves Prometheus counters at `/metrics` (launched with `--enable-metrics`). Read before and
after a cell, their growth must agree with the records. Two differences are allowed: requests that
the server ended after the client had disconnected, and tokens of cut answers, which the server
generated and the client never received. Any other difference is a fault of one side and reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.records import Outcome, Record

_GENERATED = "sglang:generation_tokens"
_PROMPT = "sglang:prompt_tokens"
_REQUESTS = "sglang:num_requests"
TOLERANCE = 0.005
# Of these the server may have counted the request or not, and all or some of its tokens.
_UNSURE: frozenset[Outcome] = frozenset(
    {"cut", "timeout", "error", "malformed", "connection", "http", "aborted", "left"}
)


@dataclass(frozen=True)
class ServerTotals:
    """Counters since the server's start; finished requests, generated and prompt tokens."""

    requests: float
    generated: float
    prompt: float


def parse_totals(text: str) -> ServerTotals:
    """Sum a `/metrics` page's counters over labels. Raises DSparkError if it is not SGLang's."""
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            values = [s.value for s in family.samples if s.name == f"{family.name}_total"]
            if values:
                sums[family.name] = sum(values)
    except ValueError as error:
        raise DSparkError(f"/metrics is not in Prometheus' format ({error})") from None
    # A counter with labels does not exist before its first increment: 0 while nothing was served.
    missing = [n for n in (_REQUESTS, _GENERATED, _PROMPT) if n not in sums]
    if missing and not text.count("sglang:"):
        raise DSparkError(
            f"/metrics has no {', '.join(missing)}; start the server with --enable-metrics"
        )
    return ServerTotals(*(sums.get(name, 0.0) for name in (_REQUESTS, _GENERATED, _PROMPT)))


def disagreements(
    records: Sequence[Record], before: ServerTotals, after: ServerTotals
) -> list[str]:
    """Return one line for each total that differs between client and server; empty if none does.

    records: of all requests sent between the two readings.
    """
    done = [record for record in records if record.outcome in ("ok", "empty")]
    unsure = [record for record in records if record.outcome in _UNSURE]
    counts = (
        ("requests", after.requests - before.requests, len(done), len(unsure)),
        (
            "generated tokens",
            after.generated - before.generated,
            sum(record.total_tokens for record in done),
            None if unsure else 0,
        ),
        (
            "prompt tokens",
            after.prompt - before.prompt,
            sum(record.prompt_tokens for record in done),
            None if unsure else 0,
        ),
    )
    return [
        f"{name}: the server counted {server:.0f}, the client {client}"
        for name, server, client, spare in counts
        if not _agree(server, client, spare)
    ]


def _agree(server: float, client: float, spare: float | None) -> bool:
    """Return whether the totals agree. spare: allowed surplus of the server; None: any."""
    slack = TOLERANCE * max(server, client)
    most = float("inf") if spare is None else client + spare
    return client - slack <= server <= most + slack
