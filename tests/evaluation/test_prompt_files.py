"""Prompt files in every format that is read, and the name of each that is not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompt_files import FileRow, file_rows, parse_row
from sglang_dspark.evaluation.prompts import read_prompts
from sglang_dspark.training.prompts import read_prompts as read_training_prompts

ROWS: list[dict[str, Any]] = [
    {"prompt": "caf\u00e9"},
    {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}]},
    {"prompt": "three", "domain": "math"},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def parquet(path: Path) -> bytes:
    columns = {name: None for row in ROWS for name in row}
    table = pa.Table.from_pylist([columns | row for row in ROWS])  # null where a row lacks one
    pq.write_table(table, path)
    return path.read_bytes()


def written(folder: Path, form: str) -> Path:
    path = folder / f"some.{form}"
    if "parquet" in form:
        content = parquet(folder / "plain")
    elif form.startswith("json."):
        content = json.dumps({"data": ROWS}).encode()
    else:
        content = LINES.encode("utf-8-sig" if form == "jsonl" else "utf-8")
    path.write_bytes(gzip.compress(content) if form.endswith("gz") else content)
    return path


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "json.txt", "parquet", "parquet.gz"])
def test_both_readers_read_the_same_rows_of_each_format(tmp_path: Path, form: str) -> None:
    path = written(tmp_path, form)
    assert [parse_row(row) for row in file_rows(path)] == ROWS
    assert [prompt.turns[-1] for prompt in read_prompts(path)] == ["caf\u00e9", "two", "three"]
    trained = read_training_prompts(path)
    assert [(row.turns, row.domain) for row in trained] == [
        (("caf\u00e9",), "chat"),
        (("two",), "chat"),
        (("three",), "math"),
    ]
    assert trained[1].answer == "2"
    place = "row 2" if "parquet" in form else "line 1, entry 2" if "json." in form else "line 2"
    assert trained[1].where == f"{path}, {place}"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", LINES.encode("utf-16"), r"is UTF-16 text; write it in UTF-8: iconv"),
        ("a.jsonl", b"\xfe\xff" + LINES.encode("utf-16-be"), "is UTF-16 text"),
        ("a.jsonl", LINES.encode("utf-16-le"), "is UTF-16 text.*UTF-16LE"),
        ("a.jsonl", LINES.encode("utf-16-be"), "is UTF-16 text.*UTF-16BE"),
        ("a.jsonl", LINES.encode("utf-32"), "is UTF-32 text"),
        ("a.csv", b"prompt,answer\nhi,ho\n", "is CSV .it begins 'prompt,answer'"),
        ("a.CSV", b"\n\nprompt,answer\nhi,ho\n", "is CSV"),
        ("a.tsv", b"prompt\tanswer\n", "is TSV"),
        ("a.csv.gz", gzip.compress(b"prompt,answer\nhi,ho\n", mtime=0), "is CSV"),
        ("a.zip", b"PK\x03\x04rest", "is a ZIP archive; unpack it"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfdrest", "is compressed with Zstandard"),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:40], "is a damaged gzip file"),
        ("a.jsonl.gz", b"\x1f\x8bno", "is a damaged gzip file"),
        ("a.jsonl.gz", gzip.compress(LINES.encode("utf-16"), mtime=0), "is UTF-16 text"),
        ("a.parquet", b"PAR1 and no more", "is no whole Parquet file"),
        ("a.arrow", b"ARROW1\0\0", "is an Arrow file"),
    ],
)
def test_another_format_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for read in (read_prompts, read_training_prompts):
        with pytest.raises(DSparkError, match=said) as error:
            read(path)
        assert str(error.value).startswith(str(path))
        assert "\n" not in str(error.value)


def test_json_lines_in_a_file_of_that_name_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(LINES, encoding="utf-8")
    assert len(read_prompts(path)) == 3


def test_a_parquet_file_cut_off_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    whole = parquet(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DSparkError, match="is no whole Parquet file"):
        list(file_rows(path))


def test_null_is_no_field() -> None:
    row = FileRow(1, "line 1", '{"prompt": null, "turns": ["a"], "response": null}')
    assert parse_row(row) == {"turns": ["a"]}
