"""Write and read a cell's records as a Parquet file: a row per request, chunk times as lists.

The schema's metadata hold the header (process, start, the client's own lag). A file is written
under a temporary name and renamed, so an existing file is complete. Any Parquet reader opens it;
DuckDB: `select domain, outcome, at[1] - sent as ttft from 'RUN/cells/*.parquet'`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.common.files import FAULTS, fault, parse_json
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.metrics import SpecStats
from sglang_dspark.loadtest.client.records import Header, Record

SUFFIX = ".parquet"
FORMAT = "dspark-load-records"
VERSION = 3

# Units as in `records.Record`: seconds from the cell's start; `spec` is null without speculation.
SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("scheduled", pa.float64()),
        pa.field("sent", pa.float64()),
        pa.field("ended", pa.float64()),
        pa.field("at", pa.list_(pa.float64()), nullable=False),
        pa.field("tokens", pa.list_(pa.int64()), nullable=False),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("status", pa.int64(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field(
            "spec",
            pa.struct(
                [
                    ("steps", pa.int64()),
                    ("accepted", pa.int64()),
                    ("histogram", pa.list_(pa.int64())),
                ]
            ),
        ),
        pa.field("asked", pa.int64(), nullable=False),
        pa.field("loops", pa.bool_(), nullable=False),
    ]
)


def write_records(path: Path, header: Header, records: Sequence[Record]) -> None:
    """Write a file atomically. Raises DSparkError if `path` cannot be written."""
    head = json.dumps({"version": VERSION, **asdict(header)})
    rows = [asdict(record) for record in records]
    table = pa.Table.from_pylist(rows, SCHEMA.with_metadata({FORMAT: head}))
    try:
        with replacing(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")
    except OSError as error:
        raise DSparkError(f"cannot write records to {path}: {error.strerror or error}") from error


def read_records(path: Path) -> tuple[Header, list[Record]]:
    """Read one file. Raises DSparkError if it is not a complete file of this version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DSparkError(f"cannot read records from {path}: {error.strerror}") from None
    try:
        # Without Arrow's threads: one that still runs as the interpreter ends aborts the process
        # (apache/arrow#34314), so that a finished command exits with -6.
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        head = parse_json((table.schema.metadata or {})[FORMAT.encode()].decode(), finite=False)
        if head.pop("version") != VERSION:
            raise DSparkError(f"{path} was written by another version; measure the cell again")
        return Header(**head), [_record(row) for row in table.to_pylist()]
    except (pa.ArrowException, OSError, *FAULTS) as error:
        raise DSparkError(f"{path} is not a file of load records ({fault(error)})") from None


def _record(row: dict[str, Any]) -> Record:
    spec = row["spec"]
    if spec is not None:
        spec = SpecStats(**{**spec, "histogram": tuple(spec["histogram"])})
    sequences = {"at": tuple(row["at"]), "tokens": tuple(row["tokens"])}
    return Record(**{**row, **sequences, "spec": spec})
