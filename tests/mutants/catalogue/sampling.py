"""The sampling rules of a step on a GPU: cuts, seeds, penalties (paper, 3.1)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ACCEPT = "sglang_dspark/step/accept.py"
PENALTIES = "sglang_dspark/step/penalties.py"
SEEDS = "sglang_dspark/step/seeds.py"
RULES = "sglang_dspark/step/rules.py"
LAW_TESTS = ("tests/step/test_step_accept.py",)
PENALTY_TESTS = ("tests/step/test_step_penalties.py",)
SEED_TESTS = ("tests/step/test_step_seeds.py",)
RULE_TESTS = ("tests/step/test_step_rules.py",)


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, area="sampling rules", file=file, old=old, new=new, tests=tests)


STEP_LAW = (
    _mutant(
        "a window's drafts without their temperature",
        ACCEPT,
        "draft_block.corrected_logits.float() / temperature",
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

MUTANTS = (
    *STEP_LAW,
    _mutant(
        "a window's penalties forget its drafts",
        "sglang_dspark/verify/penalties.py",
        "        if place > 0:\n",
        "        if place > len(window[0]):\n",
        PENALTY_TESTS,
    ),
    _mutant(
        "the repetition penalty before the others",
        "sglang_dspark/verify/penalties.py",
        "    return torch.where(once, scaled, row)",
        "    early = torch.where(row < 0, penalties.repetition, 1 / penalties.repetition)\n"
        "    gone = penalties.frequency * seen + penalties.presence * once\n"
        "    return torch.where(once, (row + gone) * early - gone, row)",
        PENALTY_TESTS,
    ),
    _mutant(
        "min_new_tokens counted from the window's anchor",
        "sglang_dspark/verify/penalties.py",
        "short = (outputs + place)[:, None] < penalties.minimum",
        "short = outputs[:, None] < penalties.minimum",
        PENALTY_TESTS,
    ),
    _mutant(
        "an anchor that the host does not list yet is not counted",
        PENALTIES,
        "missing.clamp(0, 1)",
        "missing.clamp(0, 0)",
        PENALTY_TESTS,
    ),
    _mutant(
        "tokens behind those that were emitted are counted",
        PENALTIES,
        "emitted.flatten().to(table.dtype)",
        "torch.ones_like(emitted).flatten().to(table.dtype)",
        PENALTY_TESTS,
    ),
    _mutant(
        "a pool row's counts outlive its generation",
        PENALTIES,
        "return list(zip(rows.tolist(), pool.req_generation[rows].tolist(), strict=True))",
        "return [(row, 0) for row in rows.tolist()]",
        PENALTY_TESTS,
    ),
    _mutant(
        "a slot's counts are those of who sat there before",
        PENALTIES,
        "        table.index_fill_(0, mine, 0)\n",
        "",
        PENALTY_TESTS,
    ),
    _mutant(
        "a seeded window starts a position too late",
        ACCEPT,
        "anchors[rows].long()",
        "anchors[rows].long() + 1",
        LAW_TESTS,
    ),
    _mutant(
        "a window's seeds are not read",
        ACCEPT,
        "    if seeds is not None:\n",
        "    if seeds is not None and not len(seeds.rows):\n",
        LAW_TESTS,
    ),
    _mutant(
        "top-p passes only what is below 1 without a cut",
        "sglang_dspark/verify/sampling.py",
        "    top_p = top_p.masked_fill(top_p >= 1, torch.inf)\n",
        "",
        LAW_TESTS,
    ),
    _mutant(
        "the first token's law is not cut",
        SEEDS,
        "choice = seeded_choice(distribution, seeds.values, positions[rows].long())",
        "choice = seeded_choice(probs[rows], seeds.values, positions[rows].long())",
        SEED_TESTS,
    ),
    _mutant(
        "seeded drafts race at the anchor's position",
        SEEDS,
        "self.anchors[rows] + place, columns",
        "self.anchors[rows] + 0 * place, columns",
        SEED_TESTS,
    ),
    _mutant(
        "seeded drafts without their temperature",
        SEEDS,
        "logits[rows].float() / temperatures[rows, None]",
        "logits[rows].float()",
        SEED_TESTS,
    ),
    _mutant(
        "min-p is left to upstream's law",
        RULES,
        "if seeds is not None or cuts.min_p or cuts.kinds > 1:",
        "if seeds is not None or cuts.kinds > 1:",
        RULE_TESTS,
    ),
    _mutant(
        "top-p without FlashInfer ends the server",
        RULES,
        "return not has_flashinfer()",
        "return False",
        RULE_TESTS,
    ),
    _mutant(
        "uncut steps are judged by block without being asked to",
        RULES,
        ' and loaded.origins["verify.rule"] != "default"',
        "",
        RULE_TESTS,
    ),
    _mutant(
        "penalised requests are accepted in the graph",
        "sglang_dspark/step/verify.py",
        "        and rules.penalties is None\n",
        "",
        RULE_TESTS,
    ),
)
