"""Faults of packed weights: formats, the kernel that widens them, which weights are packed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FORMATS = "sglang_dspark/serving/cpu/weight_formats.py"
TEXT = "sglang_dspark/serving/cpu/narrow_matmul_text.py"
INT8_TEXT = "sglang_dspark/serving/cpu/int8_product_text.py"
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
        file=INT8_TEXT,
        old="= sext <{2 * LANES} x i8>",
        new="= zext <{2 * LANES} x i8>",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="a row of x rounded towards zero",
        area="packed weights",
        file=INT8_TEXT,
        old="call {_FLOATS} @llvm.rint.v{LANES}f32({_FLOATS} %scaled)",
        new="call {_FLOATS} @llvm.maxnum.v{LANES}f32({_FLOATS} %scaled, {_FLOATS} %scaled)",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="a row of x that is no number is multiplied as one",
        area="packed weights",
        file=INT8_TEXT,
        old="  %kept = fadd float %given, %bad",
        new="  %kept = fadd float %given, 0.0",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="an empty row of x divided by its size",
        area="packed weights",
        file=INT8_TEXT,
        old="  %given = select i1 %seen, float %each, float 0.0",
        new="  %given = fdiv float %each, %top",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="sums of a row of x scaled by its neighbour's scale",
        area="packed weights",
        file=INT8_TEXT,
        old="getelementptr i16, ptr %x{q}, i64 %k",
        new="getelementptr i16, ptr %x0, i64 %k",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="the second half of a group left out",
        area="packed weights",
        file=INT8_TEXT,
        old="= add {_INTS} %i0_{at}, %i1_{at}",
        new="= add {_INTS} %i0_{at}, zeroinitializer",
        tests=FORMAT_TESTS,
    ),
    Mutant(
        name="weights kept as bfloat16 unasked though that rounds them",
        area="packed weights",
        file=FORMATS,
        old="    return not bool((bits & 0xFFFF).any())",
        new="    return not bool((bits & 0xFF).any())",
        tests=(*FORMAT_TESTS, *PACKED_TESTS),
    ),
    Mutant(
        name="one exact weight decides for all",
        area="packed weights",
        file=PACKED,
        old="lossless = bool(weights) and all(",
        new="lossless = bool(weights) and any(",
        tests=PACKED_TESTS,
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
        old="            if form is INT8:  #",
        new="            if form is FLOAT32:  #",
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
    Mutant(
        name="an update of the target overwrites the drafter",
        area="packed weights",
        file="sglang_dspark/serving/weight_updates.py",
        old='        selector = "target"',
        new='        selector = "all"',
        tests=("tests/integration/test_weight_updates.py",),
    ),
)
