import zlib

import pytest
import torch

from sglang_dspark.drafter.heads import restrict_vocabulary, restricted_tokens
from sglang_dspark.drafter.weight_files import read_tensors
from sglang_dspark.models.drafters import shipped_drafter_path
from tests.drafter.helpers import tiny_drafter


def _naive_block(drafter, anchor, p, features):
    """h [gamma, d] of one block by one dense softmax over [context; block], the textbook way."""
    c = drafter.config
    ids = torch.tensor([anchor] + [c.mask_token_id] * (c.gamma - 1))
    x = drafter.embed_weight[ids]
    positions = torch.arange(p, p + c.gamma)
    context = drafter.context_kv(features[:p], torch.arange(p))
    for layer, (ck, cv) in zip(drafter.backbone.layers, context, strict=True):
        a = layer.self_attn
        y = layer.input_layernorm(x)
        k, v = a.keys_values(y, positions)
        k, v = torch.cat([ck, k]), torch.cat([cv, v])
        from sglang_dspark.drafter.attention import rope

        q = rope(
            a.q_norm(a.q_proj(y).view(c.gamma, c.num_heads, c.head_dim)), positions, c.rope_theta
        )
        outs = []
        for head in range(c.num_heads):
            group = head // (c.num_heads // c.num_kv_heads)
            score = q[:, head] @ k[:, group].T / c.head_dim**0.5
            outs.append(score.softmax(-1) @ v[:, group])
        x = x + a.o_proj(torch.cat(outs, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return drafter.backbone.norm(x)


@torch.no_grad()
def test_many_blocks_equal_one_by_one_and_naive():
    drafter = tiny_drafter()
    c = drafter.config
    features = torch.randn(2, 11, 2 * c.hidden_size)
    anchors = torch.randint(c.vocab_size, (2, 5))
    positions = torch.tensor([[1, 3, 3, 9, 10], [2, 4, 5, 7, 8]])
    steps = torch.arange(11).expand(2, 11)
    context = drafter.context_kv(features, steps)
    h = drafter.forward_blocks(anchors, positions, context, positions)
    for s in range(2):
        for a in range(5):
            p = int(positions[s, a])
            expected = _naive_block(drafter, int(anchors[s, a]), p, features[s])
            torch.testing.assert_close(h[s, a], expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_block_does_not_see_its_own_future_context():
    drafter = tiny_drafter()
    features = torch.randn(1, 9, 64)
    positions = torch.tensor([[4]])
    anchors = torch.tensor([[7]])

    def run(f):
        context = drafter.context_kv(f, torch.arange(9)[None])
        return drafter.forward_blocks(anchors, positions, context, positions)

    changed = features.clone()
    changed[:, 4:] += 5.0
    assert torch.equal(run(features), run(changed))
    changed = features.clone()
    changed[:, 3] += 5.0
    assert not torch.allclose(run(features), run(changed))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_each_position_sees_the_token_before_it(head):
    drafter = tiny_drafter(markov_head_type=head)
    h = torch.randn(3, 4, 32)
    block = drafter.draft(torch.tensor([1, 2, 3]), h)
    previous = torch.tensor([1, 2, 3])
    state = drafter.markov_head.start(3)
    for k in range(4):
        embedded = drafter.markov_head.embed(previous)
        latent, state = drafter.markov_head.latent(embedded, h[:, k], state)
        logits = h[:, k] @ drafter.head_weight.T + latent @ drafter.markov_head.markov_w2.weight.T
        assert torch.equal(logits.argmax(-1), block.tokens[:, k])
        previous = block.tokens[:, k]
    assert block.confidence.shape == (3, 4)
    assert ((block.confidence > 0) & (block.confidence < 1)).all()


@torch.no_grad()
def test_confidence_does_not_depend_on_the_token_it_judges():
    drafter = tiny_drafter()
    h = torch.randn(1, 4, 32)
    embedded = drafter.markov_head.embed(torch.tensor([[5, 6, 7, 8]]))
    changed = drafter.markov_head.embed(torch.tensor([[5, 6, 7, 30]]))
    a, b = drafter.confidence(h, embedded), drafter.confidence(h, changed)
    assert torch.equal(a[:, :3], b[:, :3])
    assert not torch.equal(a[:, 3], b[:, 3])  # x_3 is the input of position 4, so it may matter


@torch.no_grad()
def test_sampled_probabilities_are_exact():
    drafter = tiny_drafter()
    h = torch.randn(2, 4, 32)
    temperature = torch.tensor([0.7, 0.0])
    generator = torch.Generator().manual_seed(1)
    block = drafter.draft(torch.tensor([4, 5]), h, temperature, generator)
    previous = torch.cat([torch.tensor([[4], [5]]), block.tokens[:, :-1]], 1)
    logits = h @ drafter.head_weight.T
    logits = logits + drafter.markov_head.markov_w2(drafter.markov_head.embed(previous))
    torch.testing.assert_close(block.probs[0], (logits[0] / 0.7).softmax(-1), atol=1e-5, rtol=1e-4)
    assert torch.equal(block.probs[1].argmax(-1), logits[1].argmax(-1))
    assert torch.equal(block.probs[1].sum(-1), torch.ones(4))


@torch.no_grad()
def test_sampled_tokens_follow_their_probabilities():
    drafter = tiny_drafter(vocab_size=7)
    n = 20000
    h = torch.randn(1, 4, 32).expand(n, 4, 32)
    generator = torch.Generator().manual_seed(2)
    block = drafter.draft(torch.full((n,), 2), h, torch.ones(n), generator)
    counts = torch.bincount(block.tokens[:, 0], minlength=7).float()
    expected = block.probs[0, 0] * n
    chi2 = ((counts - expected) ** 2 / expected.clamp(min=1e-3)).sum()
    assert chi2 < 33.0  # 6 degrees of freedom, p about 1e-5


@torch.no_grad()
def test_reduced_vocabulary_is_part_of_the_weights():
    full = tiny_drafter()
    reduced = tiny_drafter()
    allowed = torch.tensor([2, 5, 9, 20, 33, 60])
    restrict_vocabulary(reduced.markov_head, allowed)
    full.markov_head.load_state_dict(reduced.markov_head.state_dict())
    head = torch.randn(61, 32)
    full.attach(full.embed_weight, head)
    full.draft_ids, full.head_weight = None, head  # the way a server without our shortcut computes
    reduced.attach(full.embed_weight, head)
    assert torch.equal(reduced.draft_ids, allowed)
    h = torch.randn(5, 4, 32) * 0.3
    anchor = torch.arange(5)
    a, b = full.draft(anchor, h), reduced.draft(anchor, h)
    assert torch.equal(a.tokens, b.tokens)
    assert set(b.tokens.flatten().tolist()) <= set(allowed.tolist())
    temperature = torch.ones(5)
    pa = full.draft(anchor, h, temperature, torch.Generator().manual_seed(0)).probs[:, 0]
    pb = reduced.draft(anchor, h, temperature, torch.Generator().manual_seed(0)).probs[:, 0]
    torch.testing.assert_close(pa, pb, atol=1e-6, rtol=1e-4)
    assert pb.sum(-1).allclose(torch.ones(5))


@torch.no_grad()
def test_rows_outside_a_reduced_vocabulary_are_zero_and_never_read():
    drafter = tiny_drafter()
    allowed = torch.tensor([2, 5, 9, 20, 33, 60])
    before = drafter.markov_head.markov_w2.weight.clone()
    restrict_vocabulary(drafter.markov_head, allowed)
    weight = drafter.markov_head.markov_w2.weight
    outside = torch.ones(61, dtype=torch.bool).index_fill(0, allowed, False)
    assert not weight[outside, :-1].any()
    assert torch.equal(weight[allowed, :-1], before[allowed, :-1])

    head, h, anchor = drafter.head_weight, torch.randn(5, 4, 32) * 0.3, torch.arange(5)
    blocks = []
    for content in (0.0, 7.0):
        weight[outside, :-1] = content * torch.randn(int(outside.sum()), weight.shape[1] - 1)
        drafter.attach(drafter.embed_weight, head)
        blocks.append(drafter.draft(anchor, h, torch.ones(5), torch.Generator().manual_seed(0)))
    assert torch.equal(blocks[0].tokens, blocks[1].tokens)
    assert torch.equal(blocks[0].probs, blocks[1].probs)
    assert torch.equal(blocks[0].confidence, blocks[1].confidence)


@pytest.mark.parametrize(
    "name", ["smollm2-135m-dspark", "smollm2-135m-moe", "smollm2-135m-moe-mxfp4"]
)
def test_rows_that_shipped_drafters_never_read_compress(name):
    tensors = read_tensors(shipped_drafter_path(name))
    w1, w2 = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    inside = restricted_tokens(w1, w2)
    stored = w2.view(torch.uint8).numpy().tobytes()
    share = len(inside) / len(w2)
    assert share < 0.2
    assert len(zlib.compress(stored)) < share * len(stored)


def test_changed_weights_change_the_draft_of_a_reduced_vocabulary():
    drafter = tiny_drafter(markov_rank=8)
    restrict_vocabulary(drafter.markov_head, torch.arange(5, 25))
    drafter.attach(drafter.embed_weight, torch.randn(61, 32))
    anchor, h = torch.arange(6), 0.01 * torch.randn(6, 4, 32)
    with torch.no_grad():
        before = drafter.draft(anchor, h, torch.ones(6)).probs
        drafter.markov_head.markov_w2.weight[7, :-1] += (
            20 * drafter.markov_head.markov_w1.weight[anchor[0], :-1]
        )
        after = drafter.draft(anchor, h, torch.ones(6)).probs
    assert before[0, 0, 7] < 0.9 < after[0, 0, 7]


def test_attach_refuses_another_target():
    drafter = tiny_drafter()
    with pytest.raises(ValueError, match="embedding"):
        drafter.attach(torch.zeros(60, 32), torch.zeros(61, 32))
