"""Write `metrics.jsonl` of a run, one line per report; a resumed run continues its history."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.common.files import parse_json, reading
from sglang_dspark.training.files import disk_error


class Journal:
    """A file of reports; lines that an earlier run wrote past the resumed step are removed."""

    def __init__(self, path: Path, step: int):
        self.path = path
        with reading(path, "journal of a run", "move it away to go on without it"):
            lines = _whole_lines(path)
            kept = [line for line in lines if parse_json(line, finite=False)["step"] <= step]
        try:
            with replacing(path, alone=True) as temporary:
                temporary.write_text("".join(kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise disk_error(path, error) from None

    def write(self, step: int, means: dict[str, float]) -> None:
        """Add the means reported at `step`. Raises DSparkError if the disk is full."""
        try:
            self._file.write(json.dumps({"step": step, **means}) + "\n")
            self._file.flush()
        except OSError as error:
            raise disk_error(self.path, error) from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
