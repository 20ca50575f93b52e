"""Drafts over the rows that can be drafted: SGLang's own drafts over the whole vocabulary, -inf
outside, in the draft's graph and with seeds.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.models.dspark import DSparkDraftMixin, GatedMarkovHead, VanillaMarkov
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

from sglang_dspark.backends.cuda import draft, reduced_vocabulary
from sglang_dspark.backends.cuda.draft import DraftSteps
from sglang_dspark.backends.cuda.reduced_vocabulary import obstacle, reduce, reduced_of
from sglang_dspark.drafter.heads import OUTSIDE_VOCABULARY_BIAS, restrict_vocabulary
from sglang_dspark.patches import registry
from sglang_dspark.patches.cuda import seeds as seeds_patch
from sglang_dspark.patches.step.weight_updates import WeightUpdater
from sglang_dspark.serving import weight_updates
from sglang_dspark.serving.mode import Choice
from sglang_dspark.step.seeds import Seeds, seeded_draft

R, GAMMA, V, RANK, WIDTH = 5, 4, 60, 6, 8
ALLOWED = torch.arange(3, V, 4)


class Model(DSparkDraftMixin, torch.nn.Module):
    """The heads of a draft model attached to a target's LM head, without layers."""

    def __init__(self, head: VanillaMarkov) -> None:
        torch.nn.Module.__init__(self)
        self.markov_head = head
        self.lm_head = torch.nn.Linear(WIDTH, V + 4, bias=False)  # padded rows
        self.lm_head.org_vocab_size, self.lm_head.tp_size = V, 1
        self.lm_head.quant_method = None
        self.logits_mup_width_multiplier = None
        self._base_logits_gatherer = None
        self.layers: list[Any] = []


@pytest.fixture(autouse=True)
def scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduced_vocabulary.mode, "choice", lambda: Choice(True, ""))
    monkeypatch.setattr(
        reduced_vocabulary.upstream, "should_apply_lm_head_quant_method",
        lambda head, method: method is not None, raising=False,
    )  # fmt: skip


@torch.no_grad()
def model(allowed: Tensor | None = ALLOWED, **of_head: Any) -> Model:
    torch.manual_seed(3)
    kind = of_head.pop("kind", VanillaMarkov)
    head = kind(vocab_size=V, markov_rank=RANK, **of_head)
    if allowed is not None:
        restrict_vocabulary(head, allowed)
    return Model(head)


def worker(of: Model, hosts: bool = True) -> Any:
    return SimpleNamespace(_hosts_draft=hosts, draft_model=of)


def refuse_whole(**_: Any) -> Any:
    pytest.fail("drafted over the whole vocabulary")


def block(of: Model, base: Tensor, temperatures: Tensor, **extra: Any) -> dict[str, Any]:
    anchors = torch.tensor([0, 3, 17, V - 1, 40])  # inside and outside
    return {
        "markov_head": of.markov_head,
        "base_logits": base,
        "anchor_tokens": anchors,
        "draft_hidden": torch.zeros(R, GAMMA, WIDTH),
        "step_temperatures": temperatures,
        "noise": DraftNoise(key=11, offset=torch.zeros(1, dtype=torch.int64)),
        "tp_sync": SimpleNamespace(enabled=lambda site: False, sync=lambda site, values: values),
        **extra,
    }


def hidden() -> Tensor:
    return 3 * torch.randn(R * GAMMA, WIDTH, generator=torch.Generator().manual_seed(4))


@torch.no_grad()
@pytest.mark.parametrize("greedy", [True, False])
def test_argmax_drafts_and_their_logits_are_those_of_the_whole_vocabulary(greedy: bool) -> None:
    whole, ours = model(), model()
    reduce(worker(ours))
    all_logits = (hidden() @ whole.lm_head.weight.T)[:, :V].view(R, GAMMA, V)
    base, features = ours.compute_base_logits(hidden())
    assert features.shape == (R * GAMMA, WIDTH)
    assert base.shape == (R * GAMMA, len(ALLOWED))
    torch.testing.assert_close(base.view(R, GAMMA, -1), all_logits[..., ALLOWED])
    cold = torch.zeros(R)
    expected, theirs = draft_markov_block(**block(whole, all_logits, cold, greedy_draft=greedy))
    given = block(ours, base.view(R, GAMMA, -1), cold, greedy_draft=greedy)
    tokens, kept = DraftSteps()(refuse_whole, **given)
    assert torch.equal(tokens, expected)
    assert bool(torch.isin(tokens, ALLOWED).all())
    assert int(given["noise"].offset) == (0 if greedy else 1)
    if greedy:
        assert kept is theirs is None
        return
    torch.testing.assert_close(kept[..., ALLOWED], theirs[..., ALLOWED])
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, ALLOWED, False)
    assert bool((kept[..., outside] == -torch.inf).all())
    assert float(theirs[..., outside].max()) < OUTSIDE_VOCABULARY_BIAS / 2


@torch.no_grad()
def test_sampled_drafts_follow_the_logits_that_are_kept() -> None:
    """Position by position, 60,000 blocks: the tokens' shares are the softmax of the logits."""
    ours, repeats = model(), 12_000
    reduce(worker(ours))
    base = ours.compute_base_logits(hidden())[0].view(R, GAMMA, -1)
    many = base[:1].repeat_interleave(R * repeats, 0)
    given = block(ours, many, torch.full((R * repeats,), 0.7))
    given |= {"anchor_tokens": torch.full((R * repeats,), 17), "draft_hidden": None}
    tokens, kept = DraftSteps()(refuse_whole, **given)
    first = kept[0, 0].div(0.7).softmax(-1)
    shares = torch.bincount(tokens[:, 0], minlength=V) / len(tokens)
    assert float((shares - first).abs().max()) < 0.01
    assert float(first.max()) < 0.9, "a drawn token is no argmax"
    w1, w2 = ours.markov_head.markov_w1.weight, ours.markov_head.markov_w2.weight
    for place in range(1, GAMMA):
        bias = w1[tokens[:, place - 1]] @ w2.T
        expected = many[:, place] + bias[:, ALLOWED]
        torch.testing.assert_close(kept[:, place][:, ALLOWED], expected)


@torch.no_grad()
def test_a_graphs_buffer_is_filled_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, capturing = model(), False
    reduce(worker(ours))
    monkeypatch.setattr(reduced_vocabulary, "_is_captured", lambda _: capturing)
    base = ours.compute_base_logits(hidden())[0].view(R, GAMMA, -1)
    buffer = torch.full((R + 3, GAMMA, V), torch.nan)
    for capturing in (False, True, True):
        given = block(ours, base + capturing, torch.zeros(R), logits_out=buffer[:R])
        _, kept = DraftSteps()(refuse_whole, **given)
        assert kept.data_ptr() == buffer.data_ptr()
        assert int(kept.isfinite().sum()) == R * GAMMA * len(ALLOWED)
        assert not bool(kept.isnan().any())
    assert bool(buffer[R:].isnan().all()), "rows of other requests"


@torch.no_grad()
def test_logits_are_kept_in_the_type_of_the_steps() -> None:
    """Of bfloat16 base logits and a float32 head, as upstream's."""
    ours = model()
    reduce(worker(ours))
    base = ours.compute_base_logits(hidden())[0].view(R, GAMMA, -1).bfloat16()
    _, kept = DraftSteps()(refuse_whole, **block(ours, base, torch.ones(R)))
    assert kept.dtype == torch.float32
    buffer = torch.empty(R, GAMMA, V)
    given = block(ours, base, torch.zeros(R), logits_out=buffer)
    assert DraftSteps()(refuse_whole, **given)[1] is not None


@torch.no_grad()
@pytest.mark.parametrize("why", ["quicker", "does not fit", "refused", "too large"])
def test_every_fallback_of_the_operator_is_over_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    ours, steps = model(), DraftSteps()
    reduce(worker(ours))
    monkeypatch.setattr(draft, "runs_on", lambda _: True)
    monkeypatch.setattr(draft.mode, "choice", lambda: Choice(True, ""))
    steps._fits = why != "does not fit"
    agreed: list[int] = []

    def sync(site: Any, tokens: Tensor) -> Tensor:
        agreed.append(len(tokens))
        return tokens

    ranks = SimpleNamespace(enabled=lambda site: why == "refused", sync=sync)
    if why == "too large":
        monkeypatch.setattr(steps, "_launched", lambda given: None)
    base = ours.compute_base_logits(hidden())[0].view(R, GAMMA, -1)
    out = torch.empty(R, GAMMA, V) if why == "quicker" else None
    given = block(ours, base, torch.zeros(R), logits_out=out, tp_sync=ranks)
    tokens, _ = steps(refuse_whole, **given)
    assert bool(torch.isin(tokens, ALLOWED).all())
    assert agreed == [R] * GAMMA, "ranks agree on each draft before the next"


@pytest.mark.parametrize(("cuda", "capturing", "captured"), [
    (True, True, True), (True, False, False), (False, True, False)
])  # fmt: skip
def test_a_buffer_is_captured_on_a_device_alone(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, capturing: bool, captured: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    buffer: Any = SimpleNamespace(is_cuda=cuda)
    assert reduced_vocabulary._is_captured(buffer) == captured


@torch.no_grad()
def test_a_seed_chooses_by_token_ids() -> None:
    """The choice is that of SGLang's steps over the whole vocabulary."""
    whole, ours = model(), model()
    reduce(worker(ours))
    all_logits = (hidden() @ whole.lm_head.weight.T)[:, :V].view(R, GAMMA, V)
    base = ours.compute_base_logits(hidden())[0].view(R, GAMMA, -1)
    info = SimpleNamespace(temperatures=torch.ones(R, 1), top_ks=torch.full((R,), 99))
    batch = SimpleNamespace(sampling_info=info, seq_lens=torch.arange(R))
    proposer = SimpleNamespace(_draft_sampler=None)
    found = []
    for of, logits in ((whole, all_logits), (ours, base)):
        given = block(of, logits, torch.ones(R), greedy_draft=False)
        del given["step_temperatures"]
        given |= {"sampling_info": info, "device": "cpu"}
        with seeded_draft(proposer, batch, Seeds(torch.arange(R), torch.arange(R) + 70)):
            found.append(
                seeds_patch.sample_draft_block(lambda **_: pytest.fail("no seeds"), **given)
            )
    assert torch.equal(found[0].draft_tokens, found[1].draft_tokens)
    kept = found[1].corrected_logits
    torch.testing.assert_close(kept[..., ALLOWED], found[0].corrected_logits[..., ALLOWED])
    assert int(kept.isfinite().sum()) == R * GAMMA * len(ALLOWED)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["end_weight_update", "update_weights_from_disk", "update_weights_from_ipc"]
)
def test_every_update_renews_the_rows_in_place(name: str) -> None:
    """Those of the target, too: they bring another LM head."""
    ours = model()
    hosting = DSparkWorkerV2.__new__(DSparkWorkerV2)
    hosting.__dict__.update(vars(worker(ours)))

    class Theirs:
        draft_worker = hosting

    def done(self: Any, recv_req: Any) -> Any:
        return SimpleNamespace(success=True)

    setattr(Theirs, name, done)
    updater: Any = registry.derive(Theirs, WeightUpdater)()

    def update() -> None:
        assert getattr(updater, name)(None).success

    reduce(worker(ours))
    reduced = reduced_of(ours.markov_head)
    assert reduced is not None
    assert reduced.bytes == 4 * len(ALLOWED) * (WIDTH + RANK)
    places = reduced.lm_head.data_ptr(), reduced.w2.data_ptr()
    assert reduced.head.markov_w2.weight.data_ptr() == places[1]
    assert reduced.head.markov_w1 is ours.markov_head.markov_w1
    ours.markov_head.markov_w2.weight.mul_(2)
    ours.lm_head.weight.add_(1)
    update()
    assert torch.equal(reduced.w2, ours.markov_head.markov_w2.weight[ALLOWED])
    assert torch.equal(reduced.lm_head, ours.lm_head.weight[ALLOWED])
    assert (reduced.lm_head.data_ptr(), reduced.w2.data_ptr()) == places


def test_another_vocabulary_after_an_update_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ours = model()
    reduce(worker(ours))
    weight_updates.renew_heads(ours)
    assert not caplog.records
    with torch.no_grad():
        restrict_vocabulary(ours.markov_head, ALLOWED[1:])
    weight_updates.renew_heads(ours)
    assert "has another vocabulary" in caplog.messages[-1]
    weight_updates.renew_heads(SimpleNamespace())


def test_heads_that_span_the_vocabulary_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    every = torch.arange(V)
    for of in (model(None), model(every), model(kind=GatedMarkovHead, hidden_size=WIDTH)):
        reduce(worker(of))
        assert reduced_of(of.markov_head) is None
    reduce(worker(unhosted := model(), hosts=False))
    assert reduced_of(unhosted.markov_head) is None
    monkeypatch.setattr(reduced_vocabulary.mode, "choice", lambda: Choice(False, "off"))
    reduce(worker(off := model()))
    assert reduced_of(off.markov_head) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"logits_mup_width_multiplier": 2.0}, "scales its logits"),
        ({"lm_head.quant_method": object()}, "the LM head is quantised"),
        ({"lm_head.tp_size": 2}, "split over ranks"),
        ({"markov_head.vocab_shard": object()}, "split over ranks"),
        ({"lm_head.weight": torch.nn.Parameter(torch.zeros(V - 1, WIDTH))}, "fewer tokens"),
        ({"lm_head.weight": torch.nn.Parameter(torch.zeros(V, WIDTH).double())}, "float64"),
    ],
)
def test_what_cannot_be_reduced_is_said(
    changed: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    of = model()
    for name, value in changed.items():
        *path, last = name.split(".")
        owner = of.get_submodule(".".join(path))
        setattr(owner, last, value)
    assert said in str(obstacle(of))
    with caplog.at_level(logging.INFO, reduced_vocabulary.logger.name):
        reduce(worker(of))
    assert reduced_of(of.markov_head) is None
    assert f"whole vocabulary: {obstacle(of)}" in caplog.messages[0]


def test_another_models_base_logits_stay_its_own() -> None:
    class Other(Model):
        def compute_base_logits(self, hidden: Tensor) -> Any:
            raise AssertionError

    of = model()
    of.__class__ = Other
    assert obstacle(of) == "Other has base logits of its own"
