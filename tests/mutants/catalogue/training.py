"""Anchor-bounded packing, the losses, several processes, and the number formats of experts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PACKING = "sglang_dspark/training/packing.py"
LOSSES = "sglang_dspark/families/learning/losses.py"
SMALL = "sglang_dspark/quantisation/minifloat.py"
FIELDS = ("tests/training/test_packing.py::test_fields_are_what_they_say",)
LOSS_TESTS = "tests/training/test_losses.py"
FORMATS = "tests/quantisation/test_formats.py"
WORLD = "sglang_dspark/training/distributed.py"
PROCESSES = "tests/training/test_distributed.py"
ENDS = (f"{PROCESSES}::test_a_process_that_has_left_ends_before_its_interpreter_can_abort",)

MUTANTS = (
    Mutant(
        name="blocks begin behind their anchor",
        area="packing",
        file=PACKING,
        old="at = p[:, None] + torch.arange(gamma)",
        new="at = p[:, None] + 1 + torch.arange(gamma)",
        tests=FIELDS,
    ),
    Mutant(
        name="labels are the inputs",
        area="packing",
        file=PACKING,
        old='"labels": r.tokens[at + 1]',
        new='"labels": r.tokens[at]',
        tests=FIELDS,
    ),
    Mutant(
        name="a position behind the answer's end counts",
        area="packing",
        file=PACKING,
        old="valid = at < end[:, None] - 1",
        new="valid = at < end[:, None]",
        tests=FIELDS,
    ),
    Mutant(
        name="the state of the anchor itself instead of the one before",
        area="packing",
        file=PACKING,
        old='"previous_hidden": r.hidden[p - 1]',
        new='"previous_hidden": r.hidden[p]',
        tests=FIELDS,
    ),
    Mutant(
        name="an anchor without a token behind it",
        area="packing",
        file=PACKING,
        old="torch.arange(a, b - 1) for a, b",
        new="torch.arange(a, b) for a, b",
        tests=(
            "tests/training/test_packing.py::test_anchors_lie_in_answers_and_repeat_only_when_they_must",
        ),
    ),
    Mutant(
        name="blocks belong to the sequence before",
        area="packing",
        file=PACKING,
        old="torch.repeat_interleave(torch.arange(len(anchors)), per_sequence)",
        new="torch.repeat_interleave((torch.arange(len(anchors)) - 1).clamp(min=0), per_sequence)",
        tests=FIELDS,
    ),
    Mutant(
        name="a block sees its anchor's own features",
        area="packing",
        file="sglang_dspark/families/dspark/learner.py",
        old="PackedLayout(batch.starts, batch.sequence, batch.positions)",
        new="PackedLayout(batch.starts, batch.sequence, batch.positions + 1)",
        tests=(
            "tests/training/test_packing.py::test_a_block_does_not_see_other_blocks_or_what_comes_behind_its_anchor",
        ),
    ),
    Mutant(
        name="later positions weigh more",
        area="losses",
        file=LOSSES,
        old="return torch.exp(-torch.arange(",
        new="return torch.exp(torch.arange(",
        tests=(f"{LOSS_TESTS}::test_position_weights_are_the_papers",),
    ),
    Mutant(
        name="confidence taught the rate of rejection",
        area="losses",
        file=LOSSES,
        old="confidence.float(), accept.clamp(0, 1)",
        new="confidence.float(), 1 - accept.clamp(0, 1)",
        tests=(f"{LOSS_TESTS}::test_fused_loss_and_gradient_equal_the_papers",),
    ),
    Mutant(
        name="the target's law without its partition",
        area="losses",
        file=LOSSES,
        old="(target[rows].float() - log_partition[rows, None]).exp_()",
        new="torch.softmax(target[rows].float(), -1)",
        tests=(f"{LOSS_TESTS}::test_fused_loss_and_gradient_equal_the_papers",),
    ),
    Mutant(
        name="labels outside of the draft vocabulary taught",
        area="losses",
        file=LOSSES,
        old="inside = label >= 0",
        new="inside = label >= -1",
        tests=(f"{LOSS_TESTS}::test_fused_loss_and_gradient_equal_the_papers",),
    ),
    Mutant(
        name="FP8 divided by its scale",
        area="formats",
        file="sglang_dspark/quantisation/fp8.py",
        old="return codes.float() * _spread(scales, *q.shape[-2:])",
        new="return codes.float() / _spread(scales, *q.shape[-2:])",
        tests=(f"{FORMATS}::test_fp8_all_codes_with_a_scale",),
    ),
    Mutant(
        name="FP8 blocks transposed",
        area="formats",
        file="sglang_dspark/quantisation/fp8.py",
        old="scales = _scale(largest(tiled, (-3, -1)))",
        new="scales = _scale(largest(tiled.transpose(-4, -2), (-3, -1)))",
        tests=(f"{FORMATS}::test_fp8_quantises_as_defined",),
    ),
    Mutant(
        name="E2M1 table with 5 for 6",
        area="formats",
        file=SMALL,
        old="E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)",
        new="E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)",
        tests=(f"{FORMATS}::test_mxfp4_all_codes_with_all_scales",),
    ),
    Mutant(
        name="ties to the odd code",
        area="formats",
        file=SMALL,
        old="above = size >= middle if low % 2 else size > middle",
        new="above = size > middle if low % 2 else size >= middle",
        tests=(f"{FORMATS}::test_mxfp4_quantises_as_defined",),
    ),
    Mutant(
        name="nibbles swapped",
        area="formats",
        file=SMALL,
        old="torch.stack([packed & 15, packed >> 4], -1)",
        new="torch.stack([packed >> 4, packed & 15], -1)",
        tests=(f"{FORMATS}::test_all_nibbles_pack_and_unpack",),
    ),
    Mutant(
        name="E4M3 rounds half away from zero",
        area="formats",
        file=SMALL,
        old="nearest = torch.round(x / quantum) * quantum",
        new="nearest = (x / quantum).abs().add(0.5).floor().copysign(x) * quantum",
        tests=(f"{FORMATS}::test_e4m3_rounds_every_tie_to_even",),
    ),
    Mutant(
        name="MXFP4 scales twice too large",
        area="formats",
        file="sglang_dspark/quantisation/mxfp4.py",
        old="_EMAX = 2",
        new="_EMAX = 1",
        tests=(f"{FORMATS}::test_mxfp4_quantises_as_defined",),
    ),
    Mutant(
        name="NVFP4 without its global scale",
        area="formats",
        file="sglang_dspark/quantisation/nvfp4.py",
        old="wide = scales.double() * overall.double()[..., None, None]",
        new="wide = scales.double()",
        tests=(f"{FORMATS}::test_nvfp4_all_codes_with_all_scales",),
    ),
    Mutant(
        name="a process that torchrun started alone ends its interpreter by itself",
        area="several processes",
        file=WORLD,
        old="if self.sharded:\n            sys.stdout.flush()",
        new="if self.size > 1:\n            sys.stdout.flush()",
        tests=ENDS,
    ),
    Mutant(
        name="a process of several loses what it printed",
        area="several processes",
        file=WORLD,
        old="            sys.stdout.flush()\n",
        new="",
        tests=ENDS,
    ),
    Mutant(
        name="the command's interpreter ends by itself",
        area="several processes",
        file="sglang_dspark/cli/train.py",
        old="_train(_load(config)).end()",
        new="_train(_load(config))",
        tests=(f"{PROCESSES}::test_the_command_ends_before_its_interpreter_can_abort",),
    ),
    Mutant(
        name="several processes write the same data",
        area="several processes",
        file="sglang_dspark/cli/train.py",
        old="    if started_by_torchrun():",
        new="    if False:",
        tests=(f"{PROCESSES}::test_one_of_several_processes_makes_no_data",),
    ),
)
