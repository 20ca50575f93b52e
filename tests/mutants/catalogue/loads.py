"""What a sweep sends and asks for: running servers, recorded loads, repeats, bursts, held rates."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SERVED = "loadtest/sweep/served.py"
TRACES = "loadtest/client/traces.py"
REPLAY = "loadtest/client/replay.py"
CELL = "loadtest/client/cell.py"
SCHEDULE = "loadtest/client/schedule.py"
KEPT = "loadtest/sweep/kept.py"
BURSTS = "loadtest/sweep/bursts.py"
HOLD = "loadtest/sweep/hold.py"
HOLDING = "loadtest/sweep/holding.py"
OF_SERVED = "tests/loadtest/test_served_sweep.py"
OF_TRACES = "tests/loadtest/test_traces.py"
OF_REPEATS = "tests/loadtest/test_repeats.py"
OF_BURSTS = "tests/loadtest/test_bursts.py"
OF_HOLD = "tests/loadtest/test_hold.py"
COMPARABLE = (f"{OF_SERVED}::test_servers_that_cannot_be_compared_are_refused",)
SHARED = (f"{OF_TRACES}::test_prompts_are_as_long_as_stated_and_share_what_was_shared",)
MONOTONE = (f"{OF_HOLD}::test_a_monotone_server_is_bracketed_as_narrow_as_asked",)

MUTANTS = (
    Mutant(
        name="arms of two models are compared",
        area="served arms",
        file=SERVED,
        old="if _place(ours) != _place(theirs):",
        new="if False:",
        tests=COMPARABLE,
    ),
    Mutant(
        name="a scheduled arm without counters",
        area="served arms",
        file=SERVED,
        old="if each.algorithm == _SCHEDULES and not each.metrics:",
        new="if each.algorithm == _SCHEDULES and each.metrics is None:",
        tests=COMPARABLE,
    ),
    Mutant(
        name="the bonus token counts as a draft",
        area="served arms",
        file="loadtest/servers/ask.py",
        old="_MOST_DRAFTS) - 1",
        new="_MOST_DRAFTS)",
        tests=(f"{OF_SERVED}::test_a_server_is_asked",),
    ),
    Mutant(
        name="a trace's milliseconds as seconds",
        area="traces",
        file=TRACES,
        old="return _seconds(value / 1000)",
        new="return _seconds(value)",
        tests=(f"{OF_TRACES}::test_mooncake_is_read",),
    ),
    Mutant(
        name="a trace goes back in time",
        area="traces",
        file=TRACES,
        old="if row.at < before:",
        new="if row.at < 0:",
        tests=(f"{OF_TRACES}::test_what_is_wrong_is_named_with_its_line",),
    ),
    Mutant(
        name="failed requests of a trace are sent",
        area="traces",
        file=TRACES,
        old="if row.answer_tokens == 0 or (",
        new="if (",
        tests=(f"{OF_TRACES}::test_the_made_traces_are_what_the_script_makes",),
    ),
    Mutant(
        name="blocks of one number differ",
        area="traces",
        file=REPLAY,
        old='return [(("hash", block), length)',
        new='return [((f"hash{row.line}", block), length)',
        tests=SHARED,
    ),
    Mutant(
        name="unlike blocks begin alike",
        area="traces",
        file=REPLAY,
        old="tokens = self._mark(number, of)",
        new="tokens = self._mark(0, of)",
        tests=SHARED,
    ),
    Mutant(
        name="every trial has the same text",
        area="traces",
        file=REPLAY,
        old="np.random.default_rng([seed, number])",
        new="np.random.default_rng([0, number])",
        tests=(f"{OF_TRACES}::test_trials_get_other_text_and_speed_moves_the_times",),
    ),
    Mutant(
        name="repeats by name, not by content",
        area="repeats",
        file=CELL,
        old="contents = {json.dumps(self.prompts[prompt].content) for prompt in used}",
        new="contents = used",
        tests=(f"{OF_REPEATS}::test_repeats_are_counted_by_content",),
    ),
    Mutant(
        name="repeats are refused where they are wanted",
        area="repeats",
        file="loadtest/sweep/plan.py",
        old='if config.repeats != "refuse":',
        new='if config.repeats == "note":',
        tests=(f"{OF_REPEATS}::test_a_cell_with_repeats_is_refused_where_that_is_asked",),
    ),
    Mutant(
        name="a request belongs to the phase that follows its own",
        area="bursts",
        file=SCHEDULE,
        old='return "burst" if at < self.before_s + self.burst_s else "after"',
        new='return "burst" if at < self.burst_s else "after"',
        tests=(f"{OF_BURSTS}::test_the_burst_has_as_many_more_as_asked",),
    ),
    Mutant(
        name="a burst of the base rate",
        area="bursts",
        file=SCHEDULE,
        old="generator.poisson(self.rate * factor * seconds)",
        new="generator.poisson(self.rate * seconds)",
        tests=(f"{OF_BURSTS}::test_the_burst_has_as_many_more_as_asked",),
    ),
    Mutant(
        name="phases count failed requests as answered",
        area="bursts",
        file=KEPT,
        old="ok=len(done),\n                ttft_p50",
        new="ok=len(own),\n                ttft_p50",
        tests=(f"{OF_BURSTS}::test_requests_belong_to_the_phase_in_which_they_were_due",),
    ),
    Mutant(
        name="arms of a burst are mixed",
        area="bursts",
        file=BURSTS,
        old="if (cell.arm, cell.level) == (name, level)]",
        new="if cell.level == level]",
        tests=(f"{OF_BURSTS}::test_trials_are_put_together_arm_by_arm",),
    ),
    Mutant(
        name="a lucky probe above one that missed counts",
        area="held rates",
        file=HOLD,
        old="if p.held and (missed is None or p.rate < missed)]",
        new="if p.held]",
        tests=(f"{OF_HOLD}::test_noise_never_puts_the_held_rate_above_one_that_missed",),
    ),
    Mutant(
        name="the search goes on for ever",
        area="held rates",
        file=HOLD,
        old="if len({probe.rate for probe in probes}) >= most:",
        new="if len(probes) > 2 * most:",
        tests=(f"{OF_HOLD}::test_the_number_of_probes_is_bounded_and_says_the_truth",),
    ),
    Mutant(
        name="the search ends at a wide bracket",
        area="held rates",
        file=HOLD,
        old="elif found.missed <= found.held * (1 + narrow):",
        new="elif found.missed <= found.held * (2 + narrow):",
        tests=MONOTONE,
    ),
    Mutant(
        name="failed requests are left out of p95",
        area="held rates",
        file=KEPT,
        old="shares = len(first) / len(records), len(later) / len(records)",
        new="shares = len(first) / len(done), len(later) / len(done)",
        tests=(f"{OF_HOLD}::test_p95_is_nineteen_of_twenty_and_failures_are_late",),
    ),
    Mutant(
        name="goodput of requests that kept one limit",
        area="held rates",
        file=KEPT,
        old="if record.index in first & later]",
        new="if record.index in first | later]",
        tests=(f"{OF_HOLD}::test_p95_is_nineteen_of_twenty_and_failures_are_late",),
    ),
    Mutant(
        name="a void probe is asked for again",
        area="held rates",
        file=HOLDING,
        old="if probe.name not in measured:",
        new="if probe.name:",
        tests=(f"{OF_HOLD}::test_each_arm_is_probed_where_it_tells_most",),
    ),
    Mutant(
        name="one trial that held is enough",
        area="held rates",
        file=HOLDING,
        old="Probe(rate, all(c.within.held",
        new="Probe(rate, any(c.within.held",
        tests=(f"{OF_HOLD}::test_the_summary_says_what_each_arm_holds",),
    ),
)
