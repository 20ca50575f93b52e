"""Figures of served runs: SLA capacity, goodput, percentiles, acceptance, frontiers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SLA = "loadtest/sweep/sla.py"
MEASURE = "loadtest/client/measure.py"
METRICS = "loadtest/client/metrics.py"
CAPACITY = ("tests/loadtest/test_frontier.py",)
RECORDS = "tests/loadtest/test_records.py"
COUNTS = "tests/loadtest/test_metrics.py"

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
