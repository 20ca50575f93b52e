"""Context injection against upstream's: the same cache, whenever it is written."""

from __future__ import annotations

import json
from pathlib import Path
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

from sglang_dspark.backends.cpu import context_kv, linear
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.context_kv import write_target_hidden_kv
from sglang_dspark.backends.cpu.fast_paths import UnsupportedError
from sglang_dspark.backends.cpu.layers.layer_stack import forward_draft
from sglang_dspark.backends.cpu.waiting_rows import WaitingRows
from sglang_dspark.backends.cpu.weight_formats import FORMATS, dense, pack
from sglang_dspark.serving import config, weight_updates
from tests.backends.cpu.operator_levels import LEVELS, force_level

upstreams = DSparkDraftMixin.write_target_hidden_kv
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, FEATURES = 3, 64, 4, 2, 16, 128
SLOTS = 160

pytestmark = pytest.mark.skipif(linear.prepare() is None, reason="no fused multiply-add")


class Draft(DSparkDraftMixin, torch.nn.Module):
    """The parts of upstream's draft that injection reads, with random weights."""

    confidence_head = None

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        torch.manual_seed(0)
        self._fused_kv_write_cache = None
        self.quantizable, self.num_context_features = False, FEATURES // HIDDEN
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        self.fc = torch.nn.Linear(FEATURES, HIDDEN, bias=False)
        self.hidden_norm = RMSNorm(HIDDEN, eps=0.1)  # unlike that of the keys
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
    return Draft().requires_grad_(False)  # as served weights are


def pool() -> MHATokenToKVPool:
    made = MHATokenToKVPool(
        size=SLOTS, page_size=1, dtype=torch.float32, head_num=KV_HEADS, head_dim=DIM,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    for buffer in (*made.k_buffer, *made.v_buffer):
        buffer.fill_(-7.0)
    return made


def arguments(rows: int) -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "target_hidden": torch.randn(rows, FEATURES),
        "positions": torch.randint(0, 128, (rows,)),
        "cache_loc": torch.randperm(SLOTS)[:rows] + 1,
    }


@pytest.mark.parametrize("rows", [1, 6, 13, 124])
def test_the_cache_is_upstreams(draft: Draft, rows: int) -> None:
    given = arguments(rows)
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
    assert int(untouched) == theirs.k_buffer[0].shape[0] - rows


@pytest.mark.parametrize("projected", [False, True])
def test_upstream_writes_windows_and_projected_rows(waiting: Waiting, projected: bool) -> None:
    """After the rows that wait, which those may replace."""
    ours, theirs, step, more = pool(), pool(), steps(1)[0], arguments(12)
    more["cache_loc"][0] = step["cache_loc"][0]
    more["cache_loc_2d"] = more["cache_loc"].view(2, 6)
    more["commit_lens"] = torch.tensor([2, 5], dtype=torch.int32)
    if projected:
        more["target_hidden"] = waiting.project_target_hidden(more["target_hidden"])
        more["target_hidden_is_projected"] = True
        del more["cache_loc_2d"], more["commit_lens"]
    with torch.inference_mode():
        for given in (step, more):
            upstreams(waiting, pool=theirs, **given)
            write_target_hidden_kv(upstreams, waiting, pool=ours, **given)
        assert waiting.__dict__[context_kv.INJECTOR]._waiting.waits.count_nonzero() == 0
    assert same(ours, theirs)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("bfloat16", ("bfloat16", "bfloat16")),
        ("int8", ("int8", "int8")),
        ("auto", ("bfloat16", "bfloat16")),
        ("auto", ("float32", "bfloat16")),
    ],
)
def test_packed_weights_write_what_they_stand_for(
    draft: Draft,
    told: str,
    kept: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Against upstream's path with the numbers that the formats of the features' projection and of
    the layers stand for. bfloat16 numbers are kept as such unasked, and change no bit."""
    file = tmp_path / "dspark.json"
    # Rows that are rounded beside weights are another test's (test_weight_formats.py).
    file.write_text(json.dumps({"cpu": {"weights": told, "activations": "wide"}}))
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(file))
    request.addfinalizer(linear.prepare.cache_clear)
    linear.prepare.cache_clear()
    weights = [draft.fc.weight, *(layer.self_attn.qkv_proj.weight for layer in draft.layers)]
    forms = [FORMATS[kept[0]], *(FORMATS[kept[1]] for _ in draft.layers)]
    if told == "auto":
        for weight, form in zip(weights, forms, strict=True):
            weight.copy_(weight.to(form.dtype))
    given = arguments(18)
    ours, theirs, wide = pool(), pool(), pool()
    with torch.inference_mode():
        write_target_hidden_kv(_must_not_run, draft, pool=ours, **given)
        injector = draft.__dict__.pop(context_kv.INJECTOR)
        assert [each.dtype for each in injector._weights] == [form.dtype for form in forms[:2]]
        assert injector.holds(draft, ours)
        for weight, form in zip(weights, forms, strict=True):
            weight.copy_(dense(pack(weight, form)))
        draft._stacked_ctx_kv_cache = False  # made anew of the new weights
        DSparkDraftMixin.write_target_hidden_kv(draft, pool=theirs, **given)
        file.write_text(json.dumps({"cpu": {"weights": "float32"}}))
        write_target_hidden_kv(_must_not_run, draft, pool=wide, **given)
    near = 3e-4 if told == "int8" else 1e-5  # activations are rounded too
    for mine, upstreams_own in zip(ours.k_buffer, theirs.k_buffer, strict=True):
        torch.testing.assert_close(mine, upstreams_own, rtol=near, atol=near)
    if told != "int8":
        pairs = zip((*ours.k_buffer, *ours.v_buffer), (*wide.k_buffer, *wide.v_buffer), strict=True)
        assert all(torch.equal(mine, same) for mine, same in pairs)


def test_every_instruction_set_writes_the_same_bits(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In odd numbers of rows, not multiples of a block of the product."""
    found = []
    for level in LEVELS:
        force_level(monkeypatch, context_kv, level)
        found.append(pool())
        with torch.inference_mode():
            injector = context_kv.resolve_injector(draft, found[-1])
            for rows in (1, 7, 29):
                torch.manual_seed(rows)
                hidden = torch.randn(rows, FEATURES)
                positions, slots = torch.randint(128, (rows,)), torch.randperm(SLOTS)[:rows] + 1
                assert injector.write(hidden, positions, slots)
    for each in found:
        assert all(map(torch.equal, each.k_buffer, found[0].k_buffer))
        assert all(map(torch.equal, each.v_buffer, found[0].v_buffer))


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


def context(*requests: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Table, rows and lengths of requests whose context lies in these slots."""
    table = torch.zeros(len(requests) + 1, 96, dtype=torch.int32)
    for r, slots in enumerate(requests):
        table[r + 1, : len(slots)] = torch.tensor(slots)
    rows = torch.arange(1, len(requests) + 1)
    return table, rows, torch.tensor([len(slots) for slots in requests])


def written(buffers: MHATokenToKVPool) -> set[int]:
    """Slots that hold something."""
    return set(torch.nonzero(buffers.k_buffer[0][:, 0, 0] != -7.0).flatten().tolist())


def test_rows_wait_until_a_draft_reads_their_context(waiting: Waiting) -> None:
    ours, theirs = pool(), pool()
    with torch.inference_mode():
        for step in steps(20):
            DSparkDraftMixin.write_target_hidden_kv(waiting, pool=theirs, **step)
            write_target_hidden_kv(_must_not_run, waiting, pool=ours, **step)
        assert written(ours) == set()
        context_kv.settle(waiting, *context([2, 5, 7], [5, 1]))
        assert written(ours) == {1, 2, 5, 7}
        context_kv.settle_all(waiting)
    assert same(ours, theirs)
    assert waiting.__dict__[context_kv.INJECTOR]._waiting.waits.count_nonzero() == 0


def test_what_a_later_token_supersedes_is_never_written(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = []
    write = context_kv.Injector._write
    monkeypatch.setattr(
        context_kv.Injector,
        "_write",
        lambda self, hidden, *given: [count.append(len(hidden)), write(self, hidden, *given)],
    )
    ours = pool()
    with torch.inference_mode():
        for step in steps(20):
            write_target_hidden_kv(_must_not_run, waiting, pool=ours, **step)
        context_kv.settle_all(waiting)
    assert sum(count) == 10  # 120 tokens in ten slots


@pytest.mark.parametrize("resting", [False, True])
@pytest.mark.parametrize("tokens", [40, 80, 150, 300])
def test_prefills_wait_where_nothing_is_drafted(
    waiting: Waiting, tokens: int, resting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_kv, "LONGEST_KEPT", 80)
    ours, theirs, prompt = pool(), pool(), arguments(tokens)
    if tokens > SLOTS:  # more rows than slots: equal ones, as torch writes in any order
        prompt["cache_loc"] = torch.full((tokens,), SLOTS)
        prompt["target_hidden"] = prompt["target_hidden"][:1].repeat(tokens, 1)
        prompt["positions"] = prompt["positions"][:1].repeat(tokens)
    with torch.inference_mode():
        step = steps(1)[0]
        for buffers, write in (
            (theirs, lambda **given: DSparkDraftMixin.write_target_hidden_kv(waiting, **given)),
            (ours, lambda **given: write_target_hidden_kv(upstreams, waiting, **given)),
        ):
            write(pool=buffers, **step)
            if resting and buffers is ours:
                context_kv.settle(waiting, *context([1]), drafts=False)
            write(pool=buffers, **prompt)
        kept = tokens <= (80 if resting else context_kv.WAITING // 2)
        later = set(prompt["cache_loc"].tolist()) - set(step["cache_loc"].tolist())
        assert written(ours).isdisjoint(later) == kept
        context_kv.settle_all(waiting)
    assert same(ours, theirs)


@pytest.mark.parametrize("places", [SLOTS + 1, 100])
def test_a_draft_reads_what_upstream_would_have_written(
    waiting: Waiting, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, decode with and without drafts, end, and their slots go to others; with
    fewer places than slots rows are in each other's way."""
    monkeypatch.setattr(context_kv, "KEPT_BYTES", places * 4 * FEATURES)
    monkeypatch.setattr(context_kv, "WAITING", 20)
    displaced = []
    take = WaitingRows.take_from
    monkeypatch.setattr(
        WaitingRows, "take_from", lambda *given: (displaced.append(given[2]), take(*given))[1]
    )
    ours, theirs, random = pool(), pool(), torch.Generator().manual_seed(places)
    free, live = list(range(1, SLOTS + 1)), []  # type: tuple[list[int], list[list[int]]]

    def drawn(most: int) -> int:
        return int(torch.randint(most, (1,), generator=random))

    def write(rows: list[int], positions: list[int]) -> None:
        given = {
            "target_hidden": torch.randn(len(rows), FEATURES, generator=random),
            "positions": torch.tensor(positions),
            "cache_loc": torch.tensor(rows),
        }
        upstreams(waiting, pool=theirs, **given)
        write_target_hidden_kv(_must_not_run, waiting, pool=ours, **given)

    with torch.inference_mode():
        for _ in range(400):
            if len(live) < 4:
                prompt = [free.pop(0) for _ in range(1 + drawn(20))]
                live.append(prompt)
                write(prompt, list(range(len(prompt))))
            resting = drawn(8) > 0
            if resting:
                context_kv.settle(waiting, *context(*live), drafts=False)
            else:
                context_kv.settle(waiting, *context(*live))
                read = torch.tensor([slot for request in live for slot in request])
                for mine, upstream in zip(ours.k_buffer, theirs.k_buffer, strict=True):
                    torch.testing.assert_close(mine[read], upstream[read], rtol=1e-5, atol=1e-5)
            for request in live:
                request.append(free.pop(0))
            write([request[-1] for request in live], [len(request) - 1 for request in live])
            ended = [request for request in live if len(request) > 30 or drawn(40) == 0]
            live = [request for request in live if request not in ended]
            free += [slot for request in ended for slot in request]
        assert len(waiting.__dict__[context_kv.INJECTOR]._waiting.slots) == places
        assert (context_kv.WAITING in displaced) == (places < SLOTS)
        context_kv.settle_all(waiting)
    assert same(ours, theirs)


def test_long_context_is_not_left_to_one_draft(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_kv, "MOST_LIVE", 90)
    ours, slots = pool(), torch.randperm(SLOTS)[:150] + 1
    rows = [slots[first : first + 50].tolist() for first in (0, 50, 100)]
    given = arguments(150) | {"cache_loc": slots}
    with torch.inference_mode():
        context_kv.settle(waiting, *context(rows[0]), drafts=False)
        write_target_hidden_kv(_must_not_run, waiting, pool=ours, **steps(1)[0])
        context_kv.settle(waiting, *context(rows[0]), drafts=False)
        for part in range(3):
            piece = {name: value[part * 50 : part * 50 + 50] for name, value in given.items()}
            write_target_hidden_kv(_must_not_run, waiting, pool=ours, **piece)
        assert written(ours) == set()
        context_kv.settle(waiting, *context(rows[0]), drafts=False)
        assert written(ours) == set()
        context_kv.settle(waiting, *context(rows[0], rows[1]), drafts=False)
    assert written(ours) == set(rows[0] + rows[1])


def test_nothing_is_written_with_weights_that_were_exchanged(waiting: Waiting) -> None:
    ours = pool()
    with torch.inference_mode():
        write_target_hidden_kv(_must_not_run, waiting, pool=ours, **steps(1)[0])
        waiting.fc.weight.data = torch.zeros(HIDDEN, FEATURES)
        context_kv.settle_all(waiting)
    assert written(ours) == set()
    assert context_kv.INJECTOR not in waiting.__dict__


def test_a_cache_in_tiers_is_written_at_once(waiting: Waiting) -> None:
    ours, theirs, step = pool(), pool(), steps(1)[0]
    ours.register_layer_transfer_counter(object())
    with torch.inference_mode():
        DSparkDraftMixin.write_target_hidden_kv(waiting, pool=theirs, **step)
        write_target_hidden_kv(_must_not_run, waiting, pool=ours, **step)
    assert same(ours, theirs)


@pytest.mark.parametrize("ours", [True, False])
def test_drafting_settles_what_waits(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it under another attention backend, which may read more than a block's context."""
    from sglang.srt.model_executor import forward_context

    settled: list[Any] = []

    class Model:
        layers = ()

    model, table = Model(), torch.zeros(2, 2)
    model.__dict__[context_kv.INJECTOR] = SimpleNamespace(
        pool=None,
        holds=lambda *_: True,
        settle=lambda *given: settled.append(given[:3]),
        settle_all=lambda: settled.append("all"),
    )
    backend = object.__new__(DsparkCpuAttnBackend) if ours else SimpleNamespace()
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    monkeypatch.setattr(forward_context, "get_attn_backend", lambda: backend)
    mode = SimpleNamespace(is_decode=lambda: True, is_target_verify=lambda: True)
    batch = SimpleNamespace(forward_mode=mode, req_pool_indices="rows", seq_lens="lens")
    forward_draft(lambda *_: settled.append("drafts"), model, torch.ones(1), torch.ones(1), batch)
    assert settled == [(table, "rows", "lens") if ours else "all", "drafts"]


def test_other_dtypes_keep_upstreams_path() -> None:
    given = arguments(12)["target_hidden"]
    assert not context_kv.supports_rows(given)  # gradients may be wanted
    with torch.no_grad():
        assert context_kv.supports_rows(given)
        assert not context_kv.supports_rows(given.bfloat16())
        assert not context_kv.supports_rows(given[:0])


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("pool", "its cache is builtins.object, not MHATokenToKVPool"),
        ("scale", "its cache is scaled"),
        ("projection", "projects the target's features in a way of its own"),
        ("half precision", "its fc is no plain product"),
        ("adjacent rotary", "its rotary embedding turns adjacent pairs"),
    ],
)
def test_other_drafts_keep_upstreams_path(draft: Draft, case: str, why: str) -> None:
    context_kv.resolve_injector(draft, pool())
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
    with pytest.raises(UnsupportedError, match=why):
        context_kv.resolve_injector(draft, object() if case == "pool" else pool())


@pytest.mark.parametrize("kept", ["bfloat16", "float32"])
def test_an_update_in_place_reaches_every_copy(draft: Draft, kept: str) -> None:
    """Steps may run between the parts of an update, before SGLang's own copy is renewed."""
    weights = [draft.fc.weight, *(layer.self_attn.qkv_proj.weight for layer in draft.layers)]
    runners = [("draft", SimpleNamespace(model=draft))]
    dtype, given = FORMATS[kept].dtype, arguments(18)
    with torch.inference_mode():
        for step in range(2):
            if step:
                weight_updates.begin_update(runners)
            for weight in weights:
                weight.copy_((torch.randn_like(weight) * 0.2).to(dtype))
            write_target_hidden_kv(_must_not_run, draft, pool=pool(), **given)
        weight_updates.renew_copies(draft)
        ours, theirs = pool(), pool()
        write_target_hidden_kv(_must_not_run, draft, pool=ours, **given)
        assert [each.dtype for each in draft.__dict__[context_kv.INJECTOR]._weights] == [dtype] * 2
        draft._stacked_ctx_kv_cache = False  # made anew of the new weights
        DSparkDraftMixin.write_target_hidden_kv(draft, pool=theirs, **given)
    assert same(ours, theirs)


@pytest.mark.parametrize("change", ["weight", "data", "norm", "pool"])
def test_exchanged_weights_and_caches_are_noticed(draft: Draft, change: str) -> None:
    ours = pool()
    found = context_kv.resolve_injector(draft, ours)
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
