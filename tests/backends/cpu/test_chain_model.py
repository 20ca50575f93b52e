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

from sglang_dspark.backends.cpu import csrc, linear, packed_weights
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

from sglang_dspark.backends.cpu.chain_draft import ChainModel

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
    linear.prepare.cache_clear()
    yield str(request.param)
    linear.prepare.cache_clear()


def attached(
    kind: str, ids: Tensor | None, form: WeightFormat, vocab: int = VOCAB
) -> tuple[ChainModel, nn.Module]:
    """A drafter of bfloat16 numbers, and its target's tied embedding in a format, padded."""
    drafter = random_drafter(kind, vocab, ids).bfloat16().float()
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


@pytest.mark.parametrize("vocab", [VOCAB, 125])
@pytest.mark.parametrize("ids", [None, IDS, IDS[:5]], ids=["all", "reduced", "odd"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_logits_are_those_of_the_same_numbers(
    kind: str, ids: Tensor | None, vocab: int, weights: str
) -> None:
    """The target's embedding and head in the configured format, its own layers in theirs."""
    form = FLOAT32 if weights == "auto" else linear.served(FORMATS[weights])
    model, target = attached(kind, ids, form, vocab)
    served: Any = model.drafter
    tensors = {
        name: dense(each) if format_of(each) else each
        for name, each in TENSORS[kind](served).items()
    }
    reference: Any = MADE[kind](model.config, tensors)
    embedding = dense(target.weight)[:vocab]  # type: ignore[arg-type]
    rounded = form is FLOAT32 and ids is not None and len(ids) % 16 == 0
    reference.attach(embedding, embedding.bfloat16().float() if rounded else embedding)
    tokens, states = torch.arange(300) % vocab, torch.randn(300, served.state_width)
    with torch.inference_mode():
        pairs = zip(
            served.context_kv(tokens, states, torch.arange(300)),
            reference.context_kv(tokens, states, torch.arange(300)),
            strict=True,
        )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
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
    assert packed_weights.form_in(model) is wanted  # which names it in the key of step times


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(("count", "width"), [(32, 64), (60, 64), (32, 48)])
def test_rows_of_a_head(
    count: int, width: int, kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied in bfloat16 where our kernel reads them so, else as they are."""
    file = tmp_path / "dspark.json"
    file.write_text(json.dumps({"cpu": {"matrix_kernel": kernel}}))
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(file))
    linear.prepare.cache_clear()
    head, ids = torch.randn(VOCAB, width), torch.randperm(VOCAB)[:count].sort().values
    rows = packed_weights.take_draft_rows(head, ids)
    linear.prepare.cache_clear()
    packed = kernel and count % 16 == 0 and width % 32 == 0
    assert rows.dtype is (torch.bfloat16 if packed else torch.float32)
    assert torch.equal(rows.float(), head[ids].bfloat16().float() if packed else head[ids])


def test_one_layer_of_other_numbers_keeps_all_in_float32() -> None:
    drafter: Any = random_drafter("mtp", VOCAB).bfloat16().float()
    drafter.mlp.down_proj.weight.data[0, 0] = 0.1
    raw = drafter.config.to_json()
    model = ChainModel(SimpleNamespace(architectures=[MTP], to_dict=lambda: raw))
    model.load_weights(mtp_tensors(drafter).items())
    served: Any = model.drafter
    assert format_of(served.self_attn.q_proj.weight) is FLOAT32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_that_our_kernel_does_not_read(dtype: torch.dtype) -> None:
    """Of a server that computes in another type."""
    model, _ = attached("mtp", IDS[:5], FLOAT32)
    target = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
    model.attach_shared_modules(embed_tokens=target, lm_head=target)
    served: Any = model.drafter
    x = torch.randn(3, WIDTH)
    expected = (x.to(dtype) @ target.weight[IDS[:5]].T).float()
    with torch.inference_mode():
        torch.testing.assert_close(served.logits(x), expected, rtol=0.02, atol=0.05)


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
