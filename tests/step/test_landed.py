"""A step in flight has landed once both of its results are on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_dspark.step.engine_protocol import VerifyAll


@pytest.mark.parametrize(
    ("lengths", "accepted", "landed"),
    [(None, None, False), ([2], None, False), (None, [1], False), ([2], [1], True)],
)
def test_a_step_has_landed_with_both_of_its_results(
    lengths: list[int] | None, accepted: list[int] | None, landed: bool
) -> None:
    one = torch.ones(1, dtype=torch.int64)
    step = VerifyAll(3).begin(0 * one, one, one)
    step.lengths = None if lengths is None else np.array(lengths)
    step.accepted = None if accepted is None else np.array(accepted)
    assert step.has_landed == landed
