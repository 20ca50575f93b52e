"""Records on disk and the figures taken from them, against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_dspark.cli._records_view import show_records
from sglang_dspark.cli.main import app
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.measure import Spread, measure_cell, merge
from sglang_dspark.loadtest.client.metrics import SpecStats
from sglang_dspark.loadtest.client.records import Header, Outcome, Record
from sglang_dspark.loadtest.client.records_file import (
    FORMAT,
    SCHEMA,
    read_records,
    write_records,
)
from sglang_dspark.loadtest.sweep.kept import percentiles

CALM = {"p50": 0.1, "p99": 0.5, "max": 1.0}
HEADER = Header(worker=0, workers=1, began_unix=1000.0, fingerprint="f", lag_ms=CALM)


def record(
    index: int,
    sent: float | None,
    at: tuple[float, ...] = (),
    tokens: tuple[int, ...] = (),
    *,
    outcome: Outcome = "ok",
    scheduled: float | None = None,
    spec: SpecStats | None = None,
) -> Record:
    return Record(
        index=index,
        prompt=f"p{index}",
        domain="math",
        outcome=outcome,
        scheduled=scheduled,
        sent=sent,
        ended=at[-1] if at else sent,
        at=at,
        tokens=tokens,
        spec=spec,
    )


ONE = record(0, 1.0, (1.5, 1.8, 1.9), (1, 3, 1))


def test_times_of_one_request() -> None:
    assert ONE.ttft == pytest.approx(0.5)
    assert ONE.seconds == pytest.approx(0.9)
    assert (ONE.total_tokens, ONE.decode_tokens) == (5, 4)
    assert ONE.tpot == pytest.approx(0.1)
    assert ONE.tokens_per_s == pytest.approx(10)


def test_itl_spreads_a_chunk_over_its_tokens() -> None:
    assert ONE.itl() == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert sum(ONE.itl()) == pytest.approx(ONE.at[-1] - ONE.at[0])
    # text that came without a token: its time belongs to the next one
    silent = record(0, 1.0, (1.5, 1.6, 1.9), (1, 0, 1))
    assert silent.itl() == pytest.approx([0.4])


def test_latency_counts_from_the_scheduled_time() -> None:
    late = replace(ONE, scheduled=0.2)
    assert late.ttft == pytest.approx(1.3)
    assert late.tokens_per_s == ONE.tokens_per_s


def test_a_short_answer_has_no_speed() -> None:
    short = record(0, 1.0, (1.5,), (1,))
    assert short.tpot != short.tpot
    assert short.tokens_per_s != short.tokens_per_s
    assert short.itl() == []


def test_files_keep_everything(tmp_path: Path) -> None:
    records = [
        replace(ONE, spec=SpecStats(2, 2, (1, 0, 1)), finish_reason="stop", status=200),
        record(1, None, outcome="unsent", scheduled=3.0),
        replace(record(2, 1.0, outcome="http"), status=503, error='busy "é"\n'),
    ]
    path = tmp_path / "new" / "records.parquet"
    write_records(path, HEADER, records)
    assert read_records(path) == (HEADER, records)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    table = pq.read_table(path)  # what any other reader sees
    assert table.column("outcome").to_pylist() == ["ok", "unsent", "http"]
    assert table.column("at").to_pylist() == [list(ONE.at), [], []]
    assert table.column("spec").to_pylist()[1:] == [None, None]


def test_a_file_without_a_request_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"  # of a worker whose share was nothing
    write_records(path, HEADER, [])
    assert read_records(path) == (HEADER, [])


def test_records_are_not_written_where_that_is_forbidden(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DSparkError, match="cannot write records"):
        write_records(tmp_path / "file" / "r.parquet", HEADER, [ONE])


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    with pytest.raises(DSparkError, match="cannot read"):
        read_records(path)
    write_records(path, HEADER, [ONE] * 50)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DSparkError, match="is not a file of load records"):
        read_records(path)
    path.write_bytes(b"hello\n")
    with pytest.raises(DSparkError, match="is not a file of load records"):
        read_records(path)
    for metadata, said in (
        (None, "is not a file of load records"),
        ({FORMAT: "[]"}, "is not a file of load records"),
        ({FORMAT: '{"version": 3, "worker": 0}'}, "is not a file of load records"),
        ({FORMAT: '{"version": 2}'}, "another version"),
    ):
        pq.write_table(SCHEMA.with_metadata(metadata).empty_table(), path)
        with pytest.raises(DSparkError, match=said):
            read_records(path)
    strange = pa.table({"a": [1]}).replace_schema_metadata({FORMAT: '{"version": 3}'})
    pq.write_table(strange, path)
    with pytest.raises(DSparkError, match="is not a file of load records"):
        read_records(path)


def test_throughput_is_taken_while_all_users_are_busy() -> None:
    # two users, four requests of 2 tokens: the second begins at 1, the last is sent at 4
    records = [
        record(0, 0.0, (0.5, 3.0), (1, 1)),
        record(1, 1.0, (2.0, 4.0), (1, 1)),
        record(2, 3.0, (3.5, 6.0), (1, 1)),
        record(3, 4.0, (5.0, 9.0), (1, 1)),
    ]
    measured = measure_cell(HEADER, records, users=2)
    assert measured.window == (1.0, 6.0)
    # request 0 has 2 of the 2.5 s of its second token inside, request 3 has 1 of 4 s
    assert measured.tokens_per_s == pytest.approx((0.8 + 2 + 2 + 1.25) / 5)
    assert (measured.tokens, measured.requests, measured.ok) == (8, 4, 4)
    assert measured.void == ""
    whole = measure_cell(HEADER, records, users=3)  # too few requests for a steady part
    assert whole.window == (0.0, 9.0)
    assert whole.tokens_per_s == pytest.approx(8 / 9)


def test_failures_are_counted_and_their_tokens_are_not() -> None:
    records = [
        ONE,
        record(1, 1.0, (1.2, 1.4), (1, 5), outcome="cut"),
        replace(record(2, 1.0, outcome="http"), error="busy"),
        record(3, None, outcome="unsent"),
    ]
    measured = measure_cell(HEADER, records, users=None)
    assert measured.failures == {"cut": 1, "http": 1, "unsent": 1}
    assert (measured.requests, measured.ok, measured.tokens) == (4, 1, 5)
    assert measured.tokens_per_s == pytest.approx(5 / 1.9)
    nothing = measure_cell(HEADER, records[1:], users=None)
    assert "no request came through: 1 cut, 1 http (busy), 1 unsent" in nothing.void
    assert nothing.tokens_per_s != nothing.tokens_per_s
    assert nothing.window == (0.0, 0.0)


def test_a_client_that_lags_voids_the_cell() -> None:
    slow_timer = replace(HEADER, lag_ms={**CALM, "p99": 5.1})
    assert "late by 5.1 ms" in measure_cell(slow_timer, [ONE], users=1).void
    late = replace(ONE, scheduled=0.99)
    assert "late by 10.0 ms" in measure_cell(HEADER, [late], users=None).void
    assert measure_cell(HEADER, [replace(ONE, scheduled=0.9951)], users=None).void == ""


def test_tau_is_of_all_steps() -> None:
    records = [
        replace(ONE, spec=SpecStats(4, 4, (0, 4))),
        replace(ONE, index=1, spec=SpecStats(1, 0, (1,))),
    ]
    measured = measure_cell(HEADER, records, users=1)
    assert measured.tau == pytest.approx(1 + 4 / 5)
    assert measured.spec.histogram == (1, 4)


def test_workers_are_laid_on_one_clock() -> None:
    second = replace(HEADER, worker=1, workers=2, began_unix=1002.0, lag_ms={**CALM, "p99": 3.0})
    first = replace(HEADER, workers=2)
    header, records = merge([(second, [replace(ONE, index=1, scheduled=0.9)]), (first, [ONE])])
    assert [r.index for r in records] == [0, 1]
    assert records[0] == ONE
    assert records[1].sent == pytest.approx(3.0)
    assert records[1].ttft == pytest.approx(0.6)
    assert header.lag_ms["p99"] == 3.0
    assert header.worker == 0
    late = replace(first, began_unix=1003.0), [ONE]
    later, _ = merge([late, (second, [replace(ONE, index=1)])])
    assert (later.worker, later.began_unix) == (0, 1002.0), "worker 1 began first"
    with pytest.raises(DSparkError, match="1 of 2 load workers"):
        merge([(first, [ONE])])
    with pytest.raises(DSparkError, match="different schedules"):
        merge([(first, []), (replace(second, fingerprint="g"), [])])
    with pytest.raises(DSparkError, match="no records"):
        merge([])


def test_percentiles_exclude_unknown_values() -> None:
    spread = Spread.of([float("nan"), *map(float, range(11))])
    assert (spread.mean, spread.p10, spread.p50, spread.p90) == (5, 1, 5, 9)
    assert Spread.of([]).p50 != Spread.of([]).p50


def test_percentiles_keep_their_names_in_a_cell() -> None:
    found = percentiles(Spread(mean=1.0, p10=2.0, p50=3.0, p90=4.0, p95=5.0, p99=float("nan")))
    assert found.model_dump() == {
        "mean": 1.0, "p10": 2.0, "p50": 3.0, "p90": 4.0, "p95": 5.0, "p99": None,
    }  # fmt: skip


def test_files_of_several_workers_are_shown_together(tmp_path: Path) -> None:
    for worker, index in enumerate((1, 0)):
        own = [replace(ONE, index=index), record(2 + worker, 1.0, outcome="cut")]
        header = replace(HEADER, worker=worker, workers=2)
        write_records(tmp_path / f"records-{worker}.parquet", header, own)
    shown = CliRunner().invoke(app, ["report", "--records", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "4 requests of 2 workers" in shown.output
    assert "2 answered, 2 cut; 10 tokens" in shown.output
    (tmp_path / "records-0.parquet").unlink()
    with pytest.raises(DSparkError, match="1 of 2 load workers"):
        show_records(Console(), tmp_path)


READS = """
import os, sys
from pathlib import Path
import pyarrow.parquet
from sglang_dspark.evaluation.prompt_files import file_rows
from sglang_dspark.loadtest.client.records_file import read_records

file = Path(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
read_records(file)
list(file_rows(file))
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_reading_leaves_no_thread(tmp_path: Path) -> None:
    """One of Arrow's that still ran as the interpreter ended aborted a finished command."""
    path = tmp_path / "w0.parquet"
    write_records(path, HEADER, [ONE])
    command = [sys.executable, "-c", READS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0


@pytest.mark.parametrize(("late", "lag_ms"), [(1, 1.0), (3, 9.0)])
def test_an_open_loop_is_late_by_its_last_hundredth(late: int, lag_ms: float) -> None:
    """Of 200 requests all but `late` are sent after 1 ms, those after 9 ms."""
    records = [
        record(i, i + (0.009 if i < late else 0.001), (i + 1.0,), (1,), scheduled=float(i))
        for i in range(200)
    ]
    assert measure_cell(HEADER, records, None).lag_ms == pytest.approx(lag_ms)


def test_percentiles_of_a_hundred_and_one_values() -> None:
    found = Spread.of([float("nan"), *map(float, range(101))])
    assert found == Spread(mean=50.0, p10=10.0, p50=50.0, p90=90.0, p95=95.0, p99=99.0)


@pytest.mark.parametrize(("request_", "more"), [(0, 0), (2, 4)])
def test_chunks_that_arrive_together_count_where_they_arrived(request_: int, more: int) -> None:
    """Two users, busy from 1 s to 6 s: four more tokens at 1 s are outside, at 6 s inside."""
    records = [
        record(0, 0.0, (0.5, 1.0), (1, 1)),
        record(1, 1.0, (2.0, 4.0), (1, 1)),
        record(2, 3.0, (3.5, 6.0), (1, 1)),
        record(3, 4.0, (5.0, 9.0), (1, 1)),
    ]
    longer = records.copy()
    own = records[request_]
    longer[request_] = replace(own, at=(*own.at, own.at[-1]), tokens=(*own.tokens, 4))
    before, after = (measure_cell(HEADER, each, users=2) for each in (records, longer))
    assert before.window == after.window == (1.0, 6.0)
    assert (after.tokens_per_s - before.tokens_per_s) * 5 == pytest.approx(more)
