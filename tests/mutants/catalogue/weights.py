"""Faults of packed weights: formats, the kernel that widens them, which weights are packed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FORMATS = "sglang_dspark/serving/cpu/weight_formats.py"
TEXT = "sglang_dspark/serving/cpu/narrow_matmul_text.py"
PACKED = "sglang_dspark/serving/cpu/packed_weights.py"
FORMAT_TESTS = ("tests/serving_cpu/test_weight_formats.py",)
PACKED_TESTS = ("tests/serving_cpu/test_packed_weights.py",)

MUTANTS = (
    Mutant(
        name="packed features' projection goes to the float32 kernel",
        area="packed weights",
        file="sglang_dspark/serving/cpu/context_kv.py",
        old="return weight.dtype is _FLOAT and linear.eligible",
        new="return linear.eligible",
        tests=("tests/serving_cpu/test_context_kv.py",),
    ),
    Mutant(
        name="a packed W2 goes to the float32 kernel",
        area="packed weights",
        file="sglang_dspark/serving/cpu/draft_head.py",
        old="self.w1.dtype is self.w2.dtype is torch.float32",
        new="self.w1.dtype is torch.float32",
        tests=("tests/serving_cpu/test_draft_head.py",),
    ),
    Mutant(
        name="a scale for twice the columns in the kernel",
        area="packed weights",
        file=TEXT,
        old='f"  %group{p} = sdiv i64 %c, {GROUP}",',
        new='f"  %group{p} = sdiv i64 %c, {2 * GROUP}",',
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="bytes of a weight widened without their sign",
        area="packed weights",
        file=TEXT,
        old="= sext <{LANES} x i8>",
        new="= zext <{LANES} x i8>",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="rows of int8 without their scales between them",
        area="packed weights",
        file=TEXT,
        old="  %bytes = add i64 %k, %scale.bytes",
        new="  %bytes = add i64 %k, 0",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="a weight rounded towards zero",
        area="packed weights",
        file=FORMATS,
        old=".round().clamp(-127, 127)",
        new=".trunc().clamp(-127, 127)",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="rows taken with other rows' scales",
        area="packed weights",
        file=FORMATS,
        old="return _whole(weight)[rows][:, : weight.shape[1]]",
        new="return pack(dense(weight), INT8)[: len(rows)]",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="an int8 weight without scales is read",
        area="packed weights",
        file=FORMATS,
        old="weight.stride() == (step, 1)",
        new="weight.stride()[1] == 1",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="a packed embedding is looked up as it lies",
        area="packed weights",
        file=PACKED,
        old="            setattr(module, _MARK, True)\n",
        new="",
        tests=PACKED_TESTS,
    ),
    Mutant(
        name="int8 weights are exchanged as numbers",
        area="packed weights",
        file=PACKED,
        old="            if form is INT8:\n",
        new="            if form is FLOAT32:\n",
        tests=PACKED_TESTS,
    ),
    Mutant(
        name="weights under LoRA are packed",
        area="packed weights",
        file=PACKED,
        old='    need(not runner.server_args.enable_lora, "LoRA adds to float32 weights")\n',
        new="",
        tests=PACKED_TESTS,
    ),
)
