"""The draft steps as a Triton operator: heads, ties, noise, what is kept, counters, its seam."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KERNEL = "kernels/markov_sample.py"
HEADS = "kernels/markov_heads.py"
STEP = "sglang_dspark/backends/cuda/draft.py"
BY_HAND = ("tests/kernels/test_markov_sample.py::test_drafts_known_by_hand",)
LAW = ("tests/kernels/test_markov_sample.py::test_drafts_follow_the_kept_law",)
IN_A_STEP = ("tests/backends/cuda/test_draft.py",)


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...] = BY_HAND) -> Mutant:
    return Mutant(name=name, area="markov operator", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "every draft step follows the anchor",
        HEADS,
        "return tl.where(step == 0, anchor, token)",
        "return tl.where(step >= 0, anchor, token)",
    ),
    _mutant(
        "the last tile's best token is taken",
        KERNEL,
        "tl.atomic_max(best",
        "tl.atomic_xchg(best",
    ),
    _mutant(
        "logits of a reduced vocabulary are kept by column",
        KERNEL,
        "place = tl.load(ids + column, mask=column < width, other=0)",
        "place = column",
    ),
    _mutant(
        "a zero below zero is another draft",
        KERNEL,
        "bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)",
        "bits = value.to(tl.int32, bitcast=True)",
    ),
    _mutant(
        "negative logits are in the wrong order",
        KERNEL,
        "order = bits ^ ((bits >> 31) & 0x7FFFFFFF)",
        "order = bits ^ (bits & 0)",
    ),
    _mutant(
        "the argmax is that of the sums before they are rounded",
        KERNEL,
        "value = own.to(tl.float32)",
        "value = tl.load(base + at, mask=known, other=0.0).to(tl.float32) + bias",
    ),
    _mutant(
        "a reduced vocabulary's columns are taken for tokens",
        HEADS,
        "token = tl.load(ids + token, mask=later, other=0)",
        "token = token",
    ),
    _mutant(
        "the gate stays open",
        HEADS,
        "latent = gate * own.to(tl.float32)",
        "latent = own.to(tl.float32)",
    ),
    _mutant(
        "the scratch is not zero behind a launch",
        KERNEL,
        "tl.store(best + at, tl.zeros([block], tl.int64), mask=known)",
        "tl.store(best + at, chosen, mask=known)",
    ),
    _mutant(
        "drafts are drawn without their temperature",
        KERNEL,
        "scaled = tl.div_rn(value, tl.broadcast_to(scale, (rows, block)))",
        "scaled = value + 0.0 * scale",
        LAW,
    ),
    _mutant(
        "both drafts of a block see the same noise",
        KERNEL,
        "zero + step.to(tl.uint32)",
        "zero",
        LAW,
    ),
    _mutant(
        "large waits have the series of small ones",
        KERNEL,
        "tl.where(u < 0.0625, series, -tl.log(1.0 - u))",
        "tl.where(u < 2.0, series, -tl.log(1.0 - u))",
        LAW,
    ),
    _mutant(
        "small waits have another series",
        KERNEL,
        "tail = 1.0 / 3.0 +",
        "tail = 1.0 / 2.0 +",
    ),
    _mutant(
        "a bias is added before it is rounded",
        KERNEL,
        "bias = narrowed(bias, w2.dtype.element_ty, interpreted).to(tl.float32)",
        "bias = bias.to(tl.float32)",
    ),
    _mutant(
        "no number with a sign comes last",
        KERNEL,
        "bits = tl.where(value != value, 0x7FC00000, bits)",
        "bits = bits",
    ),
    _mutant(
        "programs that wait for each other need not all be resident",
        KERNEL,
        'options["launch_cooperative_grid"] = True',
        'options["launch_cooperative_grid"] = False',
        ("tests/kernels/test_markov_sample.py::test_programs_that_wait_are_launched_together",),
    ),
    _mutant(
        "the recurrent head keeps no state",
        HEADS,
        "tl.store(after + place, gate * state + (1.0 - gate) * new, mask=known)",
        "tl.store(after + place, 0.0 * gate, mask=known)",
        IN_A_STEP,
    ),
    _mutant(
        "the next block is drawn by the same noise",
        STEP,
        "given.noise.offset.add_(1)",
        "given.noise.offset.add_(0)",
        IN_A_STEP,
    ),
    _mutant(
        "a graph's counters are made anew",
        STEP,
        "if key not in self._scratch:",
        "if key:",
        IN_A_STEP,
    ),
    _mutant(
        "ranks that agree on each draft draft alone",
        STEP,
        "if tp_sync.enabled(upstream.SpecTpSyncSite.DSPARK_DRAFT):",
        "if tp_sync.enabled(upstream.SpecTpSyncSite.DSPARK_DRAFT) is None:",
        IN_A_STEP,
    ),
    _mutant(
        "of equally likely tokens the last is drafted",
        KERNEL,
        "lowest = tl.min(tl.where(order == top[:, None], column, 2147483647), 1)",
        "lowest = tl.max(tl.where(order == top[:, None], column, 0), 1)",
    ),
    _mutant(
        "a graph's blocks are the slower way's",
        STEP,
        "return logits_out is not None and",
        "return logits_out is None and",
        IN_A_STEP,
    ),
)
