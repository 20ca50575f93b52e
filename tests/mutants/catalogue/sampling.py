"""The sampling rules of a step on a GPU: cuts, seeds, penalties (paper, 3.1)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ACCEPT = "sglang_dspark/serving/step/accept.py"
PENALTIES = "sglang_dspark/serving/step/penalties.py"
SEEDS = "sglang_dspark/serving/step/seeds.py"
RULES = "sglang_dspark/serving/step/rules.py"
LAW_TESTS = ("tests/serving/test_step_accept.py",)
PENALTY_TESTS = ("tests/serving/test_step_penalties.py",)
SEED_TESTS = ("tests/serving/test_step_seeds.py",)
RULE_TESTS = ("tests/serving/test_step_rules.py",)


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, area="sampling rules", file=file, old=old, new=new, tests=tests)


STEP_LAW = (
    _mutant(
        "a window's drafts without their temperature",
        ACCEPT,
        "draft_block.corrected_logits.float() / heat",
        "draft_block.corrected_logits.float()",
        LAW_TESTS,
    ),
    _mutant(
        "corrections from the target's law, residual skipped",
        ACCEPT,
        "draft_probs=_draft_probs(draft_block)",
        "draft_probs=(lambda p: torch.zeros_like(p).scatter(2, drafts[..., None], "
        "p.gather(2, drafts[..., None])))(_draft_probs(draft_block))",
        LAW_TESTS,
    ),
    _mutant(
        "a window's law by the settings of the next request",
        ACCEPT,
        "each.reshape(-1).repeat_interleave(width)",
        "each.reshape(-1).roll(1).repeat_interleave(width)",
        LAW_TESTS,
    ),
    _mutant(
        "a window of one draft more than was verified",
        ACCEPT,
        "lens.long() - 1",
        "lens.long().clamp(max=width - 1)",
        LAW_TESTS,
    ),
    _mutant(
        "coins that are shared by all requests of a step",
        ACCEPT,
        "    return torch.rand(*shape, dtype=torch.float64, device=like.device)",
        "    return torch.rand(1, *shape[1:], dtype=torch.float64).expand(*shape)",
        LAW_TESTS,
    ),
)
