"""The served step: ragged rows, what is accepted and committed, seeds, the law, the engine."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LAYOUT = "sglang_dspark/backends/cpu/ragged_layout.py"
ENGINE = "sglang_dspark/step/engine.py"
REUSE = "sglang_dspark/step/plan_reuse.py"
GREEDY = "sglang_dspark/backends/cpu/greedy_ops.py"
DEVICE = "sglang_dspark/backends/cpu/device.py"
STEP = "patches/step/worker.py"
DEVICE_TESTS = "tests/backends/cpu/test_device.py"
SEAM_TESTS = "tests/patches/test_step.py"
ROWS = "tests/backends/cpu/test_ragged_layout.py"
COMMIT = ("tests/backends/cpu/test_ragged_commit.py",)
SERVED = ("tests/integration/test_ragged_steps.py",)
ENGINE_TESTS = "tests/step/test_engine_plans.py"
LEARNING = "tests/step/test_engine_learning.py"
REST = (
    "tests/serving/test_exported_metrics.py::"
    "test_nothing_is_kept_back_when_the_last_request_has_ended"
)
STARTS = "starts = rows.starts if logits.shape[0] == rows.total else rows.strided"
CHOSEN = "hidden, slots, positions = hidden[chosen], slots[chosen], positions[chosen]"

MUTANTS = (
    Mutant(
        name="ragged windows without the anchor",
        area="ragged layout",
        file=LAYOUT,
        old="windows = np.asarray(lengths, np.int64) + 1",
        new="windows = np.maximum(np.asarray(lengths, np.int64), 1)",
        tests=(f"{ROWS}::test_layout_is_upstreams_own",),
    ),
    Mutant(
        name="cu_seqlens shifted by a request",
        area="ragged layout",
        file=LAYOUT,
        old="indptr[1:] = ends",
        new="indptr[:-1] = ends",
        tests=(f"{ROWS}::test_layout_is_upstreams_own",),
    ),
    Mutant(
        name="whole windows a place too narrow",
        area="ragged layout",
        file=LAYOUT,
        old="torch.arange(len(windows)) * width",
        new="torch.arange(len(windows)) * (width - 1)",
        tests=(f"{ROWS}::test_window_is_upstreams_own",),
    ),
    Mutant(
        name="packed rows start where the request before starts",
        area="ragged layout",
        file=LAYOUT,
        old="return np.cumsum(lens) - lens",
        new="return np.cumsum(lens) - lens[0]",
        tests=(f"{ROWS}::test_rows_of_counts_from_each_start",),
    ),
    Mutant(
        name="positions of packed rows counted through",
        area="ragged layout",
        file=LAYOUT,
        old="verify_window.positions_2d.reshape(-1)[rows.index]",
        new="verify_window.positions_2d.reshape(-1)[: rows.total]",
        tests=COMMIT,
    ),
    Mutant(
        name="the target's keys in wrong slots",
        area="commit",
        file=LAYOUT,
        old="verify_window.verify_cache_loc[rows.index]",
        new="verify_window.verify_cache_loc[: rows.total]",
        tests=COMMIT,
    ),
    Mutant(
        name="ragged accept reads behind the window",
        area="accept",
        file=GREEDY,
        old="first, most = starts[r], lens[r] - 1",
        new="first, most = starts[r], min(lens[r], window.shape[1] - 1)",
        tests=(f"{ROWS}::test_greedy_accept_is_the_rule_of_verify",),
    ),
    Mutant(
        name="ragged accept reads the row before",
        area="accept",
        file=GREEDY,
        old="token = argmax_of(bits[first + k])",
        new="token = argmax_of(bits[first + k - 1])",
        tests=(f"{ROWS}::test_greedy_accept_is_the_rule_of_verify",),
    ),
    Mutant(
        name="sampled accept reads rows of whole windows",
        area="accept",
        file="sglang_dspark/backends/cpu/accept.py",
        old="rows = (starts[:, None] + torch.arange(width))[at]",
        new="rows = (torch.arange(len(lens))[:, None] * width + torch.arange(width))[at]",
        tests=(f"{ROWS}::test_sampled_requests_read_their_own_rows",),
    ),
    Mutant(
        name="greedy requests take the sampled outcome",
        area="accept",
        file="sglang_dspark/backends/cpu/accept.py",
        old="_either(draft_block.greedy_mask, greedy, sampled)",
        new="_either(draft_block.greedy_mask, sampled, greedy)",
        tests=(
            "tests/backends/cpu/test_seeded_ops.py::test_seeded_greedy_and_free_requests_in_one_batch",
        ),
    ),
    Mutant(
        name="packed logits read as whole windows",
        area="accept",
        file=DEVICE,
        old=STARTS,
        new="starts = rows.strided",
        tests=COMMIT,
    ),
    Mutant(
        name="whole windows' logits read as packed",
        area="accept",
        file=DEVICE,
        old=STARTS,
        new="starts = rows.starts",
        tests=COMMIT,
    ),
    Mutant(
        name="bonus in the place of the last accepted draft",
        area="commit",
        file=GREEDY,
        old="tokens[r, accepted[r]] = bonus[r]",
        new="tokens[r, max(accepted[r] - 1, 0)] = bonus[r]",
        tests=(f"{ROWS}::test_what_is_committed_is_upstreams_own",),
    ),
    Mutant(
        name="lengths without the bonus",
        area="commit",
        file=GREEDY,
        old="lens[r] = prefix[r] + commit[r]",
        new="lens[r] = prefix[r] + accepted[r]",
        tests=(f"{ROWS}::test_what_is_committed_is_upstreams_own",),
    ),
    Mutant(
        name="draft context in the first slots of the pass",
        area="commit",
        file=DEVICE,
        old=CHOSEN,
        new="hidden, slots, positions = hidden[chosen], slots[:kept], positions[chosen]",
        tests=COMMIT,
    ),
    Mutant(
        name="draft context at the first positions of the pass",
        area="commit",
        file=DEVICE,
        old=CHOSEN,
        new="hidden, slots, positions = hidden[chosen], slots[chosen], positions[:kept]",
        tests=COMMIT,
    ),
    Mutant(
        name="draft context of the pass's first rows",
        area="commit",
        file=DEVICE,
        old=CHOSEN,
        new="hidden, slots, positions = hidden[:kept], slots[chosen], positions[chosen]",
        tests=COMMIT,
    ),
    Mutant(
        name="only anchors reach the draft's context",
        area="commit",
        file=DEVICE,
        old="= verified.hidden, accepted.commit_lens",
        new="= verified.hidden, torch.ones_like(accepted.commit_lens)",
        tests=COMMIT,
    ),
    Mutant(
        name="rejected rows reach the draft's context",
        area="commit",
        file=DEVICE,
        old="if kept < rows.total:",
        new="if kept > rows.total:",
        tests=COMMIT,
    ),
    Mutant(
        name="accepted rows listed where all were accepted",
        area="commit",
        file=DEVICE,
        old="if kept < rows.total:",
        new="if True:",
        tests=COMMIT,
        equivalent="with nothing rejected the list is of all rows, in their order",
    ),
    Mutant(
        name="tokens of a step without drafts by index",
        area="ragged layout",
        file=LAYOUT,
        old="if rows.total == len(rows.lens):",
        new="if rows.total < 0:",
        tests=(ROWS,),
        equivalent="a shortcut: the other branch copies the same anchors",
    ),
    Mutant(
        name="draft context in wrong slots, served",
        area="commit",
        file=DEVICE,
        old=CHOSEN,
        new="hidden, slots, positions = hidden[chosen], slots[:kept], positions[chosen]",
        tests=SERVED,
        server=True,
    ),
    Mutant(
        name="accepted rows of windows taken from the front",
        area="commit",
        file="sglang_dspark/backends/cpu/context_kernels.py",
        old="found[at] = r * width + k",
        new="found[at] = at",
        tests=("tests/backends/cpu/test_context_kv.py::test_the_cache_is_upstreams",),
    ),
    Mutant(
        name="context keys rotated the other way",
        area="commit",
        file="sglang_dspark/backends/cpu/fused_ops.py",
        old="first[d] = fma(a, cosine[d], -(b * sine[d]))",
        new="first[d] = fma(a, cosine[d], b * sine[d])",
        tests=("tests/backends/cpu/test_context_kv.py::test_the_cache_is_upstreams",),
    ),
    Mutant(
        name="a host admits whatever the requests sample by",
        area="admission",
        file=DEVICE,
        old="engine.admit(step, confidence, greedy)",
        new="engine.admit(step, confidence, None)",
        tests=(DEVICE_TESTS,),
    ),
    Mutant(
        name="a prefill goes unnoticed",
        area="engine",
        file=STEP,
        old="    state.engine.interrupted()\n",
        new="",
        tests=(SEAM_TESTS,),
    ),
    Mutant(
        name="min-p missing",
        area="target law",
        file="sglang_dspark/backends/cpu/accept.py",
        old="min_p=_by_row(sampling_info.min_ps, rows)",
        new="min_p=torch.zeros_like(_by_row(sampling_info.min_ps, rows))",
        tests=("tests/backends/cpu/test_accept_target_probs.py::test_law_is_the_samplers",),
    ),
    Mutant(
        name="settings of another request",
        area="target law",
        file="sglang_dspark/backends/cpu/accept.py",
        old="return values.reshape(-1).repeat_interleave(rows, 0)",
        new="return values.reshape(-1).flip(0).repeat_interleave(rows, 0)",
        tests=(
            "tests/backends/cpu/test_accept_target_probs.py::test_each_request_has_its_own_settings_and_rows",
        ),
    ),
    Mutant(
        name="drafts' noise one position late",
        area="seeded sampling",
        file="sglang_dspark/backends/cpu/draft.py",
        old="[seeds.rows, None].long() + torch.arange(depth)",
        new="[seeds.rows, None].long() + 1 + torch.arange(depth)",
        tests=("tests/backends/cpu/test_seeded_ops.py::test_waits_of_a_block_are_the_seeded_rows",),
    ),
    Mutant(
        name="seeded drafts all by the first position's waits",
        area="seeded sampling",
        file="sglang_dspark/backends/cpu/reduced_head.py",
        old="_first_arrival(scaled[seeded.rows], seeded.waits[:, k])",
        new="_first_arrival(scaled[seeded.rows], seeded.waits[:, 0])",
        tests=(
            "tests/backends/cpu/test_seeded_ops.py::test_seeded_drafts_are_the_seeds_own_choices",
        ),
    ),
    Mutant(
        name="a greedy request beside sampled ones drafts by chance",
        area="draft law",
        file="sglang_dspark/backends/cpu/reduced_head.py",
        old="column = torch.where(sampled, column, step.argmax(-1))",
        new="pass",
        tests=("tests/backends/cpu/test_reduced_head.py",),
    ),
    Mutant(
        name="every draft of a block by one uniform",
        area="draft law",
        file="sglang_dspark/backends/cpu/reduced_head.py",
        old="uniforms[:, k])",
        new="uniforms[:, 0])",
        tests=(
            "tests/backends/cpu/test_accept_distribution.py::test_two_tokens_follow_the_target",
        ),
    ),
    Mutant(
        name="coins in float32",
        area="accept",
        file="sglang_dspark/backends/cpu/accept.py",
        old="accept_uniforms=torch.rand(requests, width - 1, dtype=torch.float64)",
        new="accept_uniforms=torch.rand(requests, width - 1)",
        tests=(
            "tests/backends/cpu/test_accept_distribution.py::test_coins_are_finer_than_float32",
        ),
    ),
    Mutant(
        name="upstream's coins as they come",
        area="accept",
        file="sglang_dspark/backends/cpu/verify_ops.py",
        old="return uniforms.double() + torch.rand_like(uniforms, dtype=torch.float64) * 2.0**-24",
        new="return uniforms.double()",
        tests=(
            "tests/backends/cpu/test_verify_ops.py::test_a_coin_of_zero_keeps_no_improbable_draft",
        ),
    ),
    Mutant(
        name="a request without a seed drawn by one",
        area="seeded sampling",
        file="sglang_dspark/backends/cpu/accept.py",
        old="outcome[0].index_copy(0, rows, drawn.accepted.to(torch.int32)),",
        new="drawn.accepted.to(torch.int32)[:1].expand(len(lens)),",
        tests=(
            "tests/backends/cpu/test_seeded_ops.py::test_seeded_greedy_and_free_requests_in_one_batch",
        ),
    ),
    Mutant(
        name="compiled draws with a bound that costs winners",
        area="seeded sampling",
        file="sglang_dspark/backends/cpu/seeded_ops.py",
        old="(1 - u) * _MARGIN > best * p",
        new="(1 - u) * 2 > best * p",
        tests=("tests/backends/cpu/test_seeded_ops.py::test_compiled_choice_is_the_references",),
    ),
    Mutant(
        name="engine swaps the regimes",
        area="calibration",
        file=ENGINE,
        old="np.where(greedy.numpy(), GREEDY, SAMPLED)",
        new="np.where(greedy.numpy(), SAMPLED, GREEDY)",
        tests=(f"{ENGINE_TESTS}::test_sampled_and_greedy_requests_are_calibrated_apart",),
    ),
    Mutant(
        name="fairness floor ignored",
        area="admission",
        file=ENGINE,
        old="np.full(len(slots), self._floor) if self._floor else None",
        new="None",
        tests=(f"{ENGINE_TESTS}::test_a_fairness_floor_gives_every_request_drafts",),
    ),
    Mutant(
        name="a prefill's time counted as a step's",
        area="engine",
        file=ENGINE,
        old="last.ended = None if self._interrupted else now",
        new="last.ended = now",
        tests=(f"{LEARNING}::test_a_step_that_a_prefill_followed_is_not_timed_but_learned",),
    ),
    Mutant(
        name="tokens of an ended request count as delivered",
        area="engine",
        file=ENGINE,
        old="lost += drafts + 1",
        new="lost += 0",
        tests=(f"{LEARNING}::test_tokens_behind_an_answers_end_are_lost",),
    ),
    Mutant(
        name="a plain phase never plans again",
        area="engine",
        file=REUSE,
        old="if not same or self._made >= MOST:",
        new="if not same:",
        tests=(f"{ENGINE_TESTS}::test_most_steps_of_a_plain_phase_repeat_its_plan",),
    ),
    Mutant(
        name="a speed target inherited with the slot",
        area="engine",
        file="sglang_dspark/serving/speed_targets.py",
        old="ours = self._generation[rows] == generations",
        new="ours = self._generation[rows] >= 0",
        tests=("tests/serving/test_speed_targets.py::test_a_row_does_not_inherit",),
    ),
    Mutant(
        name="the last steps before rest are never counted",
        area="engine",
        file=ENGINE,
        old="            self._all_ended()\n",
        new="            pass\n",
        tests=(REST,),
    ),
    Mutant(
        name="steps learned in batches are left out at rest",
        area="engine",
        file=ENGINE,
        old="        self._learn_all()\n        self.metrics.hand_over()",
        new="        self.metrics.hand_over()",
        tests=(REST,),
    ),
)
