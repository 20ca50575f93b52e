"""Our kernels through the backends' signature, in Triton's interpreter, all formats; prints how
many agreed with the torch reference on the same restored weights, with all experts here and with
some on another rank. Run by test_dispatch.py."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from sglang_dspark.experts.backends import BACKENDS, ExpertWeights, held_pairs
from sglang_dspark.experts.coded import CodedShared
from sglang_dspark.experts.gpu_backends import prepare_triton
from sglang_dspark.quantisation.formats import FORMATS, quantise
from tests.kernels.interpreter import patch_language_once


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = found.double(), expected.double()
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def main() -> None:
    agreed = 0
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 128, 96), (4, 128, 96), (4, 96, 128))
    values = [torch.randn(shape, generator=generator) / 8 for shape in shapes]
    x = torch.randn(9, 96, generator=generator)
    ids = torch.rand(9, 4, generator=generator).argsort(-1)[:, :2].contiguous()
    own = torch.rand(9, 2, generator=generator)
    for name in FORMATS:
        gate, up, down = (quantise(value, name) for value in values)
        weights = ExpertWeights(name, codes=(gate, up, down))
        reference = held_pairs(BACKENDS["torch"].prepare(weights))
        for rows_in_fp8 in (False, True)[: 1 if name == "bf16" else 2]:
            call = prepare_triton(weights, rows_in_fp8)
            for here in (ids, ids.masked_fill(ids > 1, -1)):
                found, expected = call(x, here, own), reference(x.bfloat16().float(), here, own)
                assert found.dtype == x.dtype
                limit = 2e-3 if rows_in_fp8 else 1e-4
                assert difference(found, expected) < limit, (name, rows_in_fp8)
            agreed += 1
    print(agreed + shared_experts(generator), "agree")


def shared_experts(generator: torch.Generator) -> int:
    """Shared experts by codes, gate and up being halves of one tensor, in every format of codes."""
    for name in (form for form in FORMATS if form != "bf16"):
        module, x = CodedShared(name, 96, 128), torch.randn(7, 96, generator=generator)
        for part, shape in (
            (module.gate_proj, (128, 96)),
            (module.up_proj, (128, 96)),
            (module.down_proj, (96, 128)),
        ):
            made = quantise(torch.randn(shape, generator=generator) / 8, name)
            own = (made.payload, made.scales, made.global_scale)
            for buffer, values in zip(part.buffers(), own, strict=False):
                buffer.copy_(values)
        call, ids = prepare_triton(module.weights()), torch.zeros(7, 1, dtype=torch.int64)
        found = call(x, ids, torch.ones(7, 1))
        expected = module.restored(torch.float32)(x.bfloat16().float())
        assert difference(found, expected) < 1e-4, name
    return 3


if __name__ == "__main__":
    patch_language_once()
    main()
