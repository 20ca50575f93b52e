"""Read files of prompts in several formats as rows of JSON text.

JSONL, one JSON list, and one JSON object with the list in its field `data`, all in UTF-8; Parquet;
and each of them in gzip. Other known formats are rejected by name. A line that is not UTF-8 is a
broken row like any other: the reader of its row gets a ValueError.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import MOST_RECORDED, brief, fault, parse_json
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.conversations import rows_of

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
# First bytes, format, fix. UTF-32 goes first: its mark begins with that of UTF-16.
_REFUSED = (
    (b"\xff\xfe\0\0", "UTF-32 text", "write it in UTF-8"),
    (b"\0\0\xfe\xff", "UTF-32 text", "write it in UTF-8"),
    (b"\xff\xfe", "UTF-16 text", "write it in UTF-8: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "write it in UTF-8: iconv -f UTF-16 -t UTF-8"),
    (b"{\0", "UTF-16 text", "write it in UTF-8: iconv -f UTF-16LE -t UTF-8"),
    (b"\0{", "UTF-16 text", "write it in UTF-8: iconv -f UTF-16BE -t UTF-8"),
    (b"PK\x03\x04", "a ZIP archive", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed with Zstandard", "unpack it"),
    (b"BZh", "compressed with bzip2", "unpack it"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it"),
    (b"ARROW1", "an Arrow file", "write it as Parquet or JSONL"),
    (b"SQLite format 3", "an SQLite database", "write its rows as JSONL"),
)
_TABLES = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class FileRow:
    """One row. number: from 1; place: its position in words; line: its JSON, not checked."""

    number: int
    place: str
    line: str

    def text(self) -> str:
        """Return the row's JSON. Raises ValueError if it has bytes that are not UTF-8."""
        try:
            self.line.encode()
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) - 0xDC00  # as `surrogateescape` encodes it
            raise ValueError(
                f"not UTF-8: byte 0x{byte:02x} at character {error.start + 1} of the row"
            ) from None
        return self.line


def parse_row(row: FileRow) -> dict[str, Any]:
    """Return the fields of a row that are not null: tables write null for fields that a row lacks.

    Raises ValueError in one short line if the row is no JSON object.
    """
    try:
        value = parse_json(row.text(), finite=False)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return {name: each for name, each in value.items() if each is not None}


def file_rows(path: Path) -> Iterator[FileRow]:
    """Yield the rows of a prompt file.

    Raises DSparkError if the file cannot be read, has an unsupported format, or is broken as a
    whole.
    """
    try:
        content = _unpacked(path)
    except OSError as error:
        raise DSparkError(f"cannot read prompts from {path}: {fault(error)}") from None
    if content.startswith(_PARQUET):
        yield from _parquet_rows(path, content)
        return
    _require_json(path, content)
    text = content.decode("utf-8", errors="surrogateescape")
    try:
        for number, place, line in rows_of(text):
            yield FileRow(number, place, line)
    except ValueError as error:
        raise DSparkError(f"{path}, {error}") from None


def _unpacked(path: Path) -> bytes:
    """Return the file's content, decompressed if it is gzip."""
    content = path.read_bytes()
    if not content.startswith(_GZIP):
        return content
    try:
        with gzip.open(path) as file:
            content = file.read(MOST_RECORDED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DSparkError(f"{path} is a damaged gzip file ({fault(error)})") from None
    if len(content) > MOST_RECORDED:
        raise DSparkError(f"{path} holds more than {MOST_RECORDED >> 20} MiB; split it")
    return content


def _require_json(path: Path, content: bytes) -> None:
    """Raise DSparkError that names the format of a file, if it is known and not JSON."""
    for mark, what, fix in _REFUSED:
        if content.startswith(mark):
            raise DSparkError(f"{path} is {what}; {fix}")
    name = path.with_suffix("") if path.suffix == ".gz" else path
    first = next((line for line in content.splitlines() if line.strip()), b"")
    if name.suffix.lower() in _TABLES and not first.lstrip().startswith((b"{", b"[")):
        what = "TSV" if _TABLES[name.suffix.lower()] == "\t" else "CSV"
        shown = brief(first.decode(errors="replace"), 40)
        raise DSparkError(
            f"{path} is {what} (it begins {shown!r}); write a JSON object a line: "
            '{"prompt": "..."}'
        )


def _parquet_rows(path: Path, content: bytes) -> Iterator[FileRow]:
    """Yield the rows of a Parquet file; a row has no field for a column that is null in it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        # No Arrow threads: one that still runs when the interpreter ends aborts the process
        # (apache/arrow#34314).
        for batch in pq.ParquetFile(pa.BufferReader(content)).iter_batches(use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield FileRow(number, f"row {number}", _as_json(row))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DSparkError(f"{path} is no whole Parquet file ({fault(error)})") from None


def _as_json(row: dict[str, Any]) -> str:
    known = {name: value for name, value in row.items() if value is not None}
    return json.dumps(known, default=str, ensure_ascii=False)
