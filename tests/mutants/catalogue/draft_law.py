"""Wrong laws in the served accept rule (paper, 3.1: min(1, p_t / p_d))."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FILE = "sglang_dspark/backends/cpu/accept.py"
TESTS = ("tests/backends/cpu/test_accept_distribution.py::test_two_tokens_follow_the_target",)


def _mutant(name: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, area="draft law", file=FILE, old=old, new=new, tests=TESTS)


DRAFT_LAW = (
    _mutant(
        "draft law without its temperature",
        "draft_block.corrected_logits[:, : width - 1] / temperature",
        "draft_block.corrected_logits[:, : width - 1]",
    ),
    _mutant(
        "draft law at temperature 1 / T",
        "draft_block.corrected_logits[:, : width - 1] / temperature",
        "draft_block.corrected_logits[:, : width - 1] * temperature",
    ),
    _mutant(
        "draft law of another row",
        "draft_block.corrected_logits[:, : width - 1] / temperature",
        "draft_block.corrected_logits[:, : width - 1].flip(1) / temperature",
    ),
    _mutant(
        "target law without its temperature",
        "sampling_probs(logits[rows], sampling_info, lens)",
        "sampling_probs(logits[rows] * sampling_info.temperatures.repeat_interleave(lens, 0), "
        "sampling_info, lens)",
    ),
    _mutant(
        "target rows of the next request",
        "rows = (starts[:, None] + torch.arange(width))[at]",
        "rows = (starts.roll(1)[:, None] + torch.arange(width))[at] % len(logits)",
    ),
)
