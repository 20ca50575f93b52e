import pytest
import torch

from sglang_dspark.training.config import ObjectiveConfig
from sglang_dspark.training.losses import dspark_loss, position_weights


def _naive(logits, law, label, confidence, weight, o):
    weight = weight / weight.sum()
    draft = logits.softmax(-1)
    outside = 1 - law.sum(-1)  # target mass where the draft cannot go
    tv = 0.5 * ((draft - law).abs().sum(-1) + outside)
    inside = label >= 0
    nll = -draft.log().gather(-1, label.clamp(min=0)[:, None])[:, 0]
    nll = torch.where(inside, nll, 0.0)
    c = torch.sigmoid(confidence)
    accept = (1 - tv).detach()
    bce = -(accept * c.log() + (1 - accept) * (1 - c).log())
    return (weight * (o.ce * nll + o.tv * tv + o.confidence * bce)).sum(), accept


@pytest.mark.parametrize("seed", range(4))
def test_fused_loss_and_gradient_equal_the_naive_ones(seed):
    torch.manual_seed(seed)
    n, v = 71, 17
    logits = torch.randn(n, v, dtype=torch.float32, requires_grad=True)
    target = torch.randn(n, v)
    log_partition = target.logsumexp(-1) + torch.rand(n)  # some mass is outside the vocabulary
    law = (target - log_partition[:, None]).exp()
    label = torch.randint(-1, v, (n,))
    confidence = torch.randn(n, requires_grad=True)
    weight = torch.rand(n) * (torch.rand(n) > 0.2)
    objective = ObjectiveConfig(ce=0.3, tv=0.9, confidence=1.1)
    parts = dspark_loss(logits, target, log_partition, label, confidence, weight, objective)
    parts.total.backward()
    got = logits.grad.clone(), confidence.grad.clone()
    logits.grad = confidence.grad = None
    expected, accept = _naive(logits, law, label, confidence, weight, objective)
    expected.backward()
    torch.testing.assert_close(parts.total, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(parts.accept, accept, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got[0], logits.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(got[1], confidence.grad, atol=1e-7, rtol=1e-4)


def test_position_weights_are_the_papers():
    w = position_weights(5)
    assert w[0] == 1
    torch.testing.assert_close(w[1:] / w[:-1], torch.full((4,), 0.8187307), atol=1e-6, rtol=1e-6)
