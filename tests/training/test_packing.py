"""Packing is exact: the same losses and gradients as block by block, and nothing leaks."""

import dataclasses

import pytest
import torch

from sglang_dspark.drafter.attention import PackedLayout, block_attention, packed_attention
from sglang_dspark.families.learning.losses import position_weights
from sglang_dspark.training.packing import anchor_positions
from tests.training.helpers import drawn, learner, packed, sequences

GAMMA = 4


def _parts_and_gradients(made, batch):
    made.module.zero_grad()
    parts = made.losses(batch)
    (parts.total * parts.weight).backward()
    return parts, {n: p.grad.clone() for n, p in made.module.named_parameters()}


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("reduced", [False, True])
def test_packed_equals_one_block_at_a_time(head, reduced):
    vocabulary = torch.arange(2, 50, 3) if reduced else None
    made = learner(vocabulary, markov_head_type=head, num_layers=2)
    responses = sequences()
    anchors = drawn(responses)
    together, gradients = _parts_and_gradients(made, packed(responses, anchors))
    loss, weight, summed = 0.0, 0.0, None
    for r, places in zip(responses, anchors, strict=True):
        for p in places:
            part, g = _parts_and_gradients(made, packed([r], [p[None]]))
            loss += float(part.total * part.weight)
            weight += float(part.weight)
            summed = g if summed is None else {n: summed[n] + g[n] for n in g}
    assert float(together.total) == pytest.approx(loss / weight, abs=1e-5)
    assert float(together.weight) == pytest.approx(weight, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, summed[name], atol=1e-5, rtol=1e-4)


def test_a_block_does_not_see_other_blocks_or_what_comes_behind_its_anchor():
    """Change everything hidden from one block: its outputs stay. Change what it sees: they move."""
    made = learner(num_layers=2)
    responses = sequences()
    anchors = [torch.tensor([8, 15]), torch.tensor([4, 6]), torch.tensor([7, 22])]
    batch = packed(responses, anchors)
    block, p, s = 3, 6, 1  # the second block of the second sequence

    def accept(b):
        with torch.no_grad():
            return made.losses(b).accept.view(-1, GAMMA)[block]

    before = accept(batch)
    mine = torch.arange(len(batch.tokens)) - int(batch.starts[s])
    seen = (mine >= 0) & (mine < p)
    hidden = dataclasses.replace(
        batch,
        features=torch.where(seen[:, None], batch.features, torch.randn_like(batch.features)),
        tokens=torch.where(seen, batch.tokens, 0),
    )
    others = torch.arange(len(batch.anchors)) != block
    hidden = dataclasses.replace(
        hidden,
        anchors=torch.where(others, 1, batch.anchors),
        inputs=torch.where(others[:, None], 1, batch.inputs),
        labels=torch.where(others[:, None], 1, batch.labels),
        hidden=torch.where(others[:, None, None], 0.0, batch.hidden),
    )
    assert torch.equal(accept(hidden), before)
    for place in range(p):
        changed = batch.features.clone()
        changed[int(batch.starts[s]) + place] += 1.0
        assert not torch.equal(accept(dataclasses.replace(batch, features=changed)), before)
    own = batch.anchors.clone()
    own[block] = (own[block] + 1) % 61
    assert not torch.equal(accept(dataclasses.replace(batch, anchors=own)), before)


def test_fields_are_what_they_say():
    responses = sequences()
    anchors = drawn(responses, count=5)
    b = packed(responses, anchors)
    assert b.gamma == GAMMA
    assert torch.equal(b.sequence, torch.repeat_interleave(torch.arange(3), 5))
    for i, (s, p) in enumerate(zip(b.sequence.tolist(), b.positions.tolist(), strict=True)):
        r = responses[s]
        end = next(e for a, e in r.answers if a <= p < e)
        assert b.anchors[i] == r.tokens[p]
        for k in range(1, GAMMA + 1):
            assert bool(b.valid[i, k - 1]) == (p + k < end)
            if p + k < end:
                assert b.inputs[i, k - 1] == r.tokens[p + k - 1]
                assert b.labels[i, k - 1] == r.tokens[p + k]
                assert torch.equal(b.hidden[i, k - 1], r.hidden[p + k - 1])
                assert b.log_partition[i, k - 1] == r.log_partition[p + k - 1]
    for s, r in enumerate(responses):
        rows = slice(int(b.starts[s]), int(b.starts[s + 1]))
        n = rows.stop - rows.start
        assert n == int(anchors[s].max()) + 1  # nothing behind the last anchor
        assert torch.equal(b.features[rows], r.features[:n])
        assert torch.equal(b.last_hidden[rows], r.hidden[:n])
        assert torch.equal(b.context_positions[rows], torch.arange(n))
    parts = learner().losses(b)
    assert float(parts.weight) == pytest.approx(float((position_weights(4, None) * b.valid).sum()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("own", [3, 5])
def test_packed_attention_equals_the_plain_one(causal, own):
    torch.manual_seed(0)
    lengths, counts, g = [7, 1, 12], [2, 1, 3], 3
    layout = PackedLayout(
        torch.tensor([0, *lengths]).cumsum(0),
        torch.repeat_interleave(torch.arange(3), torch.tensor(counts)),
        torch.tensor([7, 2, 1, 12, 1, 5]),
    )
    p, n = sum(counts), sum(lengths)
    q, k, v = torch.randn(p, g, 4, 8), torch.randn(p, own, 2, 8), torch.randn(p, own, 2, 8)
    ck, cv = torch.randn(n, 2, 8), torch.randn(n, 2, 8)
    sliced = packed_attention(q, k, v, (ck, cv), layout, causal=causal, padded=False)
    padded = packed_attention(q, k, v, (ck, cv), layout, causal=causal, padded=True)
    for i in range(p):
        s = int(layout.sequence[i])
        seen = slice(int(layout.starts[s]), int(layout.starts[s]) + int(layout.positions[i]))
        keys = torch.cat([ck[seen], k[i]]).repeat_interleave(2, 1).transpose(0, 1)
        values = torch.cat([cv[seen], v[i]]).repeat_interleave(2, 1).transpose(0, 1)
        scores = q[i].transpose(0, 1) @ keys.transpose(1, 2) / 8**0.5  # [Hq, g, T]
        if causal:
            reach = scores.shape[-1] - g + 1
            scores = scores.masked_fill(torch.ones_like(scores).triu(reach) > 0, float("-inf"))
        expected = (scores.softmax(-1) @ values).transpose(0, 1)
        torch.testing.assert_close(sliced[i], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(padded[i], expected, atol=1e-5, rtol=1e-5)
    one = block_attention(q[None], k[None], v[None], (ck[None], cv[None]), torch.full((1, p), n))
    assert one.shape == (1, p, g, 4, 8)


def test_anchors_lie_in_answers_and_repeat_only_when_they_must():
    g = torch.Generator().manual_seed(3)
    spans = ((4, 9), (12, 14), (20, 21))
    allowed = {4, 5, 6, 7, 12}
    picked = anchor_positions(spans, 5, g).tolist()
    assert set(picked) == allowed
    assert set(anchor_positions(spans, 11, g).tolist()) == allowed
    with pytest.raises(ValueError, match="two tokens"):
        anchor_positions(((3, 4),), 2, g)


def test_every_sequence_has_anchors_of_its_own():
    responses = sequences()
    with pytest.raises(ValueError, match="shorter"):
        packed(responses, drawn(responses)[:-1])
