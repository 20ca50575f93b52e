"""Faults of a server's answers by its interfaces, and of its default memory."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FIXES, TESTS = "patches/upstream_fixes", "tests/patches"

MUTANTS = tuple(
    Mutant(
        name,
        "requests",
        file,
        before,
        after,
        (test,),
    )
    for name, file, before, after, test in (
        (
            "an Ollama stream drops the text of its last chunk",
            f"{FIXES}/ollama_api.py",
            "if fresh or not done:",
            "if not done:",
            f"{TESTS}/test_ollama_api.py",
        ),
        (
            "Ollama's no limit is a limit of -1",
            f"{FIXES}/ollama_api.py",
            '{**result, "max_new_tokens": None}',
            "result",
            f"{TESTS}/test_ollama_api.py",
        ),
        (
            "reasoning tokens behind the end are counted",
            f"{FIXES}/reasoning_count.py",
            "tokens[: max(0, len(tokens) - dropped)]",
            "tokens",
            f"{TESTS}/test_reasoning_count.py",
        ),
        (
            "penalties keep the order of their set",
            f"{FIXES}/penalty_order.py",
            "(self, vocab_size, batch, ordered)",
            "(self, vocab_size, batch, penalizers)",
            f"{TESTS}/test_penalty_order.py",
        ),
        (
            "the anchor counts as a draft",
            "patches/step/drafted_counts.py",
            "enumerate(lengths[1:])",
            "enumerate(lengths)",
            f"{TESTS}/test_drafted_counts.py",
        ),
        (
            "a drafter is taken for the target's new weights",
            f"{FIXES}/weight_request_check.py",
            "or found == architectures:",
            "or found:",
            f"{TESTS}/test_weight_request_check.py",
        ),
        (
            "an empty stop beside another one counts",
            f"{FIXES}/empty_stops.py",
            "[each for each in stops if each]",
            "stops",
            f"{TESTS}/test_empty_stops.py",
        ),
        (
            "any stop is reported as the client's",
            f"{FIXES}/anthropic_stops.py",
            "if frame.startswith(DELTA) and chat.matched in stops:",
            "if frame.startswith(DELTA) and chat.matched:",
            f"{TESTS}/test_anthropic_stops.py",
        ),
        (
            "a response is two tokens short",
            f"{FIXES}/openai_limits.py",
            "= min(limits)",
            "= min(limits) - 2",
            f"{TESTS}/test_openai_limits.py",
        ),
        (
            "a chunk of tool calls is parsed at once",
            f"{FIXES}/tool_call_pieces.py",
            "return PIECE.findall(text) or [text]",
            "return [text]",
            f"{TESTS}/test_tool_call_pieces.py",
        ),
        (
            "every rank takes the whole share of the memory",
            "patches/cpu/pool_default.py",
            "* SHARE / together",
            "* SHARE",
            "tests/patches/test_pool_default.py",
        ),
        (
            "a size that the user gave is cut",
            "patches/cpu/pool_default.py",
            "is not None for name in SIZES",
            "is None for name in SIZES",
            "tests/patches/test_pool_default.py",
        ),
    )
)
