"""Faults of a GPU server's defaults, of drafter updates and of memory for penalties."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_DEFAULTS = "tests/backends/cuda/test_default_attention.py"
_FEATURES = "sglang_dspark/backends/cuda/features.py"
_UPDATES = "sglang_dspark/serving/weight_updates.py"
_UPDATED = ("tests/backends/cuda/test_commit.py::test_weights_updated_in_place_are_committed_with",)
_PENALTIES = "sglang_dspark/step/penalties.py"
_OF_PENALTIES = "tests/step/test_step_penalties.py"


def _mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name=name, area="gpu defaults", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "a named draft backend is overruled",
        _FEATURES,
        "        args.speculative_draft_attention_backend,\n",
        "",
        f"{_DEFAULTS}::test_what_the_user_names_or_the_gpu_cannot_read_stays",
    ),
    _mutant(
        "triton reads an FP8 cache on an A100",
        _FEATURES,
        'cache_dtype == "fp8_e4m3" and capability >= (8, 9)',
        'cache_dtype == "fp8_e4m3"',
        f"{_DEFAULTS}::test_what_the_user_names_or_the_gpu_cannot_read_stays",
    ),
    _mutant(
        "attention changes where nothing is scheduled anyway",
        "patches/cuda/attention.py",
        "return backend if why is None else None",
        "return backend",
        f"{_DEFAULTS}::test_what_the_user_names_or_the_gpu_cannot_read_stays",
    ),
    _mutant(
        "graph sizes that the user named are trimmed",
        "patches/cuda/graph_sizes.py",
        "if named or not captures",
        "if not captures",
        f"{_DEFAULTS}::test_sizes_that_follow_the_user_stay",
    ),
    _mutant(
        "rows of no window stay unwritten in a full graph",
        "patches/cuda/triton_ragged.py",
        "    layout = layout.padded_to_bucket(padded_bs=bs)\n",
        "    if layout.bs != bs:\n        layout = layout.padded_to_bucket(padded_bs=bs)\n",
        "tests/rehearsal/test_triton_ragged.py::test_a_full_graph_leaves_no_row_unwritten",
    ),
    _mutant(
        "norms of before an update in place",
        "sglang_dspark/backends/cuda/draft_context.py",
        "            weights_version(model) == self.version\n            and weight is",
        "            weight is",
        *_UPDATED,
    ),
    _mutant(
        "SGLang's copies of projections of before an update in place",
        _UPDATES,
        '        stacked["weight"].copy_(_stacked(attention, "weight"))\n',
        "",
        *_UPDATED,
    ),
    _mutant(
        "SGLang's fused copies of before an update in place",
        _UPDATES,
        '            weight.copy_(_stacked(attention, "weight"))\n',
        "",
        *_UPDATED,
    ),
    _mutant(
        "a launch that does not fit is tried at each block",
        "sglang_dspark/backends/cuda/draft.py",
        "            self._fits = False\n",
        "",
        "tests/backends/cuda/test_draft.py::test_a_launch_that_does_not_fit_is_sglangs_from_then_on",
    ),
    _mutant(
        "without memory requests are penalised together all the same",
        _PENALTIES,
        "        at_once = 1\n        _reserve(at_once, like)\n",
        "",
        f"{_OF_PENALTIES}::test_without_memory_requests_are_penalised_one_by_one",
        f"{_OF_PENALTIES}::test_requests_are_penalised_in_parts",
    ),
    _mutant(
        "penalties reserve less than they take",
        "sglang_dspark/verify/penalties.py",
        "COPIES = 9\n",
        "COPIES = 6\n",
        f"{_OF_PENALTIES}::test_temporaries_take_no_more_than_is_reserved",
    ),
)
