"""Last bits on CPUs: sums in one order, whatever a row stands beside."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LANES = "sglang_dspark/backends/cpu/lanes.py"
PAGED = "sglang_dspark/backends/cpu/paged_attention.py"
LAYERS = "sglang_dspark/backends/cpu/layers/layer_kernel.py"
SUMS = "tests/backends/cpu/test_lanes.py"
ATTENTION = "tests/backends/cpu/test_attention.py"


def _mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name=name, area="exact-sums", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "a row of a sum that fills no lanes is left out",
        LANES,
        "        each(lambda data: _load_some(builder, data, done, left, nothing))",
        "        pass",
        f"{SUMS}::test_a_sum_is_taken_in_the_order_that_is_said",
    ),
    _mutant(
        "lanes are added to their neighbours",
        LANES,
        "for lane in range(width // 2)]\n    upper = [lane + width // 2 for lane in lower]",
        "for lane in range(0, width, 2)]\n    upper = [lane + 1 for lane in lower]",
        f"{SUMS}::test_a_sum_is_taken_in_the_order_that_is_said",
    ),
    _mutant(
        "the last numbers of a row take no values",
        LANES,
        "        _add_in_steps(builder, 1, (done, length), targets, shares, sources)\n",
        "",
        f"{SUMS}::test_weighted_rows_are_added_one_after_the_other",
    ),
    _mutant(
        "a block of queries sees the whole prompt",
        PAGED,
        "cached - queries + done + count if causal else cached",
        "cached",
        f"{ATTENTION}::test_extend",
    ),
    _mutant(
        "queries of a bidirectional block see only those of its part",
        PAGED,
        "cached - queries + done + count if causal else cached",
        "cached - queries + done + count",
        f"{ATTENTION}::test_a_long_block_sees_itself_both_ways",
    ),
    _mutant(
        "a window seen both ways is counted from a block's own end",
        PAGED,
        "and (causal or window < 0)",
        "",
        f"{ATTENTION}::test_a_long_block_sees_itself_both_ways",
    ),
    _mutant(
        "what must not reorder sums takes its first caller's leave to",
        "sglang_dspark/backends/cpu/jit.py",
        ', error_model="numpy", fastmath=False)',
        ', error_model="numpy")',
        f"{SUMS}::test_a_function_that_may_reorder_sums_hands_nothing_on",
    ),
    _mutant(
        "sums may be reordered",
        "sglang_dspark/backends/cpu/jit.py",
        ', error_model="numpy", fastmath=False)',
        ', error_model="numpy", fastmath={"reassoc", "contract"})',
        f"{SUMS}::test_no_kernel_may_reorder_sums",
    ),
    _mutant(
        "a product is summed in eight lanes",
        LANES,
        "_DOT_LANES = 16",
        "_DOT_LANES = 8",
        f"{SUMS}::test_a_product_is_taken_in_the_order_that_is_said",
    ),
    _mutant(
        "a tree's window is left out",
        PAGED,
        "low = max(position - window, start) if window >= 0 else start",
        "low = max(position - window, start) if window >= 0 and tree.shape[0] == 0 else start",
        f"{ATTENTION}::test_a_wide_tree",
    ),
    _mutant(
        "layers in one call see no window",
        LAYERS,
        "tables.numbers[layer, WINDOW], room.attended",
        "np.int64(-1), room.attended",
        "tests/backends/cpu/test_layer_stack.py::test_layers_that_see_a_window",
    ),
    _mutant(
        "keys are normed with another norm's epsilon",
        LAYERS,
        "key, fractions[3])",
        "key, fractions[0])",
        "tests/backends/cpu/test_layer_stack.py::test_each_norm_has_its_own_epsilon",
    ),
    _mutant(
        "context values are every layer's first ones",
        "sglang_dspark/backends/cpu/context_kernels.py",
        "stacked[i, middle:end]",
        "stacked[i, : end - middle]",
        "tests/backends/cpu/test_context_kv.py::test_the_cache_is_upstreams",
    ),
    _mutant(
        "what does not fill the lanes of the block rule is left out",
        "sglang_dspark/backends/cpu/accept.py",
        "for v in range(whole, len(target)):",
        "for v in range(whole, whole):",
        "tests/backends/cpu/test_accept_block_walk.py::test_compiled_walk_is_the_references",
    ),
    _mutant(
        "streams are read at the last four places alone",
        "sglang_dspark/backends/cpu/expert_ops.py",
        "out[t, s + i] = found[i] * scale",
        "out[t, i] = found[i] * scale",
        "tests/backends/cpu/test_expert_ops.py::test_streams_are_the_modules",
    ),
    _mutant(
        "streams' last products are left out",
        "sglang_dspark/backends/cpu/expert_ops.py",
        "for s in range(fours, phi.shape[0]):",
        "for s in range(fours, fours):",
        "tests/backends/cpu/test_expert_ops.py::test_streams_are_the_modules",
    ),
    _mutant(
        "context keys are normed with the features' epsilon",
        "sglang_dspark/backends/cpu/context_kernels.py",
        "tables.head_norms[layer], tables.epsilons[1]",
        "tables.head_norms[layer], tables.epsilons[0]",
        "tests/backends/cpu/test_context_kv.py::test_the_cache_is_upstreams",
    ),
)
