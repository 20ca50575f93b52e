"""A step is launched without reading a value of it back: on a GPU each read would wait for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import accept
from sglang_dspark.step import verify
from sglang_dspark.verify import sample_inverse_cdf
from tests.rehearsal.conftest import Rehearsed
from tests.rehearsal.reads import READS, watched
from tests.rehearsal.test_overlap_steps import GREEDY, PROMPTS

SOURCE = {  # of the others it is a call of the method
    "__array__": "numpy_of(value)",
    "__int__": "int(value)",
    "__float__": "float(value)",
    "__bool__": "bool(value)",
    "__index__": "range(value)",
    "__contains__": "1 in value",
}


def read_from(module: Any, expression: str) -> None:
    """Evaluate an expression of `value`, a tensor, in a function of that module."""
    names: dict[str, Any] = {"__name__": module.__name__, "numpy_of": np.asarray}
    exec(f"def planted(value):\n    {expression}", names)
    names["planted"](torch.tensor(1))


@pytest.mark.parametrize("name", READS)
def test_a_read_in_our_modules_is_seen(name: str) -> None:
    expression = SOURCE.get(name, f"value.{name}()")
    with watched() as seen:
        read_from(verify, expression)
        read_from(torch, expression)
    assert any(each.startswith(f"{name} in {verify.__name__}.planted") for each in seen)
    assert not any("torch" in each for each in seen)


def test_a_rule_reads_for_its_caller() -> None:
    rows, coins = torch.ones(2, 3), torch.zeros(2)
    with watched() as seen:
        ask(accept, rows, coins)
        assert seen == []
        ask(verify, rows, coins)
    assert any("sample_inverse_cdf" in each for each in seen)
    with watched() as seen:
        ask(verify, rows, coins, checked=False)
    assert seen == []


def ask(module: Any, rows: Tensor, coins: Tensor, **options: Any) -> None:
    """Draw by a rule of `verify/` in a function of that module."""
    names: dict[str, Any] = {"__name__": module.__name__, "draw": sample_inverse_cdf}
    exec("def planted(rows, coins, options):\n    draw(rows, coins, **options)", names)
    names["planted"](rows, coins, options)


def test_what_watched_is_put_back() -> None:
    before = {name: getattr(Tensor, name) for name in READS}
    with watched():
        assert all(getattr(Tensor, name) is not before[name] for name in READS)
    assert {name: getattr(Tensor, name) for name in READS} == before


@pytest.mark.server
@pytest.mark.xdist_group("rehearsal")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_reads_nothing_back(rehearsed: Rehearsed, temperature: float) -> None:
    before = len(rehearsed.launches())
    sampling = {"temperature": temperature, **GREEDY["sampling_params"]}
    rehearsed.server.generate_all(PROMPTS, 4, **{**GREEDY, "sampling_params": sampling})
    launches = rehearsed.launches()[before:]
    assert len(launches) > 20
    assert [each for each in launches if each["reads"]] == []
