"""Commits of a pass's rows leave what upstream's whole windows leave of emitted tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector

from sglang_dspark.backends.cuda.commit import ContextRows, StepCommit
from sglang_dspark.backends.cuda.draft_context import context_of
from tests.backends.cpu.test_context_kv import FEATURES, SLOTS, Draft, draft, pool
from tests.kernels.processes import output_of

# One process: the module computes its results once, slowly.
pytestmark = pytest.mark.xdist_group("cuda-commit")

__all__ = ["draft"]  # the fixture

WIDTH = 6


def injector_of(model: Draft, buffers: Any) -> TargetHiddenKvInjector:
    """Upstream's own, over a draft model and its cache."""
    return TargetHiddenKvInjector(
        draft_model=model,
        draft_model_runner=SimpleNamespace(token_to_kv_pool=buffers, kv_index_translator=None),
        model_runner=SimpleNamespace(device="cpu"),
        device="cpu",
        verify_num_draft_tokens=WIDTH,
        block_pos_offsets=torch.arange(WIDTH),
    )


@pytest.mark.parametrize("emitted", [[1], [6], [1, 1, 1, 1], [2, 6, 1, 4], [1, 3, 6, 6]])
@pytest.mark.parametrize("spare", [0, 1, 5])
def test_the_cache_is_upstreams(draft: Draft, emitted: list[int], spare: int) -> None:
    """spare: rows that only fill a graph's size. Each request verified a row more than it emitted,
    where its window has one."""
    generator = torch.Generator().manual_seed(5)
    requests, counts = len(emitted), torch.tensor(emitted, dtype=torch.int32)
    slots = torch.randperm(SLOTS, generator=generator)[: requests * WIDTH] + 1
    batch = SimpleNamespace(seq_lens=torch.randint(0, 100, (requests,), generator=generator))
    plan = SimpleNamespace(write_ids=lambda translator, cols: slots)
    hidden = torch.randn(requests * WIDTH, FEATURES, generator=generator)
    ours, theirs = pool(), pool()
    injector_of(draft, theirs).inject_ragged(
        batch=batch,
        layout=None,
        hidden_strided=hidden,
        commit_lens=counts,
        bs=requests,
        kv_loc_plan=plan,
    )
    places = torch.arange(WIDTH)
    verified = (places <= counts[:, None]).flatten()
    positions = (batch.seq_lens[:, None] + places).flatten()[verified]
    pad = torch.nn.functional.pad
    rows = ContextRows(
        pad(hidden[verified], (0, 0, 0, spare), value=3.0),
        pad(positions, (0, spare)),
        pad(slots[verified], (0, spare)),
    )
    StepCommit(injector_of(draft, ours)).write(rows)
    kept = slots[(places < counts[:, None]).flatten()]
    outside = torch.ones(SLOTS + 1, dtype=torch.bool)
    outside[slots[verified]] = outside[0] = False
    for mine, other in zip(
        (*ours.k_buffer, *ours.v_buffer), (*theirs.k_buffer, *theirs.v_buffer), strict=True
    ):
        torch.testing.assert_close(mine[kept], other[kept], rtol=1e-5, atol=1e-6)
        assert not bool((mine[kept] == -7).any())
        assert bool((mine[: len(outside)][outside] == -7).all()), "slots of no row are untouched"


def test_a_latent_cache_is_written_by_upstream(draft: Draft) -> None:
    assert StepCommit(injector_of(draft, _Latent())).is_latent
    assert not StepCommit(injector_of(draft, pool())).is_latent


def test_what_was_resolved_holds_until_weights_or_cache_are_exchanged(draft: Draft) -> None:
    """Otherwise each step would look up the caches anew."""
    cache = pool()
    context = context_of(draft, cache)
    assert context.holds(draft, cache)
    assert not context.holds(draft, pool())
    projection = draft.layers[0].self_attn.qkv_proj
    projection.weight = projection.weight.clone()
    assert not context.holds(draft, cache)


class _Latent:
    def set_swa_key_buffer_radix_fused_norm_rope(self) -> Tensor:
        raise AssertionError("only looked for")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        output_of("tests.backends.cuda.interpreted_commit").splitlines()[-1]
    )
    return found


def test_one_launch_writes_what_upstream_writes(interpreted: dict[str, Any]) -> None:
    exact = {name: off for name, off in interpreted["off"].items() if "bfloat16" not in name}
    assert len(exact) == 11
    assert max(exact.values()) < 1e-5, exact
    # SGLang's launch rounds keys before it rotates them.
    assert interpreted["SGLang's launch"]
    assert 0 < interpreted["off"]["bfloat16"] < 2**-6
    assert set(interpreted["launches"].values()) == {1}, interpreted["launches"]


def test_what_the_operator_does_not_know_is_upstreams_and_said_once(
    interpreted: dict[str, Any],
) -> None:
    assert len(interpreted["refused"]) == 10
    for name, found in interpreted["refused"].items():
        assert found["launches"] == 0, name
        assert len(found["told"]) == 1, name
        assert name in found["told"][0]
        assert found["off"] < 1e-5, name


def test_weights_and_caches_that_were_exchanged_are_looked_up_anew(
    interpreted: dict[str, Any],
) -> None:
    assert interpreted["exchanged"] == {"cache": True, "weights": True, "longer positions": True}


def test_weights_updated_in_place_are_committed_with(interpreted: dict[str, Any]) -> None:
    """Norms and projections of a drafter, by the step's commit and by SGLang's own calls. Graphs
    read the same tensors before and after."""
    assert set(interpreted["updated"]) == {"float32", "a bias", "bfloat16"}
    for name, (ours, theirs, kept) in interpreted["updated"].items():
        assert ours == 0.0, name
        assert theirs < 1e-5, name
        assert kept, name
