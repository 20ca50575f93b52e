"""Faults of what refuses bad input: requests, grammars, traces; of the pool's end, of probes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARSING = "patches/upstream_fixes/request_parsing.py"
GRAMMAR = "patches/upstream_fixes/grammar_errors.py"
LIMITS, LIMITED = "patches/upstream_fixes/request_limits.py", "tests/patches/test_request_limits.py"
PATTERNS = "patches/upstream_fixes/request_limits.py"
PATTERNED = "tests/patches/test_stop_patterns.py"
NAN_ROWS, NAN_TESTS = (
    "sglang_dspark/backends/cpu/accept.py",
    "tests/backends/cpu/test_accept_nan_rows.py",
)
POOL = "patches/upstream_fixes/kv_pool_limit.py"
THRESHOLD = "sglang_dspark/schedule/static_threshold.py"
TRACES = "sglang_dspark/evaluation/traces.py"
PARSED, ENDED = "tests/patches/test_request_parsing.py", "tests/patches/test_grammar_errors.py"
ROOM, PROBED = "tests/patches/test_kv_pool_limit.py", "tests/schedule/test_static_threshold.py"
TRACED = "tests/evaluation/test_traces.py"

MUTANTS = tuple(
    Mutant(name, "bad input", path, before, after, (test,))
    for name, path, before, after, test in (
        (
            "the parts of a request of several prompts are not looked at",
            PARSING,
            "    if not request.is_single:\n",
            "    if request.is_single is None:\n",
            PARSED,
        ),
        (
            "parts keep what was set before the whole request was ready",
            PARSING,
            '        vars(request).pop("_sub_obj_cache", None)\n',
            "",
            PARSED,
        ),
        (
            "prompts are blamed before other fields",
            PARSING,
            "return 2 if name in PROMPTS else",
            "return -1 if name in PROMPTS else",
            PARSED,
        ),
        (
            "every field is tried, however many there are",
            PARSING,
            "[:MOST_TRIED]",
            "[:]",
            PARSED,
        ),
        (
            "a body that is no object is looked into",
            PARSING,
            "    if not isinstance(body, dict):\n",
            "    if isinstance(body, int):\n",
            PARSED,
        ),
        (
            "a row without tokens stays masked",
            GRAMMAR,
            "vocab_mask.masked_fill_(",
            "vocab_mask.masked_fill(",
            ENDED,
        ),
        (
            "every refused token is the request's fault",
            GRAMMAR,
            "return allowed is not None and not bool(allowed.any())",
            "return True",
            ENDED,
        ),
        (
            "a grammar at its end is asked what it allows",
            GRAMMAR,
            "    if grammar.is_terminated():\n        return None\n",
            "",
            ENDED,
        ),
        (
            "min_new_tokens is not looked at when a grammar refuses",
            GRAMMAR,
            ">= req.sampling_params.min_new_tokens",
            ">= 0",
            ENDED,
        ),
        (
            "an abort ends whoever's name begins alike",
            LIMITS,
            "if rid and any(",
            "if not rid and any(",
            LIMITED,
        ),
        (
            "a repeated choice is an ordinary pattern",
            PATTERNS,
            "return code == _CODES.BRANCH or ",
            "return ",
            PATTERNED,
        ),
        (
            "an option that is repeated is an ordinary pattern",
            PATTERNS,
            "given[0] != given[1]",
            "given[1] - given[0] > 1",
            PATTERNED,
        ),
        (
            "an answer may go beyond its request's row of slots",
            POOL,
            "    return max(extra, upstream.get_alloc_reserve_per_decode())",
            "    return extra",
            ROOM,
        ),
        (
            "a row that is no distribution stays so",
            NAN_ROWS,
            "probs[invalid, 0] = 1.0",
            "pass",
            NAN_TESTS,
        ),
        (
            "no room is left at the end of the pool",
            POOL,
            "pool - upstream.get_alloc_reserve_per_decode() - ",
            "pool - ",
            ROOM,
        ),
        (
            "an answer may have no token at the end of the pool",
            POOL,
            "max(1, room)",
            "max(0, room)",
            ROOM,
        ),
        (
            "a threshold never probes",
            THRESHOLD,
            "self._unseen[deepest:] += 1",
            "self._unseen[deepest:] += 0",
            PROBED,
        ),
        (
            "a probe looks at the first overdue position alone",
            THRESHOLD,
            "int(overdue[-1]) + 1",
            "int(overdue[0]) + 1",
            PROBED,
        ),
        (
            "a step of a trace may have any number of drafts",
            TRACES,
            "if len(drafted) != gamma:",
            "if len(drafted) < 0:",
            TRACED,
        ),
        (
            "settings of a trace may be anything",
            TRACES,
            "            number(raw[name], -MOST, MOST)\n",
            "            pass\n",
            TRACED,
        ),
        (
            "some steps of a trace may tell no confidence",
            TRACES,
            "if len(told) > 1:",
            "if len(told) > 9:",
            TRACED,
        ),
    )
)
