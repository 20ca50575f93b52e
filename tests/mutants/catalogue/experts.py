"""Drafters with experts on a GPU: the window, what a graph may hold, the fields of their config."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

WINDOW = "sglang_dspark/backends/moe/block_window.py"
BACKENDS = "sglang_dspark/backends/moe/expert_backends.py"
DISPATCH = "tests/experts/test_dispatch.py"
OF_WINDOWS = "tests/backends/cuda/test_block_window.py"

MUTANTS = (
    Mutant(
        name="the window begins a token too early",
        area="draft window",
        file=WINDOW,
        old="first = (lens - window).clamp(min=0)[:, None]",
        new="first = (lens - window - 1).clamp(min=0)[:, None]",
        tests=(f"{OF_WINDOWS}::test_the_window_is_the_drafters",),
    ),
    Mutant(
        name="a short context is filled up with other slots",
        area="draft window",
        file=WINDOW,
        old="own = seen.new_ones(requests, block.shape[2])",
        new="seen = torch.ones_like(seen)\n    own = seen.new_ones(requests, block.shape[2])",
        tests=(f"{OF_WINDOWS}::test_the_window_is_the_drafters",),
    ),
    Mutant(
        name="what the cache holds beyond the window is read",
        area="draft window",
        file=WINDOW,
        old=".masked_fill(~seen[..., None, None], 0)",
        new="",
        tests=(f"{OF_WINDOWS}::test_the_window_is_the_drafters",),
    ),
    Mutant(
        name="the window's length is read on the host",
        area="draft graphs",
        file=WINDOW,
        old="position = first + torch.arange(window, device=lens.device)",
        new="position = first + torch.arange(min(window, int(lens.max())), device=lens.device)",
        tests=(f"{OF_WINDOWS}::test_what_a_graph_holds_reads_no_value_on_the_host",),
    ),
    Mutant(
        name="products that read the host are captured",
        area="draft graphs",
        file=BACKENDS,
        old="        graph=in_graphs,\n",
        new="",
        tests=(f"{DISPATCH}::test_what_no_graph_may_hold_is_said_once_and_computed_outside",),
    ),
    Mutant(
        name="weights are prepared in the first pass",
        area="draft graphs",
        file=BACKENDS,
        old="            layer.warm_up()",
        new="            pass",
        tests=(f"{DISPATCH}::test_weights_are_made_ready_before_the_first_pass",),
    ),
    Mutant(
        name="a draft that no graph may hold is captured",
        area="draft graphs",
        file="patches/step/moe_drafter.py",
        old="if worker.is_draft_worker:",
        new="if not worker.is_draft_worker:",
        tests=(
            "tests/patches/test_moe_drafter.py"
            "::test_a_draft_that_no_graph_may_hold_is_not_captured",
        ),
    ),
    Mutant(
        name="drafters with experts refused on a GPU",
        area="drafter check",
        file="sglang_dspark/backends/drafter_check.py",
        old='not in ("cpu", "cuda"):',
        new='not in ("cpu",):',
        tests=("tests/patches/test_moe_drafter.py::test_it_is_served_on_cpus_and_nvidia_gpus",),
    ),
    Mutant(
        name="routers in the weights' dtype",
        area="experts",
        file="sglang_dspark/backends/moe/moe_model.py",
        old="            self.mlp.gate.float()",
        new="            pass",
        tests=("tests/backends/cuda/test_moe_pass.py::test_routing_and_mixing_stay_in_float32",),
    ),
    Mutant(
        name="drafts see the beginning of the context",
        area="served experts",
        file=WINDOW,
        old="first = (lens - window).clamp(min=0)[:, None]",
        new="first = torch.zeros_like(lens)[:, None]",
        tests=("tests/backends/cuda/test_moe_pass.py::test_hidden_states_are_the_cpu_paths",),
    ),
    Mutant(
        name="the draft pass asks whether anything is seen",
        area="served experts",
        file=WINDOW,
        old="    position = first +",
        new="    assert int(lens.max()) >= 0\n    position = first +",
        tests=("tests/backends/cuda/test_moe_pass.py::test_the_pass_asks_the_host_for_nothing",),
    ),
    Mutant(
        name="a cache of pages is read as one of tokens",
        area="served experts",
        file=WINDOW,
        old='if layout != "nhd":',
        new='if layout not in ("nhd", "hnd"):',
        tests=(f"{OF_WINDOWS}::test_a_cache_of_another_layout_is_refused",),
    ),
    Mutant(
        name="the doctor chooses for passes outside graphs",
        area="served experts",
        file="sglang_dspark/backends/moe/expert_report.py",
        old="dtype=torch.bfloat16, graph=True, capability",
        new="dtype=torch.bfloat16, graph=False, capability",
        tests=(
            "tests/backends/cuda/test_imports.py"
            "::test_the_doctor_says_who_computes_each_format_of_experts",
        ),
    ),
    Mutant(
        name="a truth value counts as an integer in config.json",
        area="drafter check",
        file="sglang_dspark/drafter/fields.py",
        old="or isinstance(value, bool) or value < least",
        new="or value < least",
        tests=("tests/drafter/test_fields.py::test_what_is_no_integer_is_named",),
    ),
)
