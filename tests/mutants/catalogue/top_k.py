"""The top-k route of a GPU's sampled steps: lists of kept tokens, their weights and ties."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROUTE = "sglang_dspark/backends/cuda/accept_top_k.py"
LISTS = "sglang_dspark/verify/candidates.py"
TESTS = ("tests/backends/cuda/test_accept_top_k.py",)


def _mutant(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, area="top-k route", file=file, old=old, new=new, tests=TESTS)


DISTRIBUTION = (
    _mutant(
        "lists: corrections from the target, residual skipped",
        ROUTE,
        "        return (probs.gather(1, columns),)\n",
        "        listed = probs.gather(1, columns)\n"
        "        own = columns == columns[:, -1:]\n"
        "        return (listed * own,)\n",
    ),
    _mutant(
        "lists: weights before the cuts are not made to sum to 1",
        LISTS,
        "    kept /= kept.sum(dim=1, keepdim=True)\n",
        "",
    ),
    _mutant(
        "lists: drafts without their temperature",
        ROUTE,
        "logits[request, place].float() / temperatures[request, None]",
        "logits[request, place].float()",
    ),
    _mutant(
        "lists: tokens not in the order of their weights",
        LISTS,
        "return Candidates(tokens, kept.gather(1, order))",
        "return Candidates(tokens, kept)",
    ),
)

MUTANTS = (
    *DISTRIBUTION,
    _mutant(
        "lists: weights divided by those of all candidates, cut ones included",
        LISTS,
        "    kept /= kept.sum(dim=1, keepdim=True)\n",
        "    kept /= ordered.sum(dim=1, keepdim=True)\n",
    ),
    _mutant(
        "lists: windows of one draft less than was verified",
        ROUTE,
        "    limits = lens.long() - 1\n    windows",
        "    limits = (lens.long() - 2).clamp_min(0)\n    windows",
    ),
    _mutant(
        "lists: ties as topk happens to choose them",
        LISTS,
        "tokens = torch.where(rank < above, tokens, equals)",
        "tokens = torch.where(rank <= above, tokens, equals)",
    ),
    _mutant(
        "lists: a draft that the cuts drop is taken for the first token listed",
        ROUTE,
        "outside = torch.full_like(drafts, same.shape[2])",
        "outside = torch.zeros_like(drafts)",
    ),
    _mutant(
        "lists: seeds race over columns, not tokens",
        ROUTE,
        "return seeded_choice(probs, values, positions, tokens.flatten(0, 1))",
        "return seeded_choice(probs, values, positions)",
    ),
    _mutant(
        "lists: settings of a row are those of its packed number",
        ROUTE,
        "(each[at.request[part]] for each in cuts)",
        "(each[at.request[part] * 0] for each in cuts)",
    ),
    _mutant(
        "lists: the configured rule is ignored",
        ROUTE,
        'if rule == "token":',
        'if rule != "":',
    ),
)
