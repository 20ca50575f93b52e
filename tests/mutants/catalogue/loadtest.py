"""Figures of served runs: SLA capacity, goodput, percentiles, acceptance, frontiers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SLA = "loadtest/sweep/sla.py"
MEASURE = "loadtest/client/measure.py"
METRICS = "loadtest/client/metrics.py"
CAPACITY = ("tests/loadtest/test_frontier.py",)
RECORDS = "tests/loadtest/test_records.py"
COUNTS = "tests/loadtest/test_metrics.py"
STREAM, STREAMS = "loadtest/client/stream.py", "tests/loadtest/test_stream.py"
CHECKS = "loadtest/sweep/answer_checks.py"

MUTANTS = (
    Mutant(
        name="capacity by the best criterion",
        area="SLA",
        file=SLA,
        old="worst = np.min([*fits.values()], axis=0)",
        new="worst = np.max([*fits.values()], axis=0)",
        tests=CAPACITY,
    ),
    Mutant(
        name="a level that is just held counts as missed",
        area="SLA",
        file=SLA,
        old="holding = int((worst >= 1).sum())",
        new="holding = int((worst > 1).sum())",
        tests=CAPACITY,
    ),
    Mutant(
        name="waiting longer is better",
        area="SLA",
        file=SLA,
        old="[sla.ttft_p95 / max(point.ttft_p95, 1e-9) for point in ordered]",
        new="[point.ttft_p95 / sla.ttft_p95 for point in ordered]",
        tests=CAPACITY,
    ),
    Mutant(
        name="the slowest tenth judged by the median",
        area="SLA",
        file=SLA,
        old="point.speed_p10 / sla.speed_p10",
        new="point.speed_p50 / sla.speed_p10",
        tests=CAPACITY,
    ),
    Mutant(
        name="a lucky point raises the fit",
        area="SLA",
        file=SLA,
        old="while pools and pools[-1][0] < mean:",
        new="while pools and pools[-1][0] > mean:",
        tests=CAPACITY,
    ),
    Mutant(
        name="throughput at the load that missed",
        area="SLA",
        file=SLA,
        old="load = inside + share * (outside - inside)",
        new="load = outside",
        tests=CAPACITY,
    ),
    Mutant(
        name="failed requests counted as served",
        area="SLA",
        file=MEASURE,
        old="inside = sum(_tokens_within(record, begin, end) for record in done)",
        new="inside = sum(_tokens_within(record, begin, end) for record in records)",
        tests=(f"{RECORDS}::test_failures_are_counted_and_their_tokens_are_not",),
    ),
    Mutant(
        name="tokens of failed requests in the total",
        area="SLA",
        file=MEASURE,
        old="tokens=sum(record.total_tokens for record in done)",
        new="tokens=sum(record.total_tokens for record in records)",
        tests=(f"{RECORDS}::test_failures_are_counted_and_their_tokens_are_not",),
    ),
    Mutant(
        name="percentiles swapped",
        area="metrics",
        file=MEASURE,
        old="np.percentile(known, [10, 50, 90, 95, 99])",
        new="np.percentile(known, [90, 50, 10, 95, 99])",
        tests=(f"{RECORDS}::test_percentiles_leave_out_what_is_not_known",),
    ),
    Mutant(
        name="p95 of the median's column",
        area="metrics",
        file="loadtest/sweep/summary.py",
        old="ttft = cell.ttft.p95\n",
        new="ttft = cell.ttft.p50\n",
        tests=("tests/loadtest/test_summary.py",),
    ),
    Mutant(
        name="void cells compared",
        area="metrics",
        file="loadtest/sweep/summary.py",
        old="if not c.void and c.tokens_per_s",
        new="if c.tokens_per_s",
        tests=("tests/loadtest/test_summary.py::test_void_cells_are_left_out_and_said",),
    ),
    Mutant(
        name="an error event is an answer",
        area="metrics",
        file=STREAM,
        old='if event.name == "error":',
        new="if False:",
        tests=(f"{STREAMS}::test_an_error_in_the_stream_is_no_end",),
    ),
    Mutant(
        name="an error of null is an error",
        area="metrics",
        file=STREAM,
        old='if value.get("error") or',
        new='if "error" in value or',
        tests=(f"{STREAMS}::test_no_error_is_no_error",),
    ),
    Mutant(
        name="a stream without a finish reason counts",
        area="metrics",
        file=STREAM,
        old="if not self.finish_reason or self._unfinished:",
        new="if False:",
        tests=(f"{STREAMS}::test_a_stream_without_a_finish_reason_is_cut",),
    ),
    Mutant(
        name="all tokens come with the usage at the end",
        area="metrics",
        file=STREAM,
        old="if self._uncounted and self._reported:",
        new="if False:",
        tests=(f"{STREAMS}::test_a_usage_at_the_end_is_spread_over_the_text",),
    ),
    Mutant(
        name="cells without a speed lose their throughput",
        area="metrics",
        file="loadtest/sweep/summary.py",
        old="if not c.void and c.tokens_per_s]",
        new="if not c.void and c.tokens_per_s and c.speed.p50]",
        tests=(
            "tests/loadtest/test_summary.py::"
            "test_cells_without_a_speed_per_user_keep_their_throughput",
        ),
    ),
    Mutant(
        name="the shortest answer is the median",
        area="metrics",
        file=CHECKS,
        old="statistics.median(shares) <",
        new="min(shares) <",
        tests=(
            "tests/loadtest/test_answer_checks.py::"
            "test_few_tokens_are_less_where_answers_were_to_be_whole",
        ),
    ),
    Mutant(
        name="the drain counted as load",
        area="metrics",
        file=MEASURE,
        old="begin, end = sent[users - 1], min(ends, default=sent[-1])",
        new="begin, end = sent[0], max(ends, default=sent[-1])",
        tests=(f"{RECORDS}::test_throughput_is_taken_while_all_users_are_busy",),
    ),
    Mutant(
        name="a client that lags is compared",
        area="metrics",
        file=MEASURE,
        old="if lag_ms > MAX_LAG_MS:",
        new="if lag_ms > 1000 * MAX_LAG_MS:",
        tests=(f"{RECORDS}::test_a_client_that_lags_voids_the_cell",),
    ),
    Mutant(
        name="tau without the bonus",
        area="metrics",
        file=METRICS,
        old="return 1.0 + self.accepted / self.steps",
        new="return self.accepted / self.steps",
        tests=(f"{COUNTS}::test_counts_add_up_over_requests",),
    ),
    Mutant(
        name="acceptance of the position behind",
        area="metrics",
        file=METRICS,
        old="sum(self.histogram[k:]) / steps",
        new="sum(self.histogram[k + 1 :]) / steps",
        tests=(f"{COUNTS}::test_counts_add_up_over_requests",),
    ),
    Mutant(
        name="speed counts the first token",
        area="metrics",
        file=METRICS,
        old="return self.tokens - self.chunks[0].tokens",
        new="return self.tokens",
        tests=(f"{COUNTS}::test_speed_leaves_out_the_first_token",),
    ),
    Mutant(
        name="a frontier that goes on where nothing was measured",
        area="metrics",
        file="loadtest/sweep/frontier.py",
        old="if not best or throughput > best[-1].throughput:",
        new="if not best:",
        tests=CAPACITY,
    ),
)
