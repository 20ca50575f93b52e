"""mRoPE positions of packed windows are those that upstream gives to whole ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dspark.patches.step.mrope_windows import windows_positions

WIDTH, PREFIXES = 4, (7, 30, 12)
upstreams = ForwardBatch.compute_spec_mrope_positions


def moved(images: tuple[int | None, ...]) -> list[Any]:
    """Return upstream's multimodal inputs: by how much images move a request's text."""
    return [
        None if each is None else SimpleNamespace(mrope_position_delta=torch.tensor([[each]]))
        for each in images
    ]


def positions_of(positions: torch.Tensor, layout: Any, images: tuple[int | None, ...]) -> Any:
    forward = SimpleNamespace(seq_lens=torch.tensor(PREFIXES))
    batch = SimpleNamespace(
        multimodal_inputs=moved(images),
        spec_info=SimpleNamespace(positions=positions, ragged_verify_layout=layout),
    )
    windows_positions(upstreams, forward, SimpleNamespace(device="cpu"), batch)
    return forward.mrope_positions


def test_positions_that_a_caller_gives_are_upstreams() -> None:
    """Of a draft's extension: they are not the windows'."""
    given: list[Any] = []
    batch = SimpleNamespace(spec_info=SimpleNamespace(ragged_verify_layout=object()))
    windows_positions(lambda *values: given.extend(values), 1, 2, batch, 3)
    assert given == [1, 2, batch, 3]


@pytest.mark.parametrize("images", [(None, None, None), (None, -5, None), (-3, None, -11)])
@pytest.mark.parametrize("lengths", [(4, 1, 3), (1, 1, 1), (4, 4, 4)])
def test_each_row_has_its_windows_positions(
    lengths: tuple[int, ...], images: tuple[int | None, ...]
) -> None:
    whole = torch.tensor(PREFIXES)[:, None] + torch.arange(WIDTH)
    expected = positions_of(whole.flatten(), None, images)  # upstream's own
    rows = torch.cat([r * WIDTH + torch.arange(n) for r, n in enumerate(lengths)])
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    padded = torch.cat((whole.flatten()[rows], torch.zeros(2, dtype=torch.int64)))  # by a graph
    found = positions_of(padded, SimpleNamespace(qo_indptr_device=starts), images)
    assert found.shape == (3, len(padded))
    assert torch.equal(found[:, : len(rows)], expected[:, rows])
