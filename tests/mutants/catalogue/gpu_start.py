"""What a GPU does otherwise than its rehearsal: start-up passes, graph buffers, failed devices."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PASSES = ("tests/backends/cuda/test_passes.py",)
ATTACH = ("tests/backends/cuda/test_attach.py",)
FEATURES = ("tests/backends/cuda/test_features.py",)
FAULTS = ("tests/step/test_draft_faults.py",)
WARM_UP = ("tests/backends/cuda/test_warm_up.py",)
DEVICE = ("tests/backends/cuda/test_device.py",)


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, area="gpu start", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "anchors of the start-up's passes stand in rows of one",
        "sglang_dspark/backends/cuda/passes.py",
        "torch.ones(requests, self.gamma, dtype",
        "torch.ones(requests, 1, dtype",
        PASSES,
    ),
    _mutant(
        "passes that wait for the host are timed without it",
        "sglang_dspark/backends/cuda/passes.py",
        "if in_graph and self._overlaps:",
        "if in_graph:",
        PASSES,
    ),
    _mutant(
        "passes without a graph are timed without the host",
        "sglang_dspark/backends/cuda/passes.py",
        "if in_graph and self._overlaps:",
        "if self._overlaps:",
        PASSES,
    ),
    _mutant(
        "a graph's own buffers are handed on",
        "sglang_dspark/step/commit.py",
        "tuple(each.clone() for each in results)",
        "(results[0].clone(), *results[1:])",
        ("tests/step/test_step_commit.py",),
    ),
    _mutant(
        "graphs of unlike windows are left unused where nothing is scheduled",
        "sglang_dspark/step/build.py",
        "    if worker.model_runner.decode_cuda_graph_runner is None:\n",
        "    if planner is not None:\n",
        ATTACH,
    ),
    _mutant(
        "a draft that waits for the host is scheduled",
        "sglang_dspark/backends/cuda/attach.py",
        "if draft.attn_backend.needs_cpu_seq_lens and not runner",
        "if draft.attn_backend.needs_cpu_seq_lens and runner",
        ATTACH,
    ),
    _mutant(
        "a cache without memory is written to at the start",
        "sglang_dspark/backends/cuda/attach.py",
        '"post_capture_active", False)',
        '"no_such_field", False)',
        ATTACH,
    ),
    _mutant(
        "XQA is taken for a backend of unlike windows",
        "sglang_dspark/backends/cuda/features.py",
        "_XQA = (9, 12)",
        "_XQA = (12,)",
        FEATURES,
    ),
    _mutant(
        "a graph's own tokens are handed on",
        "sglang_dspark/step/commit.py",
        "    if verified.folded:\n",
        "    if verified.folded and inputs.layout is not None:\n",
        ("tests/step/test_step_commit.py",),
    ),
    _mutant(
        "a sampled step without drafts makes probabilities of its whole windows",
        "sglang_dspark/backends/cuda/device.py",
        "if rules.own_rule or not asked.drafted:",
        "if rules.own_rule:",
        DEVICE,
    ),
    _mutant(
        "plain decoding's sampler draws where drafts wait to be judged",
        "sglang_dspark/backends/cuda/device.py",
        "if not asked.drafted and samples_as_plain(",
        "if samples_as_plain(",
        DEVICE,
    ),
    _mutant(
        "plain decoding's sampler draws with top-k and top-p",
        "sglang_dspark/backends/cuda/accept_plain.py",
        "and cuts.kinds <= 1",
        "and cuts.kinds <= 2",
        DEVICE,
    ),
    _mutant(
        "a greedy request cuts the rows of those beside it",
        "sglang_dspark/backends/cuda/device.py",
        "view.need_top_k_sampling, view.need_top_p_sampling = cuts.top_k, cuts.top_p",
        "view.need_top_p_sampling = cuts.top_p",
        DEVICE,
    ),
    _mutant(
        "one request's drafts compile the accept kernels anew",
        "sglang_dspark/backends/cuda/accept.py",
        "ids[:, 1:].clone(memory_format=torch.contiguous_format)",
        "ids[:, 1:].contiguous()",
        WARM_UP,
    ),
    _mutant(
        "steps without drafts are not accepted at the start",
        "sglang_dspark/backends/cuda/accept_warm_up.py",
        "for drafted in (True, False):",
        "for drafted in (True,):",
        WARM_UP,
    ),
    _mutant(
        "kernels loaded from Triton's cache count as compiled",
        "sglang_dspark/backends/cuda/compilations.py",
        'if not compiled["cache_hit"]:',
        "if compiled:",
        WARM_UP,
    ),
    _mutant(
        "windows of unlike lengths go to triton's deterministic kernel",
        "sglang_dspark/backends/cuda/features.py",
        '== "triton" and _is_deterministic(start.args)',
        '== "fa3" and _is_deterministic(start.args)',
        ("tests/backends/cuda/test_features.py",),
    ),
    _mutant(
        "seeded drafts of a whole batch are drawn together",
        "sglang_dspark/step/seeds.py",
        "together = rows_at_once(len(columns))",
        "together = len(self.seeds.rows)",
        ("tests/step/test_step_seeds.py",),
    ),
    _mutant(
        "a failed device is drafted on again",
        "sglang_dspark/step/draft.py",
        "state.ranks.several or of_device(error)",
        "state.ranks.several",
        FAULTS,
    ),
    _mutant(
        "a draft without memory ends the server",
        "sglang_dspark/step/draft.py",
        "    if isinstance(error, torch.OutOfMemoryError):\n        return False\n",
        "    if isinstance(error, torch.OutOfMemoryError):\n        return True\n",
        FAULTS,
    ),
    _mutant(
        "a kernel that does not fit ends the start",
        "sglang_dspark/experts/times.py",
        "    *_triton_errors(),\n",
        "",
        ("tests/experts/test_times.py",),
    ),
    _mutant(
        "a decode tile needs more memory than a small GPU has",
        "kernels/grouped_config.py",
        '3 if form == "bf16" or fp8_out else 4',
        '3 if form == "bf16" else 4',
        ("tests/kernels/test_grouped_gemm.py",),
    ),
)
