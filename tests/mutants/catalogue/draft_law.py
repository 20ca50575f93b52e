"""Wrong laws of the drafts in the served accept rule (paper, 3.1: min(1, p_t / p_d))."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FILE = "sglang_dspark/serving/schedule/accept.py"
TESTS = ("tests/serving_cpu/test_accept_law.py",)

DRAFT_LAW = (
    Mutant(
        name="draft law without its temperature",
        area="draft law",
        file=FILE,
        old="draft_block.corrected_logits[:, : width - 1] / heat",
        new="draft_block.corrected_logits[:, : width - 1]",
        tests=TESTS,
    ),
    Mutant(
        name="draft law at temperature 1 / T",
        area="draft law",
        file=FILE,
        old="draft_block.corrected_logits[:, : width - 1] / heat",
        new="draft_block.corrected_logits[:, : width - 1] * heat",
        tests=TESTS,
    ),
    Mutant(
        name="draft law of another row",
        area="draft law",
        file=FILE,
        old="draft_block.corrected_logits[:, : width - 1] / heat",
        new="draft_block.corrected_logits[:, : width - 1].flip(1) / heat",
        tests=TESTS,
    ),
)
