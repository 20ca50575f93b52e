"""Context injection against upstream's: same cache, only accepted rows written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.dspark import DSparkDraftMixin

from sglang_dspark.patches.cpu_commit import SEAMS, write_target_hidden_kv
from sglang_dspark.patches.cpu_lean_stack import forward_draft
from sglang_dspark.patches.registry import check_seam
from sglang_dspark.serving.cpu import context_kv, linear

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, FEATURES = 3, 48, 3, 2, 16, 96
SLOTS = 160

pytestmark = pytest.mark.skipif(linear.prepare() is None, reason="no fused multiply-add")


class Draft(DSparkDraftMixin, torch.nn.Module):
    """The parts of upstream's draft that injection reads, with random weights."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        torch.manual_seed(0)
        self._fused_kv_write_cache = None
        self.quantizable, self.num_context_features = False, FEATURES // HIDDEN
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        self.fc = torch.nn.Linear(FEATURES, HIDDEN, bias=False)
        self.hidden_norm = RMSNorm(HIDDEN, eps=1e-5)
        self.hidden_norm.weight.data = torch.rand(HIDDEN) + 0.5
        self.layers = [self._layer(i) for i in range(LAYERS)]

    @staticmethod
    def _layer(index: int) -> Any:
        kv_size, q_size = KV_HEADS * DIM, HEADS * DIM
        norm = RMSNorm(DIM, eps=1e-6)
        norm.weight.data = torch.rand(DIM) + 0.5
        projection = SimpleNamespace(
            weight=torch.randn(q_size + 2 * kv_size, HIDDEN) * 0.2, bias=None, quant_method=None
        )
        attention = SimpleNamespace(
            qkv_proj=projection, q_size=q_size, kv_size=kv_size, head_dim=DIM, v_scale=None,
            num_kv_heads=KV_HEADS, k_norm=norm,
            rotary_emb=get_rope(DIM, DIM, 128, 10000.0, dtype=torch.float32),
            attn=SimpleNamespace(layer_id=index, k_scale=None, v_scale=None),
        )  # fmt: skip
        return SimpleNamespace(self_attn=attention)

    project_target_hidden = DFlashDraftModel.project_target_hidden


@pytest.fixture
def draft(monkeypatch: pytest.MonkeyPatch) -> Draft:
    from sglang.srt.models import dspark

    monkeypatch.setattr(dspark, "can_dflash_slice_qkv_weight", lambda projection: (True, ""))
    return Draft()


def pool() -> MHATokenToKVPool:
    made = MHATokenToKVPool(
        size=SLOTS, page_size=1, dtype=torch.float32, head_num=KV_HEADS, head_dim=DIM,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    for buffer in (*made.k_buffer, *made.v_buffer):
        buffer.fill_(-7.0)
    return made


def arguments(commit: list[int] | None, width: int) -> dict[str, Any]:
    torch.manual_seed(3)
    rows = (len(commit) if commit is not None else 2) * width
    slots = torch.randperm(SLOTS)[:rows] + 1
    windows: dict[str, Any] = {}
    if commit is not None:
        windows["cache_loc_2d"] = slots.view(-1, width)
        windows["commit_lens"] = torch.tensor(commit, dtype=torch.int32)
    return {
        "target_hidden": torch.randn(rows, FEATURES),
        "positions": torch.randint(0, 128, (rows,)),
        "cache_loc": slots,
        **windows,
    }


@pytest.mark.parametrize("commit", [[1], [6], [1, 6, 3], [2, 1, 1, 5], None])
@pytest.mark.parametrize("projected", [False, True])
def test_the_cache_is_upstreams(draft: Draft, commit: list[int] | None, projected: bool) -> None:
    given = arguments(commit, 6)
    if projected:
        given["target_hidden"] = draft.project_target_hidden(given["target_hidden"])
    given["target_hidden_is_projected"] = projected
    ours, theirs = pool(), pool()
    with torch.inference_mode():
        DSparkDraftMixin.write_target_hidden_kv(draft, pool=theirs, **given)
        write_target_hidden_kv(_must_not_run, draft, pool=ours, **given)
    for mine, upstream in (
        (ours.k_buffer, theirs.k_buffer),
        (ours.v_buffer, theirs.v_buffer),
    ):
        torch.testing.assert_close(list(mine), list(upstream), rtol=1e-5, atol=1e-5)
    untouched = (theirs.k_buffer[0][:, 0, 0] == -7.0).sum()
    written = given["positions"].numel() if commit is None else sum(commit)
    assert int(untouched) == theirs.k_buffer[0].shape[0] - written


def _must_not_run(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("upstream's path ran")


class Waiting(Draft):
    """A draft whose forward settles what waits, as the served one's does."""

    forward = DFlashDraftModel.forward


def same(ours: MHATokenToKVPool, theirs: MHATokenToKVPool) -> bool:
    pairs = zip((*ours.k_buffer, *ours.v_buffer), (*theirs.k_buffer, *theirs.v_buffer), strict=True)
    return all(torch.allclose(mine, upstream, rtol=1e-5, atol=1e-5) for mine, upstream in pairs)


def steps(count: int) -> list[dict[str, Any]]:
    """Decode steps of six requests; slots come back to other requests again and again."""
    torch.manual_seed(5)
    return [
        {
            "target_hidden": torch.randn(6, FEATURES),
            "positions": torch.randint(0, 128, (6,)),
            "cache_loc": torch.randperm(10)[:6] + 1,
        }
        for _ in range(count)
    ]


@pytest.fixture
def waiting(draft: Draft) -> Waiting:
    draft.__class__ = Waiting
    return draft  # type: ignore[return-value]


@pytest.mark.parametrize("reader", ["draft", "prefill", "long prefill", "full"])
def test_rows_wait_until_the_cache_is_read_or_written(waiting: Waiting, reader: str) -> None:
    ours, theirs, count = pool(), pool(), context_kv.WAITING // 6
    given = steps(count + 1)
    prompt = arguments(None, 300 if reader == "long prefill" else SLOTS // 2)
    if reader == "long prefill":  # more rows than slots: equal ones, as torch writes in any order
        prompt["cache_loc"] = torch.ones(600).long()
        prompt["target_hidden"] = prompt["target_hidden"][:1].repeat(600, 1)
        prompt["positions"] = prompt["positions"][:1].repeat(600)
    with torch.inference_mode():
        for step in given[:count]:
            DSparkDraftMixin.write_target_hidden_kv(waiting, pool=theirs, **step)
            write_target_hidden_kv(_must_not_run, waiting, pool=ours, **step)
        assert (ours.k_buffer[0] == -7.0).all()
        if reader == "draft":
            context_kv.settle(waiting)
        elif reader == "full":
            write_target_hidden_kv(_must_not_run, waiting, pool=ours, **given[count])
        else:
            DSparkDraftMixin.write_target_hidden_kv(waiting, pool=theirs, **prompt)
            write_target_hidden_kv(
                DSparkDraftMixin.write_target_hidden_kv, waiting, pool=ours, **prompt
            )
    assert same(ours, theirs)


def test_accepted_rows_of_windows_wait_too(waiting: Waiting) -> None:
    ours, theirs, given = pool(), pool(), arguments([2, 1, 3], 6)
    with torch.inference_mode():
        DSparkDraftMixin.write_target_hidden_kv(waiting, pool=theirs, **given)
        write_target_hidden_kv(_must_not_run, waiting, pool=ours, **given)
        assert waiting.__dict__[context_kv.INJECTOR].waiting == 6
        context_kv.settle(waiting)
    assert same(ours, theirs)


def test_nothing_is_written_with_weights_that_were_exchanged(waiting: Waiting) -> None:
    ours = pool()
    with torch.inference_mode():
        write_target_hidden_kv(_must_not_run, waiting, pool=ours, **steps(1)[0])
        waiting.fc.weight.data = torch.zeros(HIDDEN, FEATURES)
        context_kv.settle(waiting)
    assert (ours.k_buffer[0] == -7.0).all()
    assert context_kv.INJECTOR not in waiting.__dict__


def test_a_cache_in_tiers_is_written_at_once(waiting: Waiting) -> None:
    ours, theirs, step = pool(), pool(), steps(1)[0]
    ours.register_layer_transfer_counter(object())
    with torch.inference_mode():
        DSparkDraftMixin.write_target_hidden_kv(waiting, pool=theirs, **step)
        write_target_hidden_kv(_must_not_run, waiting, pool=ours, **step)
    assert same(ours, theirs)


def test_drafting_settles_what_waits() -> None:
    settled = []

    class Model:
        layers = ()

    model = Model()
    model.__dict__[context_kv.INJECTOR] = SimpleNamespace(
        waiting=1, pool=None, holds=lambda *_: True, settle=lambda: settled.append(1)
    )
    mode = SimpleNamespace(is_decode=lambda: True, is_target_verify=lambda: True)
    batch = SimpleNamespace(forward_mode=mode)
    forward_draft(lambda *_: settled.append(2), model, torch.ones(1), torch.ones(1), batch)
    assert settled == [1, 2]


def test_long_prefills_and_other_dtypes_keep_upstreams_path() -> None:
    given = arguments([1, 2], 6)["target_hidden"]
    assert not context_kv.takes(given)  # gradients may be wanted
    with torch.no_grad():
        assert context_kv.takes(given)
        assert not context_kv.takes(given.bfloat16())
        assert not context_kv.takes(torch.zeros(300, FEATURES))
        assert not context_kv.takes(given[:0])


@pytest.mark.parametrize(
    "case", ["pool", "scale", "projection", "half precision", "adjacent rotary"]
)
def test_other_drafts_keep_upstreams_path(draft: Draft, case: str) -> None:
    assert context_kv.injector_of(draft, pool()) is not None
    kind: Any = type(draft)
    if case == "scale":
        draft.layers[1].self_attn.v_scale = 2.0
    elif case == "projection":
        draft.__class__ = type("Other", (kind,), {"project_target_hidden": lambda *_: None})
    elif case == "half precision":
        draft.fc.bfloat16()
    elif case == "adjacent rotary":
        rope = get_rope(DIM, DIM, 128, 10000.0, is_neox_style=False, dtype=torch.float32)
        draft.layers[0].self_attn.rotary_emb = rope
    assert context_kv.injector_of(draft, object() if case == "pool" else pool()) is None


@pytest.mark.parametrize("change", ["weight", "data", "norm", "pool"])
def test_exchanged_weights_and_caches_are_noticed(draft: Draft, change: str) -> None:
    ours = pool()
    found = context_kv.injector_of(draft, ours)
    assert found is not None
    assert found.holds(draft, ours)
    if change == "weight":
        draft.fc.weight = torch.nn.Parameter(torch.zeros(HIDDEN, FEATURES), requires_grad=False)
    elif change == "data":
        draft.fc.weight.data = torch.zeros(HIDDEN, FEATURES)
    elif change == "norm":
        draft.hidden_norm.weight = torch.nn.Parameter(torch.ones(HIDDEN), requires_grad=False)
    else:
        ours.k_buffer = [buffer.clone() for buffer in ours.k_buffer]
    assert not found.holds(draft, ours)


def test_the_targets_are_what_we_expect() -> None:
    assert all(check_seam(seam).ok for seam in SEAMS)
