"""Sequences with random states, and learners of small drafters, for the tests of training."""

import torch

from sglang_dspark.drafter.heads import restrict_vocabulary
from sglang_dspark.families.dspark.learner import DSparkLearner
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.learning.target_head import TargetHead
from sglang_dspark.training.packing import anchor_positions, pack
from sglang_dspark.training.store import Response
from tests.drafter.helpers import tiny_config, tiny_drafter

VOCABULARY, WIDTH = tiny_config().vocab_size, tiny_config().hidden_size


def response(n, prompt_len, seed, turns=()):
    g = torch.Generator().manual_seed(seed)
    return Response(
        f"r{seed}",
        "chat",
        0.0,
        prompt_len,
        torch.randint(VOCABULARY, (n,), generator=g),
        torch.randn(n, 2 * WIDTH, generator=g),
        torch.randn(n, WIDTH, generator=g),
        6 + torch.rand(n, generator=g),
        turns,
    )


def sequences():
    """Three of different lengths; the last is a conversation with two answers."""
    return [response(23, 5, 1), response(9, 4, 2), response(31, 6, 3, ((6, 15), (20, 31)))]


def drawn(responses, count=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [anchor_positions(r.answers, count, g) for r in responses]


def packed(responses, anchors, gamma=4):
    return pack(responses, anchors, gamma)


def learner(vocabulary=None, **changes):
    """A DSpark learner in float32 without mixed products."""
    drafter = tiny_drafter(**changes)
    embed, head = drafter.embed_weight, drafter.head_weight
    if vocabulary is not None:
        restrict_vocabulary(drafter.markov_head, vocabulary)
        drafter.attach(embed, head)
    return DSparkLearner(drafter, TargetHead(head, vocabulary, half=False), ObjectiveConfig())
