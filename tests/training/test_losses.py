import pytest
import torch

from sglang_dspark.families.learning.losses import dspark_loss, position_weights
from sglang_dspark.families.learning.objective import ObjectiveConfig

VOCABULARY, CHOSEN = 23, torch.tensor([0, 2, 3, 5, 8, 9, 11, 14, 15, 17, 20, 22])


def _naive(logits, distribution, token, confidence, weight, o):
    """The paper's eqs. 8-12 over the target's whole vocabulary: logits [N, V'] over the tokens
    CHOSEN, distribution [N, V] of the target, token [N]; other tokens' draft probability is 0."""
    weight = weight / weight.sum()
    draft = torch.zeros_like(distribution).index_copy(1, CHOSEN, logits.softmax(-1))
    l_tv = (distribution - draft).abs().sum(-1)
    chance = draft.gather(-1, token[:, None])[:, 0]
    possible = chance > 0
    l_ce = -torch.where(possible, chance, 1.0).log()  # a token outside teaches nothing
    if o.soft_labels:
        l_ce = -(distribution[:, CHOSEN] * logits.log_softmax(-1)).sum(-1)
    c = torch.sigmoid(confidence)
    accept = torch.minimum(distribution, draft).sum(-1).detach()
    bce = -(accept * c.log() + (1 - accept) * (1 - c).log())
    return (weight * (o.ce * l_ce + o.tv * l_tv + o.confidence * bce)).sum(), accept


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("weights", [(0.3, 0.9, 1.1), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)])
def test_fused_loss_and_gradient_equal_the_papers(seed, weights, soft):
    torch.manual_seed(seed)
    n = 71
    logits = torch.randn(n, len(CHOSEN), requires_grad=True)
    target = torch.randn(n, VOCABULARY)
    token = torch.randint(VOCABULARY, (n,))
    column = torch.full((VOCABULARY,), -1).index_copy(0, CHOSEN, torch.arange(len(CHOSEN)))
    confidence = torch.randn(n, requires_grad=True)
    weight = torch.rand(n) * (torch.rand(n) > 0.2)
    ce, tv, conf = weights
    objective = ObjectiveConfig(ce=ce, tv=tv, confidence=conf, soft_labels=soft)
    parts = dspark_loss(
        logits,
        target[:, CHOSEN],
        target.logsumexp(-1),
        column[token],
        confidence,
        weight,
        objective,
    )
    parts.total.backward()
    got = logits.grad.clone(), confidence.grad.clone()
    logits.grad = confidence.grad = None
    expected, accept = _naive(logits, target.softmax(-1), token, confidence, weight, objective)
    expected.backward()
    torch.testing.assert_close(parts.total, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(parts.accept, accept, atol=1e-6, rtol=1e-5)
    weighed = parts.terms @ torch.tensor(weights)
    torch.testing.assert_close(weighed, parts.total.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got[0], logits.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(got[1], confidence.grad, atol=1e-7, rtol=1e-4)


def test_drafts_that_never_meet_the_target_lose_two():
    """L_tv = sum |p_t - p_d| of disjoint distributions is 2 (eq. 10).

    The target's mass may be inside the draft vocabulary or outside of it.
    """
    sure, row = torch.tensor([[30.0, -30.0]]), torch.ones(1)
    objective = ObjectiveConfig(ce=0.0, tv=0.9)
    for target, log_partition in (
        (torch.tensor([[-30.0, 30.0]]), torch.tensor([30.0])),
        (torch.tensor([[-30.0, -30.0]]), torch.tensor([30.0])),
    ):
        parts = dspark_loss(sure, target, log_partition, torch.tensor([-1]), None, row, objective)
        assert float(parts.total) == pytest.approx(0.9 * 2)
        assert float(parts.accept) == pytest.approx(0, abs=1e-6)


def test_position_weights_are_the_papers():
    for weights in (position_weights(5, None), position_weights(7, 5.0)):
        assert weights[0] == 1
        ratios = weights[1:] / weights[:-1]
        torch.testing.assert_close(ratios, torch.full_like(ratios, 0.8187307), atol=1e-6, rtol=1e-6)
