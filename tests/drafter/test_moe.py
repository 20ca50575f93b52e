"""Experts, window and residual streams in the drafter: equal to the textbook forms, balanced,
trainable, saved and loaded, and no change to drafters that have none of them.
"""

import json

import pytest
import torch

from sglang_dspark.drafter import DrafterConfig, load_drafter, save_drafter
from sglang_dspark.drafter.attention import PackedLayout, block_attention, packed_attention
from sglang_dspark.drafter.context import FeatureContext
from sglang_dspark.drafter.deepspec import save_deepspec
from sglang_dspark.drafter.moe import MoE, Routing, balance_experts, permute_tokens
from sglang_dspark.errors import DSparkError
from tests.drafter.helpers import tiny_config, tiny_drafter
from tests.training.helpers import drawn, learner, packed, sequences

EXPERTS = {
    "num_experts": 8,
    "experts_per_token": 2,
    "moe_intermediate_size": 24,
    "num_shared_experts": 1,
}
EVERYTHING = {**EXPERTS, "window": 3, "residual_streams": 4, "routed_scaling": 1.5, "gamma": 5}


def make_moe(seed: int = 0, **changes: object) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(tiny_config(**{**EXPERTS, **changes}))
    with torch.no_grad():
        moe.gate.e_score_correction_bias.normal_(std=0.3)
        moe.gate.weight.mul_(3)
    return moe


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor):
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def naive(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert, from the formula."""
    c, out = moe.gate.c, []
    for token in x:
        logits = moe.gate.weight @ token
        scores = logits.sigmoid() if c.router_scores == "sigmoid" else logits.softmax(0)
        ranked = (scores + moe.gate.e_score_correction_bias).tolist()
        chosen = sorted(range(c.num_experts), key=lambda e: -ranked[e])[: c.experts_per_token]
        total = sum(scores[e] for e in chosen) if c.normalise_weights else 1.0
        y = torch.zeros_like(token)
        for e in chosen:
            own = (moe.experts.gate_proj[e], moe.experts.up_proj[e], moe.experts.down_proj[e])
            y = y + c.routed_scaling * scores[e] / total * swiglu(token, *own)
        if moe.shared_experts is not None:
            s = moe.shared_experts
            y = y + swiglu(token, s.gate_proj.weight, s.up_proj.weight, s.down_proj.weight)
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("shared", [0, 1, 2])
@torch.no_grad()
def test_moe_is_the_formula(scores: str, normalise: bool, shared: int) -> None:
    moe = make_moe(
        router_scores=scores,
        normalise_weights=normalise,
        num_shared_experts=shared,
        routed_scaling=2.5,
    )
    x = torch.randn(3, 7, 32)
    expected = naive(moe, x.flatten(0, 1)).view(3, 7, 32)
    torch.testing.assert_close(moe(x), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_bias_chooses_and_does_not_weigh() -> None:
    moe = make_moe()
    x = torch.randn(5, 32)
    moe.gate.e_score_correction_bias.zero_()
    moe.gate.e_score_correction_bias[[2, 6]] = 100.0
    routing = moe.gate(x)
    assert (routing.experts.sort(-1).values == torch.tensor([2, 6])).all()
    scores = (x @ moe.gate.weight.T).sigmoid().gather(-1, routing.experts)
    torch.testing.assert_close(routing.weights, scores / scores.sum(-1, keepdim=True))


@torch.no_grad()
def test_one_token_no_token_and_one_expert_for_all() -> None:
    moe = make_moe()
    x = torch.randn(6, 32)
    assert moe(x[:0]).shape == (0, 32)
    torch.testing.assert_close(moe(x[:1]), moe(x)[:1], atol=1e-6, rtol=1e-5)
    everyone = Routing(torch.full((6, 1), 3), torch.ones(6, 1))
    e = moe.experts
    expected = swiglu(x, e.gate_proj[3], e.up_proj[3], e.down_proj[3])
    torch.testing.assert_close(e(x, everyone), expected, atol=1e-6, rtol=1e-5)


def test_permutation_is_stable_and_comes_back() -> None:
    experts = torch.tensor([[2, 0], [2, 1], [0, 2]])
    plan = permute_tokens(experts, 5)
    assert plan.order.tolist() == [1, 4, 3, 0, 2, 5]
    assert plan.counts.tolist() == [2, 1, 3, 0, 0]
    assert torch.equal(plan.order[plan.back], torch.arange(6))
    with pytest.raises(DSparkError, match=r"experts 0\.\.2, there are 2"):
        permute_tokens(experts, 2)


def test_gradients_reach_router_and_chosen_experts_only() -> None:
    moe = make_moe()
    x = torch.randn(1, 32)
    moe(x).square().sum().backward()
    chosen = set(moe.gate(x).experts.flatten().tolist())
    touched = {e for e in range(8) if moe.experts.gate_proj.grad[e].any()}
    assert touched == chosen
    assert moe.gate.weight.grad.abs().sum() > 0
    assert moe.gate.e_score_correction_bias.grad is None


def test_balancing_evens_the_loads() -> None:
    moe = make_moe().train()
    with torch.no_grad():
        moe.gate.e_score_correction_bias.zero_()
        moe.gate.weight[0] += 0.3  # with the inputs' mean of 1: expert 0 gets nearly every token
    generator = torch.Generator().manual_seed(5)
    peaks = []
    for _ in range(150):
        moe(torch.randn(256, 32, generator=generator) * 0.2 + 1)
        peaks += balance_experts(moe, 0.01)
    assert peaks[0] > 2.5
    assert sum(peaks[-20:]) / 20 < 1.5
    assert balance_experts(moe) == []  # nothing seen since
    with torch.no_grad():
        moe(torch.randn(4, 32))
    moe.eval()(torch.randn(4, 32))
    assert balance_experts(moe) == []  # nor is anything counted outside training


def naive_attention(q, k, v, ck, cv, visible: int, window: int | None) -> torch.Tensor:
    first = 0 if window is None else max(visible - window, 0)
    keys = torch.cat([ck[first:visible], k]).repeat_interleave(q.shape[1] // k.shape[1], 1)
    values = torch.cat([cv[first:visible], v]).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("ghd,thd->hgt", q, keys) * q.shape[-1] ** -0.5
    return torch.einsum("hgt,thd->ghd", scores.softmax(-1), values)


@pytest.mark.parametrize("window", [None, 1, 4, 128])
def test_window_hides_all_but_the_last_context_tokens(window: int | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 4, 8), torch.randn(2, 3, 4, 2, 8), torch.randn(2, 3, 4, 2, 8)
    ck, cv = torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    visible = torch.tensor([[0, 3, 9], [1, 5, 6]])
    out = block_attention(q, k, v, (ck, cv), visible, window=window)
    for s in range(2):
        for a in range(3):
            one = naive_attention(q[s, a], k[s, a], v[s, a], ck[s], cv[s], visible[s, a], window)
            torch.testing.assert_close(out[s, a], one, atol=1e-6, rtol=1e-5)
    layout = PackedLayout(
        torch.tensor([0, 9, 18]), torch.tensor([0] * 3 + [1] * 3), visible.view(6)
    )
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    context = (ck.flatten(0, 1), cv.flatten(0, 1))
    for padded in (True, False):
        packed = packed_attention(*flat, context, layout, window=window, padded=padded)
        torch.testing.assert_close(packed, out.flatten(0, 1), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_block_of_the_drafter_sees_its_window_and_itself() -> None:
    drafter = tiny_drafter(**EVERYTHING)
    positions, anchors = torch.tensor([[7]]), torch.tensor([[9]])

    def run(features: torch.Tensor) -> torch.Tensor:
        context = drafter.context_kv(features, torch.arange(9)[None])
        return drafter.forward_blocks(anchors, positions, context, positions)

    features = torch.randn(1, 9, 64)
    base = run(features)
    assert base.shape == (1, 1, 5, 32)
    for t in range(9):
        changed = features.clone()
        changed[:, t] += 5
        assert torch.equal(run(changed), base) == (t not in (4, 5, 6)), t


@torch.no_grad()
def test_packed_and_padded_blocks_agree() -> None:
    drafter = tiny_drafter(**EVERYTHING)
    features = torch.randn(11, 64)
    steps, positions = torch.arange(11), torch.tensor([2, 5, 9])
    context = drafter.context_kv(features, steps)
    layout = PackedLayout(torch.tensor([0, 11]), torch.zeros(3, dtype=torch.long), positions)
    packed = drafter.forward_blocks(torch.tensor([4, 5, 6]), positions, context, layout)
    wide = [(k[None], v[None]) for k, v in context]
    blocks = drafter.forward_blocks(
        torch.tensor([[4, 5, 6]]), positions[None], wide, positions[None]
    )
    torch.testing.assert_close(packed, blocks[0], atol=1e-5, rtol=1e-4)


def test_everything_trains() -> None:
    drafter = tiny_drafter(**EVERYTHING).train()
    features, positions = torch.randn(8, 6, 64), torch.full((8, 1), 5)
    anchors = torch.randint(61, (8, 1))
    labels = torch.randint(61, (8, 5))
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    for _ in range(25):
        context = drafter.context_kv(features, torch.arange(6).expand(8, 6))
        h = drafter.forward_blocks(anchors, positions, context, positions)
        loss = torch.nn.functional.cross_entropy(
            drafter.base_logits(h).flatten(0, 2), labels.flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        assert len(balance_experts(drafter)) == 2
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    untouched = [
        n for n, p in drafter.backbone.named_parameters() if p.requires_grad and p.grad is None
    ]
    assert untouched == []


@pytest.mark.parametrize("half", [False, True])
def test_the_trainers_learner_takes_it(tmp_path, half: bool) -> None:
    """Losses and gradients of packed blocks, as of a dense drafter; an export that loads again."""
    made = learner(**{**EVERYTHING, "gamma": 4})
    made.module.train()
    responses = sequences()
    batch = packed(responses, drawn(responses))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        parts = made.losses(batch)
    parts.total.backward()
    made.after_backward()
    for name, parameter in made.module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    assert all(1 <= peak <= 4 for peak in balance_experts(made.module))
    one = [made.losses(packed([r], [a])) for r, a in zip(responses, drawn(responses), strict=True)]
    whole = sum(float(p.total.detach() * p.weight) for p in one) / float(parts.weight)
    if not half:
        balanced = float(made.losses(batch).total.detach())
        assert balanced == pytest.approx(whole, abs=1e-5)
    made.export(tmp_path)
    head = made.module.head_weight
    again = load_drafter(tmp_path, made.module.embed_weight, head)
    assert again.config == made.module.config


@torch.no_grad()
def test_slots_of_the_engine_give_the_same_block() -> None:
    drafter = tiny_drafter(**EVERYTHING)
    features, p = torch.randn(1, 9, 64), torch.tensor([9])
    kept = FeatureContext(drafter.backbone, drafter.config, 2, 16)
    for first in range(0, 9, 3):
        kept.write(torch.tensor([1]), torch.tensor([first]), features[:, first : first + 3])
    context = kept.read(torch.tensor([1]), 9)
    h = drafter.forward_block(torch.tensor([5]), p, context, p)
    direct = drafter.context_kv(features, torch.arange(9)[None])
    expected = drafter.forward_blocks(torch.tensor([[5]]), p[None], direct, p[None])[:, 0]
    torch.testing.assert_close(h, expected, atol=1e-5, rtol=1e-4)
    assert drafter.draft(torch.tensor([5]), h).tokens.shape == (1, 5)


@pytest.mark.parametrize("changes", [EXPERTS, {"window": 128}, {"residual_streams": 4}, EVERYTHING])
@torch.no_grad()
def test_round_trip_is_bit_exact(tmp_path, changes) -> None:
    drafter = tiny_drafter(**changes)
    for name, parameter in drafter.named_parameters():
        if "e_score_correction_bias" in name:
            parameter.normal_()
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path, drafter.embed_weight, drafter.head_weight)
    assert again.config == drafter.config
    for (name, a), (_, b) in zip(drafter.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["DSparkMoEModel"]
    del raw["hc_mult"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DSparkError, match="'hc_mult' is missing"):
        DrafterConfig.from_dir(tmp_path)


@torch.no_grad()
def test_router_biases_are_kept_whole_in_a_half_precision_file(tmp_path) -> None:
    drafter = tiny_drafter(**EXPERTS)
    bias = drafter.backbone.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.linspace(0.5, 0.507, 8))
    save_drafter(drafter, tmp_path, torch.bfloat16)
    again = load_drafter(tmp_path, drafter.embed_weight, drafter.head_weight)
    assert torch.equal(again.backbone.layers[1].mlp.gate.e_score_correction_bias, bias)


def test_dense_drafters_are_as_they_were(tmp_path) -> None:
    """Neither their names, nor their config.json, nor a foreign `sliding_window` in it."""
    drafter = tiny_drafter()
    assert not any("residual" in n or "stream" in n for n in drafter.state_dict())
    raw = drafter.config.to_json()
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert "sliding_window" not in raw
    assert DrafterConfig.from_json({**raw, "sliding_window": 4096}, tmp_path) == drafter.config


def test_deepspec_has_no_experts(tmp_path) -> None:
    with pytest.raises(DSparkError, match="dense drafters"):
        save_deepspec(tiny_drafter(**EXPERTS), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**EXPERTS, "experts_per_token": 9}, "experts_per_token 9"),
        ({**EXPERTS, "experts_per_token": 0}, "experts_per_token 0"),
        ({**EXPERTS, "moe_intermediate_size": 0}, "moe_intermediate_size 0"),
        ({**EXPERTS, "router_scores": "relu"}, "relu"),
        ({"window": 0}, "window 0"),
        ({"residual_streams": 0}, "residual_streams"),
        ({**EXPERTS, "family": "gemma4"}, "gemma4 layers have no experts"),
    ],
)
def test_config_is_validated(change, message) -> None:
    with pytest.raises(DSparkError, match=message):
        tiny_config(**change)
