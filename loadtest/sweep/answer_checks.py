"""Warn about answers that limit what a cell's figures mean.

A cell with warnings counts: its figures are right, but of another load than was intended.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sglang_dspark.loadtest.client.records import Record

ONE_CHUNK, SHORT, LOOPS = "one chunk", "short", "loops"
# Shares of the tokens asked for. A model may end its answer early, unless the request has
# `ignore_eos`; a server that does not know that field ends it anyway.
_FEW, _FEW_OF_WHOLE = 1 / 8, 1 / 2
_MANY_LOOP = 0.1  # share of the answers; a small greedy model loops now and then


def answer_warnings(done: Sequence[Record], whole: bool) -> dict[str, str]:
    """Return one line for each kind of oddity of a cell's complete answers.

    whole: the answers had to have their full length.
    """
    found: dict[str, str] = {}
    if not done:
        return found
    if all(len(record.at) == 1 for record in done) and any(r.total_tokens > 1 for r in done):
        found[ONE_CHUNK] = (
            "the server sends whole answers in one chunk: no speed per user can be measured; "
            "throughput is"
        )
    asked = [record for record in done if record.asked]
    shares = [record.total_tokens / record.asked for record in asked]
    if shares and statistics.median(shares) < (_FEW_OF_WHOLE if whole else _FEW):
        tokens = statistics.median_low(record.total_tokens for record in asked)
        wanted = statistics.median_low(record.asked for record in asked)
        found[SHORT] = f"answers are short: {tokens} of {wanted} tokens asked for (medians)"
    looping = sum(record.loops for record in done)
    if looping >= _MANY_LOOP * len(done):
        found[LOOPS] = (
            f"{looping} of {len(done)} answers end in one piece of text again and again; drafts "
            "of such text are accepted more than usual"
        )
    return found
