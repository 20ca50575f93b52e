"""Reduced draft vocabulary against upstream's own draft path on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import linear, reduced_head
from sglang_dspark.backends.cpu.weight_formats import FORMATS, dense, half_rows, is_packed, pack
from sglang_dspark.drafter.heads import OUTSIDE_VOCABULARY_BIAS, restricted_tokens
from sglang_dspark.serving import config, weight_updates

V, D, RANK, GAMMA, INSIDE, ROWS = 160, 32, 16, 5, 48, 4


@dataclass
class Drafted:
    """Drafts of one path: tokens [R, GAMMA], probabilities [R, GAMMA, V] or None."""

    tokens: Tensor
    probabilities: Tensor | None
    base: Tensor
    block: Any


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets `cpu.weights`, and `cpu.activations` where given."""

    def set_to(name: str, activations: str = "auto") -> None:
        file = tmp_path / "dspark.json"
        file.write_text(json.dumps({"cpu": {"weights": name, "activations": activations}}))
        monkeypatch.setenv(config.CONFIG_VARIABLE, str(file))

    return set_to


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """SGLang's groups for a single process, which its LM head and logits gather need."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )
    from sglang.srt.runtime_context import get_parallel

    widths = ("tp", "pp", "moe_ep", "attn_dp", "attn_cp", "moe_dp", "attn_dcp", "attn_tp", "moe_tp")
    ones = {f"{width}_size": 1 for width in (*widths, "shared_experts_tp")}
    store = tmp_path_factory.mktemp("group") / "store"
    init_distributed_environment(
        world_size=1,
        rank=0,
        distributed_init_method=f"file://{store}",
        local_rank=0,
        backend="gloo",
    )
    with get_parallel().override(**ones, tp_rank=0, attn_tp_rank=0):
        initialize_model_parallel(backend="gloo")
        yield
    destroy_model_parallel()
    destroy_distributed_environment()


class Draft:
    """Upstream's draft mixin around random heads, restricted to INSIDE tokens or not."""

    def __init__(self, *, restricted: bool, seed: int = 3) -> None:
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
        from sglang.srt.models.dspark import DSparkDraftMixin, VanillaMarkov
        from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise
        from sglang.srt.speculative.spec_tp_sync import SpecTpSync

        class Model(DSparkDraftMixin, torch.nn.Module):
            is_nemotron_35_draft = False

            def __init__(self) -> None:
                torch.nn.Module.__init__(self)
                self.markov_head = VanillaMarkov(vocab_size=V, markov_rank=RANK)
                self.logits_mup_width_multiplier = None
                self._base_logits_gatherer = None

        torch.manual_seed(seed)
        self.model = Model()
        self.lm_head = ParallelLMHead(V, D)  # padded to more rows than V
        self.allowed = torch.randperm(V)[:INSIDE].sort().values
        with torch.no_grad():
            self.lm_head.weight.normal_(0, 0.4)
            head = self.model.markov_head
            head.markov_w1.weight.normal_()
            head.markov_w2.weight.normal_(0, 0.3)
            if restricted:
                head.markov_w1.weight[:, -1] = 1.0
                head.markov_w2.weight[:, -1] = OUTSIDE_VOCABULARY_BIAS
                head.markov_w2.weight[self.allowed, -1] = 0.0
        embedding = torch.nn.Embedding(V, D)
        self.model.attach_shared_modules(embed_tokens=embedding, lm_head=self.lm_head)
        self.sync = SpecTpSync(_tp_group())
        self.reduced: reduced_head.ReducedHead | None = None
        self.noise = DraftNoise(key=11, offset=torch.zeros(1, dtype=torch.int64))

    def hook(self) -> None:
        self.reduced = reduced_head.find_reduced_head(self.model)

    def draft(self, hidden: Tensor, anchor: Tensor, sampling: Any, *, hooked: bool) -> Drafted:
        """hidden [R * GAMMA, D], anchor [R]; by our heads or by upstream's code alone."""
        from sglang.srt.speculative.dspark_components import dspark_draft, dspark_verify

        from sglang_dspark.backends.cpu.draft import DraftHeads

        base: Tensor
        heads = DraftHeads(self.model, self.noise, self.sync, self.reduced, greedy_only=False)
        with torch.inference_mode():
            if hooked:
                base, features = heads.base_logits(hidden)
                shaped = base.view(anchor.numel(), GAMMA, -1)
                block = heads.sample(shaped, anchor, hidden, sampling, anchor, None)
            else:
                base, features = self.model.compute_base_logits(hidden)
                block = dspark_draft.sample_draft_block(
                    base_logits=base.view(anchor.numel(), GAMMA, -1),
                    anchor_tokens=anchor,
                    draft_hidden=hidden.view(anchor.numel(), GAMMA, D),
                    sampling_info=sampling,
                    markov_head=self.model.markov_head,
                    noise=self.noise,
                    device=torch.device("cpu"),
                    tp_sync=self.sync,
                    greedy_draft=False,
                )
            assert features is hidden
            sampled = sampling is not None and not sampling.is_all_greedy
            distribution = dspark_verify._draft_probs(block, V, "cpu") if sampled else None
        return Drafted(block.draft_tokens, distribution, base, block)


def _tp_group() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group


def sampling(temperatures: list[float]) -> Any:
    """Upstream's batch settings; temperature 0 is its greedy request (top-k 1)."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    temperature = torch.tensor(temperatures)
    greedy = temperature == 0
    rows = len(temperatures)
    return SamplingBatchInfo(
        temperatures=torch.where(greedy, 1.0, temperature)[:, None],
        top_ps=torch.ones(rows),
        top_ks=torch.where(greedy, 1, 1 << 30).to(torch.int32),
        min_ps=torch.zeros(rows),
        is_all_greedy=bool(greedy.all()),
        is_any_greedy=bool(greedy.any()),
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=V,
    )


def inputs(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows * GAMMA, D, generator=generator)
    return hidden, torch.randint(0, V, (rows,), generator=generator)


@pytest.mark.usefixtures("one_rank")
class TestAgainstUpstream:
    @pytest.mark.parametrize("rows", [1, 4])
    @pytest.mark.parametrize("settings", ["none", "greedy"])
    def test_greedy_tokens_are_the_same(self, settings: str, rows: int) -> None:
        draft = Draft(restricted=True)
        draft.hook()
        info = None if settings == "none" else sampling([0.0] * rows)
        seen = set()
        for seed in range(10):
            hidden, anchor = inputs(seed, rows)
            ours = draft.draft(hidden, anchor, info, hooked=True)
            assert torch.equal(ours.tokens, draft.draft(hidden, anchor, info, hooked=False).tokens)
            assert ours.base.shape == (rows * GAMMA, INSIDE)
            assert ours.block.corrected_logits is None
            assert ours.block.greedy_draft
            seen |= set(ours.tokens.flatten().tolist())
        assert len(seen) > 10
        assert seen <= set(draft.allowed.tolist())

    def test_an_update_reaches_the_copied_rows(self) -> None:
        draft = Draft(restricted=True)
        before = reduced_head.reduced_head_of(draft.model)
        assert before is not None
        assert reduced_head.reduced_head_of(draft.model) is before
        with torch.no_grad():
            draft.lm_head.weight.normal_()
            draft.model.markov_head.markov_w2.weight[:, :-1].normal_()
        weight_updates.renew_heads(draft.model)
        draft.reduced = reduced_head.reduced_head_of(draft.model)
        hidden, anchor = inputs(2)
        ours = draft.draft(hidden, anchor, None, hooked=True)
        assert torch.equal(ours.tokens, draft.draft(hidden, anchor, None, hooked=False).tokens)
        draft.reduced = before
        assert not torch.equal(ours.tokens, draft.draft(hidden, anchor, None, hooked=True).tokens)

    def test_sampled_probabilities_are_the_same(self) -> None:
        """At upstream's own tokens, so that both see the same transitions."""
        draft = Draft(restricted=True)
        draft.hook()
        info = sampling([1.0, 0.6, 0.3, 0.0])
        hidden, anchor = inputs(1)
        ours = draft.draft(hidden, anchor, info, hooked=True)
        assert ours.probabilities is not None
        head = draft.model.markov_head
        previous = torch.cat([anchor[:, None], ours.tokens[:, :-1]], 1)  # [R, GAMMA]
        with torch.inference_mode():
            base = draft.model.compute_base_logits(hidden)[0].view(ROWS, GAMMA, V)
            bias = torch.stack(
                [head.step_bias(t, hidden_states=None, state=None)[0] for t in previous]
            )
        temperature = ours.block.temperatures[:, None, None]
        expected = torch.softmax((base + bias) / temperature, -1)
        torch.testing.assert_close(ours.probabilities, expected, atol=2e-6, rtol=1e-4)
        outside = torch.ones(V, dtype=torch.bool)
        outside[draft.allowed] = False
        assert bool((ours.probabilities[..., outside] == 0).all())
        greedy = (base + bias)[3].argmax(-1)
        assert torch.equal(ours.tokens[3], greedy)
        assert not ours.block.greedy_draft
        assert ours.block.greedy_mask.tolist() == [False, False, False, True]

    def test_tokens_follow_the_probabilities(self) -> None:
        """Chi-square over many blocks of the first position; all blocks share its distribution."""
        rows, rounds = 64, 60
        draft = Draft(restricted=True)
        draft.hook()
        hidden = inputs(5, 1)[0].repeat(rows, 1)
        anchor = torch.full((rows,), 9)
        info = sampling([0.8] * rows)
        counts = torch.zeros(V)
        for _ in range(rounds):
            ours = draft.draft(hidden, anchor, info, hooked=True)
            counts += torch.bincount(ours.tokens[:, 0], minlength=V)
        assert ours.probabilities is not None
        assert int(draft.noise.offset) == rounds
        assert chi_square(counts, ours.probabilities[0, 0]) < 4
        distribution = ours.probabilities[0, 0].flip(0)
        assert chi_square(counts, distribution) > 50  # the test sees a wrong distribution

    def test_noise_depends_on_key_and_step_only(self) -> None:
        draft = Draft(restricted=True)
        draft.hook()
        hidden, anchor = inputs(2)
        info = sampling([1.0] * ROWS)
        blocks = []
        for offset in (0, 0, 1):
            draft.noise.offset.fill_(offset)
            blocks.append(draft.draft(hidden, anchor, info, hooked=True).tokens)
        assert torch.equal(blocks[0], blocks[1])
        assert not torch.equal(blocks[0], blocks[2])

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_a_whole_vocabulary_keeps_upstreams_path(self, temperature: float) -> None:
        draft = Draft(restricted=False)
        draft.hook()
        hidden, anchor = inputs(4)
        info = sampling([temperature] * ROWS)
        ours = draft.draft(hidden, anchor, info, hooked=True)
        draft.noise.offset.zero_()
        upstream = draft.draft(hidden, anchor, info, hooked=False)
        assert torch.equal(ours.tokens, upstream.tokens)
        assert torch.equal(ours.base, upstream.base)
        if temperature:
            assert torch.equal(ours.block.corrected_logits, upstream.block.corrected_logits)

    def test_the_width_multiplier_is_applied(self) -> None:
        draft = Draft(restricted=True)
        draft.hook()
        hidden, anchor = inputs(6)
        draft.model.logits_mup_width_multiplier = 3.0
        ours = draft.draft(hidden, anchor, None, hooked=True)
        upstream = draft.draft(hidden, anchor, None, hooked=False)
        torch.testing.assert_close(ours.base, upstream.base[:, draft.allowed])


def chi_square(counts: Tensor, distribution: Tensor) -> float:
    """Pearson's statistic over cells of at least 5 expected, in standard deviations above it."""
    expected = distribution * counts.sum()
    cells = expected >= 5
    observed = torch.cat([counts[cells], counts[~cells].sum()[None]])
    wanted = torch.cat([expected[cells], expected[~cells].sum()[None].clamp_min(1e-9)])
    keep = wanted >= 1
    statistic = ((observed - wanted)[keep] ** 2 / wanted[keep]).sum()
    freedom = int(keep.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


class TestReduction:
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(1)
        w1, w2 = torch.randn(V, RANK), torch.randn(V, RANK)
        w1[:, -1] = 1.0
        w2[:, -1] = OUTSIDE_VOCABULARY_BIAS
        w2[:INSIDE, -1] = 0.0
        return w1, w2, torch.randn(V, D)

    def test_the_rows_inside_are_taken(self) -> None:
        w1, w2, lm_head = self.weights()
        head = reduced_head.reduced_head(w1, w2, lm_head)
        assert head is not None
        assert head.tokens.tolist() == list(range(INSIDE))
        assert torch.equal(head.lm_head, lm_head[:INSIDE])
        assert torch.equal(head.w2, w2[:INSIDE])

    @pytest.mark.parametrize("form", ["bfloat16", "int8"])
    @pytest.mark.parametrize("inside", [32, 20])
    def test_rows_of_a_packed_head_are_numbers_however_many(self, form: str, inside: int) -> None:
        """Twenty rows are in no format: they are widened."""
        w1, w2 = torch.ones(64, RANK), torch.randn(64, RANK)
        w2[:, -1] = OUTSIDE_VOCABULARY_BIAS
        w2[:inside, -1] = 0.0
        packed = pack(torch.randn(64, 128), FORMATS[form])
        head = reduced_head.reduced_head(w1, w2, packed)
        assert head is not None
        assert is_packed(head.lm_head) == (inside == 32)
        x = torch.randn(3, 128)
        with torch.inference_mode():
            found = reduced_head.base_logits(head, x)
        halved = is_packed(head.lm_head) and linear.activations_for(FORMATS[form]) == "bfloat16"
        seen = half_rows(x) if halved else x
        torch.testing.assert_close(found, seen @ dense(packed)[:inside].T, rtol=1e-3, atol=1e-2)

    @pytest.mark.parametrize("activations", ["auto", "narrow"])
    @pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
    def test_the_second_factor_is_kept_as_configured(
        self, form: str, activations: str, told: Callable[..., None]
    ) -> None:
        """Its product is that of the numbers that its format stands for, its rows those inside."""
        told(form, activations)
        w1, w2 = torch.ones(64, 64), torch.randn(64, 64)
        w2[:, -1] = OUTSIDE_VOCABULARY_BIAS
        w2[16:48, -1] = 0.0
        head = reduced_head.reduced_head(w1, w2, torch.randn(64, D))
        assert head is not None
        kept = linear.served(FORMATS[form])
        assert head.w2.dtype is kept.dtype
        assert torch.equal(dense(head.w2), dense(pack(w2[16:48], kept)))
        assert head.supports_kernel == (linear.prepare() is not None)

    @pytest.mark.parametrize(
        "changed", [{"w1": torch.bfloat16}, {"w2": torch.float16}, {"w2": torch.int8}]
    )
    def test_other_factors_are_left_to_torch(self, changed: dict[str, torch.dtype]) -> None:
        """The compiled loop reads W1 in float32, and W2 where our kernel reads it: plain int8
        without scales, as here, is no format."""
        factors = {"w1": torch.randn(V, 32), "w2": torch.randn(INSIDE, 32)}
        tokens, lm_head = torch.arange(INSIDE), torch.randn(INSIDE, D)
        whole = reduced_head.ReducedHead(tokens, lm_head, **factors)
        assert whole.supports_kernel == (linear.prepare() is not None)
        for name, dtype in changed.items():
            factors[name] = factors[name].to(dtype)
        assert not reduced_head.ReducedHead(tokens, lm_head, **factors).supports_kernel

    @pytest.mark.parametrize("change", ["w1", "w2", "none inside", "all inside"])
    def test_other_heads_are_not_reduced(self, change: str) -> None:
        w1, w2, lm_head = self.weights()
        if change == "w1":
            w1[5, -1] = 0.5
        elif change == "w2":
            w2[5, -1] = -29.0
        else:
            w2[:, -1] = 0.0 if change == "all inside" else OUTSIDE_VOCABULARY_BIAS
        assert reduced_head.reduced_head(w1, w2, lm_head) is None
        if change != "all inside":
            assert restricted_tokens(w1, w2) is None
