"""Tiny targets of other architectures, served: DSPARK's greedy answers are plain decoding's.

With a compiled fast path, none is off. Without one, SGLang's modules run, and hooks read features.

The tiny Llama of the other tests has a vocabulary that SGLang pads, so its passes go through
SGLang's runner; the demo target covers Llama.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import tiny_models
from tests.integration.conftest import all_verified
from tests.integration.prompts import PROMPTS
from tests.integration.serving import ServerPool
from tests.integration.test_greedy_equal import check_equal

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("architectures")]


@pytest.mark.parametrize("name", [name for name in tiny_models.ARCHITECTURES if name != "llama"])
def test_greedy_tokens_are_equal_over_all_fast_paths(
    name: str, pool: ServerPool, tmp_path: Path
) -> None:
    pair = tiny_models.build_architecture(tmp_path, name)
    plain = pool.start(f"{name}-plain", pair.target, "--max-running-requests", "16")
    drafting = all_verified(pool, f"{name}-dspark", pair.target, pair.drafter)
    assert check_equal(plain, drafting, 4, PROMPTS[::4], 32) > 0
    assert "sglang-dspark: off:" not in drafting.log
    _, model_class = tiny_models.ARCHITECTURES[name]
    assert f"weights of {model_class.__name__} are kept as bfloat16" in drafting.log


@pytest.mark.parametrize("name", ["gemma3", pytest.param("granite", marks=pytest.mark.slow)])
def test_greedy_tokens_are_equal_with_features_by_hooks(
    name: str, pool: ServerPool, tmp_path: Path
) -> None:
    pair = tiny_models.build_architecture(tmp_path, name)
    flags = () if name == "granite" else ("--disable-hybrid-swa-memory",)
    plain = pool.start(f"{name}-plain", pair.target, "--max-running-requests", "16", *flags)
    drafting = all_verified(pool, f"{name}-dspark", pair.target, pair.drafter, *flags)
    assert check_equal(plain, drafting, 4, PROMPTS[::4], 32) > 0
