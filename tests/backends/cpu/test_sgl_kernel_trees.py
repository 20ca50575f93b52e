"""EAGLE's draft trees: layout and greedy acceptance against walks over explicit trees."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import sgl_kernel_ops as ops


@dataclass(frozen=True)
class Built:
    """What the builder wrote for R trees of n nodes."""

    mask: Tensor
    positions: Tensor
    index: Tensor
    child: Tensor
    sibling: Tensor


def build(
    parents: Tensor, selected: Tensor, lens: list[int], topk: int, depth: int, n: int, mode: int
) -> Built:
    rows = len(lens)
    size = rows * n * n if mode == ops.QLEN_ONLY else sum(n * (length + n) for length in lens)
    built = Built(
        mask=torch.ones(size, dtype=torch.bool),
        positions=torch.empty(rows * n, dtype=torch.int64),
        index=torch.full((rows, n), -9),
        child=torch.full((rows, n), -9),
        sibling=torch.full((rows, n), -9),
    )
    ops.build_tree_kernel_efficient_cpu(
        parents, selected, torch.tensor(lens), built.mask, built.positions, built.index,
        built.child, built.sibling, topk, depth, n, mode,
    )  # fmt: skip
    return built


def random_tree(rng: random.Random, topk: int, steps: int, n: int) -> tuple[list[int], list[int]]:
    """Candidates kept and the parent list, in the numbering of EAGLE's drafting steps."""
    parents = [-1, *range(topk)]
    for step in range(1, steps - 1):
        first = topk + topk * topk * (step - 1)
        parents += rng.sample(range(first, first + topk * topk), topk)
    selected: set[int] = set()
    total = topk + topk * topk * (steps - 1)
    while len(selected) < n - 1:
        candidate = rng.randrange(total)
        if candidate // topk == 0 or parents[candidate // topk] in selected:
            selected.add(candidate)
    return sorted(selected), parents


def ancestors(selected: list[int], parents: list[int], topk: int) -> list[list[int]]:
    """For each node (0 the root) its path from the root, itself included."""
    paths = [[0]]
    for candidate in selected:
        group = candidate // topk
        above = [0] if group == 0 else paths[selected.index(parents[group]) + 1]
        paths.append([*above, len(paths)])
    return paths


@pytest.mark.parametrize("mode", [ops.FULL_MASK, ops.QLEN_ONLY])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_chain_layout(n: int, mode: int) -> None:
    lens = [4, 1]
    none = torch.empty(2, 0, dtype=torch.int64)
    built = build(none, torch.arange(n - 1).expand(2, -1), lens, 1, n, n, mode)
    assert built.positions.tolist() == [x + i for x in lens for i in range(n)]
    assert built.index.tolist() == [list(range(n)), list(range(n, 2 * n))]
    assert built.child.tolist() == [[*range(1, n), -1]] * 2
    assert built.sibling.tolist() == [[-1] * n] * 2
    offset = 0
    for length in lens:
        width = n if mode == ops.QLEN_ONLY else length + n
        block = built.mask[offset : offset + n * width].view(n, width)
        assert torch.equal(block[:, width - n :], torch.ones(n, n, dtype=torch.bool).tril())
        assert bool(block[:, : width - n].all())
        offset += n * width


@pytest.mark.parametrize("seed", range(6))
def test_wide_tree_layout(seed: int) -> None:
    rng = random.Random(seed)
    topk, steps, n = 3, 4, 9
    trees = [random_tree(rng, topk, steps, n) for _ in range(3)]
    lens = [5, 0, 17]
    built = build(
        torch.tensor([p for _, p in trees]), torch.tensor([s for s, _ in trees]),
        lens, topk, steps, n, ops.QLEN_ONLY,
    )  # fmt: skip
    for r, (selected, parents) in enumerate(trees):
        paths = ancestors(selected, parents, topk)
        mask = built.mask.view(3, n, n)[r]
        for node, path in enumerate(paths):
            assert mask[node].nonzero()[:, 0].tolist() == sorted(path)
            assert int(built.positions.view(3, n)[r, node]) == lens[r] + len(path) - 1
            children = [c for c, p in enumerate(paths) if len(p) > 1 and p[-2] == node]
            linked, follower = [], int(built.child[r, node])
            while follower != -1:
                linked.append(follower)
                follower = int(built.sibling[r, follower])
            assert linked == children


def test_bit_packed_masks_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="mask mode 2"):
        build(torch.empty(1, 0), torch.zeros(1, 1, dtype=torch.int64), [3], 1, 2, 2, 2)


@pytest.mark.parametrize("seed", range(8))
def test_greedy_acceptance_follows_the_targets_argmax(seed: int) -> None:
    rng = random.Random(seed)
    topk, steps, n, rows = 2, 4, 7, 4
    trees = [random_tree(rng, topk, steps, n) for _ in range(rows)]
    built = build(
        torch.tensor([p for _, p in trees]), torch.tensor([s for s, _ in trees]),
        [3] * rows, topk, steps, n, ops.QLEN_ONLY,
    )  # fmt: skip
    # Two tokens only, so that paths of every length are accepted; siblings differ, as drafts do.
    tokens = torch.tensor([[rng.randrange(2) for _ in range(n)] for _ in range(rows)])
    target = torch.tensor([[rng.randrange(2) for _ in range(n)] for _ in range(rows)])
    predicts = torch.full((rows * n,), -1, dtype=torch.int32)
    index = torch.full((rows, steps), -1, dtype=torch.int32)
    count = torch.empty(rows, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(
        predicts, index, count, tokens, built.index, built.child, built.sibling, target
    )
    for r, (selected, parents) in enumerate(trees):
        paths = ancestors(selected, parents, topk)
        node, path = 0, [0]
        while len(path) < steps:
            matching = [
                c
                for c, p in enumerate(paths)
                if len(p) > 1 and p[-2] == node and int(tokens[r, c]) == int(target[r, node])
            ]
            if not matching:
                break
            node = matching[0]
            path.append(node)
        assert int(count[r]) == len(path) - 1
        assert index[r, : len(path)].tolist() == [r * n + p for p in path]
        assert index[r, len(path) :].tolist() == [-1] * (steps - len(path))
        assert [int(predicts[r * n + p]) for p in path] == [int(target[r, p]) for p in path]
