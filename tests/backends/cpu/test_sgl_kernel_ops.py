"""Stand-ins for `sgl_kernel`'s cache and token operators, against loops that say what they do."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.backends.cpu import sgl_kernel_ops as ops


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def test_cache_rows_stay_and_a_tree_that_moves_them_is_refused() -> None:
    pointer, stride, slots = torch.tensor([0]), torch.tensor([8]), torch.tensor([4, 5])
    ops.copy_all_layer_kv_cache_cpu(pointer, stride, slots, slots.clone())
    for operator in (
        lambda: ops.copy_all_layer_kv_cache_cpu(pointer, stride, slots, slots.flip(0)),
        ops.fill_accept_out_cache_loc_cpu,
        ops.verify_tree_greedy_cpu,
    ):
        with pytest.raises(NotImplementedError, match="no draft trees"):
            operator()


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_slots_are_written_to_and_read_from_the_request_table(index_type: torch.dtype) -> None:
    rows = torch.tensor([3, 0, 5], dtype=index_type)
    start = torch.tensor([2, 7, 0], dtype=index_type)
    end = torch.tensor([5, 7, 4], dtype=index_type)  # the second request gets nothing
    slots = torch.tensor([10, 11, 12, 40, 41, 42, 43, 99])
    table = torch.full((6, 8), -1, dtype=torch.int32)
    expected = table.clone()
    taken = 0
    for r, s, e in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        expected[r, s:e] = slots[taken : taken + e - s].int()
        taken += e - s
    ops.assign_req_to_token_pool_cpu(rows, table, start, end, slots, table.shape[1])
    assert torch.equal(table, expected)

    out = torch.full((9,), -5, dtype=torch.int64)
    ops.assign_extend_cache_locs_cpu(rows, table, start, end, out, table.shape[1])
    assert out.tolist() == [10, 11, 12, 40, 41, 42, 43, -5, -5]


def test_draft_slots_follow_each_request() -> None:
    table = torch.arange(40).view(4, 10).int()
    out = torch.empty(2 * 6, dtype=torch.int64)
    ops.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([3, 1]), table, torch.tensor([1, 4]), out, 10, 2, 3
    )
    assert out.tolist() == [31, 32, 33, 34, 35, 36, 14, 15, 16, 17, 18, 19]


def test_bonus_token_is_the_last_accepted_one() -> None:
    tokens = torch.arange(15).view(3, 5)
    out = torch.empty(3, dtype=torch.int64)
    ops.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 5, 3], dtype=torch.int32), out, 5)
    assert out.tolist() == [0, 9, 12]


@pytest.mark.parametrize("selected", [False, True])
def test_tokens_rotate_left_within_each_request(selected: bool) -> None:
    start, lens = torch.tensor([0, 3, 3, 8]), torch.tensor([3, 0, 5, 1])
    ids, new = torch.arange(100, 109), torch.tensor([[1], [2], [3], [4]])
    positions = torch.tensor([1, 0, 5, 8]) if selected else None
    expected = ids.clone()
    for r in range(4):
        s, n = int(start[r]), int(lens[r])
        if n == 0:
            continue
        expected[s : s + n - 1] = ids[s + 1 : s + n]
        expected[int(positions[r]) if positions is not None else s + n - 1] = new[r, 0]
    ops.rotate_input_ids_cpu(ids, start, lens, new, positions)
    assert ids.tolist() == expected.tolist()


def chains(lens: list[int], n: int, mode: int) -> tuple[torch.Tensor, ...]:
    """Mask, positions, index, next and sibling of chains of n tokens."""
    rows = len(lens)
    mask = torch.zeros(rows * n * n, dtype=torch.bool)
    found = mask, torch.empty(rows * n, dtype=torch.int64), *torch.full((3, rows, n), -9).unbind()
    none = torch.empty(rows, 0, dtype=torch.int64)
    drafts = torch.arange(n - 1).expand(rows, -1)
    ops.build_tree_kernel_efficient_cpu(none, drafts, torch.tensor(lens), *found, 1, n, n, mode)
    return found


@pytest.mark.parametrize("n", [1, 2, 6])
def test_chain_layout(n: int) -> None:
    lens = [4, 1]
    mask, positions, index, following, sibling = chains(lens, n, ops.QLEN_ONLY)
    assert positions.tolist() == [x + i for x in lens for i in range(n)]
    assert index.tolist() == [list(range(n)), list(range(n, 2 * n))]
    assert following.tolist() == [[*range(1, n), -1]] * 2
    assert sibling.tolist() == [[-1] * n] * 2
    assert torch.equal(mask.view(2, n, n), torch.ones(2, n, n, dtype=torch.bool).tril())


@pytest.mark.parametrize("mode", [0, 2])
def test_other_masks_are_refused(mode: int) -> None:
    with pytest.raises(NotImplementedError, match=f"mask mode {mode}"):
        chains([3], 2, mode)
