"""The block rule as a Triton operator: its chances, sums, walk and corrections; where it serves."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KERNEL = "kernels/accept_block.py"
STEP = "sglang_dspark/backends/cuda/accept.py"
BY_HAND = ("tests/kernels/test_accept_block.py::test_outcomes_known_by_hand_and_bytes",)
PARITY = (
    "tests/kernels/test_accept_block.py"
    "::test_interpreted_kernels_emit_the_tokens_of_the_pure_rules",
)
IN_A_STEP = ("tests/backends/cuda/test_accept.py::test_the_operator_emits_the_tokens_of_torch",)
CONFIGURED = ("tests/step/test_step_accept.py::test_the_configured_rule_accepts",)


def _mutant(name: str, old: str, new: str, tests: tuple[str, ...] = BY_HAND) -> Mutant:
    return Mutant(name=name, area="block operator", file=KERNEL, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "block operator: a draft's surplus is carried beyond 1",
        "less = verified & (mass < proposed)",
        "less = verified & (proposed > 0)",
    ),
    _mutant(
        "block operator: a draft that neither law has stands",
        "tl.where(mass > 0, 1.0, 0.0)",
        "tl.where(mass >= 0, 1.0, 0.0)",
    ),
    _mutant(
        "block operator: S of the row in front",
        "dist = dist_of(r, i, summed",
        "dist = dist_of(r, i - 1, summed",
    ),
    _mutant(
        "block operator: S without p",
        "draft_logits, rest, chance, summed, vocab, cut, rows, block)",
        "draft_logits, rest, None, summed, vocab, cut, rows, block)",
    ),
    _mutant(
        "block operator: the last draft turned over as those before it",
        "left = tl.where(last, chance, left)",
        "left = tl.where(last, left, left)",
    ),
    _mutant(
        "block operator: h without what was refused",
        "left + (1.0 - chance))",
        "1.0)",
    ),
    _mutant(
        "block operator: one uniform for the whole window",
        "tl.load(uniforms + r * gamma + place, mask=verified",
        "tl.load(uniforms + r * gamma, mask=verified",
    ),
    _mutant(
        "block operator: 0 / 0 is taken for a refusal",
        " | (refused == 0)",
        "",
    ),
    _mutant(
        "block operator: the first draft that may end the window ends it",
        "taken = tl.where(kept, place + 1, taken)",
        "taken = tl.where(kept & (taken == 0), place + 1, taken)",
    ),
    _mutant(
        "block operator: the residual without p_tau",
        "target, draft, share, bonus_uniforms",
        "target, draft, None, bonus_uniforms",
    ),
    _mutant(
        "block operator: sums only where they are not needed",
        "summed = drawn & (i < length) & ~whole",
        "summed = drawn & (i < length) & whole",
    ),
    _mutant(
        "block operator: seeded and greedy windows judged as a whole",
        "taken = tl.where(drawn, taken, leading(",
        "taken = tl.where(length >= 0, taken, leading(",
        PARITY,
    ),
    _mutant(
        "block operator: its counters stay where they were",
        "tl.store(arrivals + group, 0)",
        "tl.store(arrivals + group, 1)",
    ),
    Mutant(
        name="block operator: a step asks for the one rule whatever is configured",
        area="block operator",
        file=STEP,
        old='accept_triton if self._rule == "token" else accept_block_triton',
        new="accept_block_triton",
        tests=IN_A_STEP,
    ),
    Mutant(
        name="a step in torch has the one rule whatever is configured",
        area="block operator",
        file="sglang_dspark/step/accept.py",
        old='accept_sampled if current_config().verify.rule == "token" else accept_block',
        new="accept_block",
        tests=CONFIGURED,
    ),
)
