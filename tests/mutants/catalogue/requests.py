"""Faults of a server's answers by its interfaces, and of its default memory."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SERVING, TESTS = "sglang_dspark/serving", "tests/serving"

MUTANTS = tuple(
    Mutant(name, "requests", f"{SERVING}/{file}.py", before, after, (test,))
    for name, file, before, after, test in (
        (
            "an Ollama stream drops the text of its last chunk",
            "ollama_api",
            "if fresh or not done:",
            "if not done:",
            f"{TESTS}/test_ollama_api.py",
        ),
        (
            "Ollama's no limit is a limit of -1",
            "ollama_api",
            '{**result, "max_new_tokens": None}',
            "result",
            f"{TESTS}/test_ollama_api.py",
        ),
        (
            "reasoning tokens behind the end are counted",
            "reasoning_count",
            "tokens[: max(0, len(tokens) - dropped)]",
            "tokens",
            f"{TESTS}/test_reasoning_count.py",
        ),
        (
            "penalties keep the order of their set",
            "penalty_order",
            "(self, vocab_size, batch, ordered)",
            "(self, vocab_size, batch, penalizers)",
            f"{TESTS}/test_penalty_order.py",
        ),
        (
            "the anchor counts as a draft",
            "drafted_counts",
            "enumerate(lengths[1:])",
            "enumerate(lengths)",
            f"{TESTS}/test_drafted_counts.py",
        ),
        (
            "a drafter is taken for the target's new weights",
            "weight_request_check",
            "or found == architectures:",
            "or found:",
            f"{TESTS}/test_weight_request_check.py",
        ),
        (
            "an empty stop beside another one counts",
            "empty_stops",
            "[each for each in stops if each]",
            "stops",
            f"{TESTS}/test_empty_stops.py",
        ),
        (
            "any stop is reported as the client's",
            "anthropic_stops",
            "if frame.startswith(DELTA) and chat.matched in stops:",
            "if frame.startswith(DELTA) and chat.matched:",
            f"{TESTS}/test_anthropic_stops.py",
        ),
        (
            "a response is two tokens short",
            "openai_limits",
            "= min(limits)",
            "= min(limits) - 2",
            f"{TESTS}/test_openai_limits.py",
        ),
        (
            "a chunk of tool calls is parsed at once",
            "tool_call_pieces",
            "return PIECE.findall(text) or [text]",
            "return [text]",
            f"{TESTS}/test_tool_call_pieces.py",
        ),
        (
            "every rank takes the whole share of the memory",
            "cpu/pool_default",
            "* SHARE / together",
            "* SHARE",
            "tests/serving_cpu/test_pool_default.py",
        ),
        (
            "a size that the user gave is cut",
            "cpu/pool_default",
            "is not None for name in SIZES",
            "is None for name in SIZES",
            "tests/serving_cpu/test_pool_default.py",
        ),
    )
)
