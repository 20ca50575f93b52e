"""Faults of where an answer ends, of what it holds, and of who gets no drafts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FIRST, ENDED = "patches/upstream_fixes/first_stop.py", "tests/patches/test_first_stop.py"
PROCESSED = "tests/step/test_step_processors.py"

MUTANTS = tuple(
    Mutant(name, "answers", path, before, after, (test,))
    for name, path, before, after, test in (
        (
            "a window's stops are looked for all at once",
            FIRST,
            "if new_accepted_len < 2 or ",
            "if new_accepted_len > 0 or ",
            ENDED,
        ),
        (
            "a grammar's end counts for every token of its window",
            FIRST,
            "grammar if seen == new_accepted_len else None",
            "grammar",
            ENDED,
        ),
        (
            "tokens behind the end are taken from the request",
            FIRST,
            "    tokens.extend(window[seen:])\n",
            "",
            ENDED,
        ),
        (
            "bytes that are no character hide what stood in front of them",
            FIRST,
            " or _PART in tail",
            "",
            ENDED,
        ),
        (
            "a processor that reads the answer gets drafts",
            "sglang_dspark/step/rules.py",
            "0 if reads_answer(req) else gamma",
            "gamma",
            PROCESSED,
        ),
        (
            "a floor comes before a request's limit",
            "sglang_dspark/step/engine.py",
            "floors = np.minimum(floors, limits)",
            "floors = np.maximum(floors, limits)",
            PROCESSED,
        ),
        (
            "hidden states are promised where they are dropped",
            "patches/upstream_fixes/request_limits.py",
            'speculative_algorithm).upper() == "DSPARK"',
            'speculative_algorithm).upper() == "NONE"',
            "tests/patches/test_request_limits.py",
        ),
    )
)
