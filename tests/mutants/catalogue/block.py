"""The block rule: its chances, sums, walk and corrections, in torch and as the compiled loop."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BLOCK = "sglang_dspark/verify/block.py"
COMPILED = "sglang_dspark/backends/cpu/accept.py"
SERVED = "sglang_dspark/backends/cpu/accept.py"
LAW = ("tests/verify/test_block_law.py::test_every_window_that_does_not_look_ahead_keeps_the_law",)
UNREAD = ("tests/verify/test_block_law.py::test_unchecked_is_the_same_and_reads_no_unverified_row",)
WALK = ("tests/backends/cpu/test_accept_block_walk.py::test_compiled_walk_is_the_references",)
EQUAL = ("tests/backends/cpu/test_accept_block_walk.py::test_equal_laws_keep_every_draft",)
IMPOSSIBLE = ("tests/verify/test_block_law.py::test_a_draft_without_target_mass_is_never_kept",)
ROUNDED = (
    "tests/verify/test_block_law.py"
    "::test_laws_that_agree_to_rounding_keep_what_the_last_draft_does_not",
)
CONFIGURED = ("tests/backends/cpu/test_accept_distribution.py::test_the_configured_rule_is_served",)


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, area="block rule", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "block: a draft's surplus is carried beyond 1",
        BLOCK,
        "torch.where(mass < proposed[:, i], mass / proposed[:, i], enough)",
        "mass / proposed[:, i]",
        LAW,
    ),
    _mutant(
        "block: each draft judged by itself",
        BLOCK,
        "mass = chances[-1] * wanted[:, i]",
        "mass = wanted[:, i]",
        LAW,
    ),
    _mutant(
        "block: a draft without target mass stands",
        BLOCK,
        "enough = (mass > 0).double()",
        "enough = torch.ones_like(mass)",
        IMPOSSIBLE,
    ),
    _mutant(
        "block: S of the row in front",
        BLOCK,
        "target_probs[rows, i].double(), chance, draft_probs[rows, i]",
        "target_probs[rows, i - 1].double(), chance, draft_probs[rows, i - 1]",
        LAW,
    ),
    _mutant(
        "block: the last draft turned over as those before it",
        BLOCK,
        "whole = uniforms.gather(1, last) < chances.gather(1, limits[:, None])",
        "whole = uniforms.gather(1, last) < chances.gather(1, last)",
        LAW,
    ),
    _mutant(
        "block: h without what was refused",
        BLOCK,
        "refused = left + (1.0 - chance)",
        "refused = torch.ones_like(left)",
        LAW,
    ),
    _mutant(
        "block: one uniform for the whole window",
        BLOCK,
        "uniforms[rows, i - 1] * refused < left",
        "uniforms[rows, 0] * refused < left",
        LAW,
    ),
    _mutant(
        "block: 0 / 0 is taken for a refusal",
        BLOCK,
        " | (refused == 0)\n        accepted[rows]",
        "\n        accepted[rows]",
        ROUNDED,
    ),
    _mutant(
        "block: rows behind a short window decide",
        BLOCK,
        "open_ = (accepted == 0) & (limits > i)",
        "open_ = accepted == 0",
        UNREAD,
    ),
    _mutant(
        "block: the residual without p_tau",
        BLOCK,
        "residual = _residual(weights, chance, proposal)",
        "residual = _residual(weights, torch.ones_like(chance), proposal)",
        LAW,
    ),
    _mutant(
        "block: a kept window's end corrected",
        BLOCK,
        "(accepted < limits) & (residual.sum(1) > 0)",
        "(accepted < gamma) & (residual.sum(1) > 0)",
        UNREAD,
    ),
    _mutant(
        "compiled block walk: S of the row in front",
        COMPILED,
        "_residual_mass(targets[r, i], p, proposals[r, i])",
        "_residual_mass(targets[r, i - 1], p, proposals[r, i - 1])",
        WALK,
    ),
    _mutant(
        "compiled block walk: the chance of the whole window, not of what was kept",
        COMPILED,
        "chances[r] = standing[kept]",
        "chances[r] = standing[length]",
        WALK,
    ),
    _mutant(
        "compiled block walk: from the front",
        COMPILED,
        "for i in range(length, 0, -1):",
        "for i in range(1, length + 1):",
        WALK,
    ),
    _mutant(
        "compiled block walk: 0 / 0 keeps nothing and p is never 1",
        COMPILED,
        "enough = 1.0 if mass > 0 else 0.0",
        "enough = 0.0",
        EQUAL,
    ),
    _mutant(
        "the configured accept rule is not asked for",
        SERVED,
        'current_config().verify.rule == "token"',
        "False",
        CONFIGURED,
    ),
)
