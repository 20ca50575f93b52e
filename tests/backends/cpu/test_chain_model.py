"""Chain drafters in the formats of served weights, against the same numbers in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import attach, csrc, linear
from sglang_dspark.backends.cpu.weight_formats import (
    BFLOAT16,
    FLOAT32,
    FORMATS,
    WeightFormat,
    dense,
    format_of,
    pack,
)
from sglang_dspark.families.chain.model import ChainDrafter
from sglang_dspark.families.chain.served import EAGLE3, MTP
from sglang_dspark.families.eagle3.checkpoint import eagle3_of, eagle3_tensors
from sglang_dspark.families.mtp.checkpoint import mtp_of, mtp_tensors
from sglang_dspark.serving import config
from tests.families.helpers import WIDTH, random_drafter

pytest.importorskip("sglang")

from sglang_dspark.backends.cpu.chain_model import ChainModel

pytestmark = pytest.mark.skipif(csrc.why_not() is not None, reason="no fused multiply-add")

VOCAB = 128
IDS = torch.arange(0, VOCAB, 4)  # 32 tokens: two panels
NAMES = {"eagle3": EAGLE3, "mtp": MTP}
TENSORS: dict[str, Any] = {"eagle3": eagle3_tensors, "mtp": mtp_tensors}
MADE: dict[str, Any] = {"eagle3": eagle3_of, "mtp": mtp_of}


@pytest.fixture(params=["auto", "float32", "bfloat16", "int8"])
def weights(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """`cpu.weights`, with rows that keep float32 or, for int8, sixteen bits."""
    file = tmp_path / "dspark.json"
    file.write_text(json.dumps({"cpu": {"weights": request.param, "activations": "wide"}}))
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(file))
    linear.prepare_for.cache_clear()
    yield str(request.param)
    linear.prepare_for.cache_clear()


def attached(kind: str, ids: Tensor | None, form: WeightFormat) -> tuple[ChainModel, nn.Module]:
    """A drafter of bfloat16 numbers, and its target's tied embedding in a format."""
    drafter = random_drafter(kind, VOCAB, ids).bfloat16().float()
    raw = drafter.config.to_json()
    name = NAMES[kind]
    model = ChainModel(SimpleNamespace(architectures=[name], to_dict=lambda: raw))
    model.load_weights(TENSORS[kind](drafter).items())
    torch.manual_seed(3)
    target = nn.Embedding(VOCAB, WIDTH)
    target.weight = nn.Parameter(pack(target.weight, form), requires_grad=False)
    model.attach_shared_modules(embed_tokens=target, lm_head=target)
    return model, target


def drafted(drafter: ChainDrafter) -> list[Tensor]:
    """Logits [3, V'] of three drafts, each of a fixed token and of no context."""
    torch.manual_seed(4)
    states, tokens = torch.randn(3, drafter.state_width), torch.randint(VOCAB, (4, 3))

    def attend(query: Tensor, _: Tensor, values: Tensor) -> Tensor:
        share = query.shape[2] // values.shape[2]
        return values.mean(1, keepdim=True).repeat_interleave(share, 2)

    with torch.inference_mode():
        steps = drafter.unroll(states, torch.arange(3), lambda k: tokens[k], attend)
        return [drafter.logits(out) for out in islice(steps, 3)]


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_logits_are_those_of_the_same_numbers(kind: str, ids: Tensor | None, weights: str) -> None:
    """The target's embedding and head in the configured format, its own layers in theirs."""
    form = FLOAT32 if weights == "auto" else linear.served(FORMATS[weights])
    model, target = attached(kind, ids, form)
    served: Any = model.drafter
    tensors = {
        name: dense(each) if format_of(each) else each
        for name, each in TENSORS[kind](served).items()
    }
    reference: Any = MADE[kind](model.config, tensors)
    embedding = dense(target.weight)  # type: ignore[arg-type]
    reference.attach(embedding, embedding)
    if kind == "mtp":
        reference.head_weight = dense(served.head_weight)
    for found, expected in zip(drafted(served), drafted(reference), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_layers_are_stored_as_configured(kind: str, weights: str) -> None:
    model, _ = attached(kind, IDS, FLOAT32)
    wanted = BFLOAT16 if weights == "auto" else linear.served(FORMATS[weights])
    drafter: Any = model.drafter
    assert format_of(drafter.self_attn.q_proj.weight) is wanted
    if kind == "eagle3":
        assert format_of(drafter.lm_head.weight) is wanted
    else:
        assert format_of(drafter.head_weight) is BFLOAT16
    assert f"{wanted.name} x" in attach._backend(nn.Module(), model).rsplit("/", 1)[1]


def test_a_part_of_the_weights_is_exchanged(weights: str) -> None:
    """The other weights keep their numbers, however often they are packed."""
    model, _ = attached("eagle3", IDS, FLOAT32)
    drafter: Any = model.drafter
    before = dense(drafter.mlp.up_proj.weight).clone()
    gate = torch.full_like(dense(drafter.mlp.gate_proj.weight), 0.5)
    model.load_weights([("midlayer.mlp.gate_proj.weight", gate)])
    after: Any = model.drafter
    assert torch.equal(dense(after.mlp.up_proj.weight), before)
    assert torch.equal(dense(after.mlp.gate_proj.weight), gate)
