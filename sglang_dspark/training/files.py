"""Write the files of a training run atomically, with a one-line error if writing fails."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.common.atomic_write import permit_as_new, replacing
from sglang_dspark.errors import DSparkError


def write_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    """Write a safetensors file. Raises DSparkError on failure, and the earlier file stays."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with _whole(path) as temporary:
        save_file(tensors, temporary, meta)
        permit_as_new(temporary)


def write_json(path: Path, value: Any) -> None:
    """Write JSON. Raises DSparkError on failure, and the earlier file stays."""
    text = json.dumps(value, indent=1) + "\n"
    with _whole(path) as temporary:
        temporary.write_text(text)


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write lines of text in UTF-8. Raises DSparkError on failure, and the earlier file stays."""
    text = "".join(f"{line}\n" for line in lines)
    with _whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_metadata(path: Path) -> dict[str, str]:
    """Return the string metadata of a safetensors file. Raises DSparkError on failure."""
    try:
        with safe_open(str(path), framework="pt") as handle:
            return dict(handle.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise DSparkError(f"{path} cannot be read ({error}); remove it to start anew") from None


def disk_error(path: Path, error: Exception) -> DSparkError:
    """Make the one-line error of a write that failed."""
    return DSparkError(
        f"cannot write {path} ({error}); what was saved before is kept: free some disk there, then "
        "run the same command to go on"
    )


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    try:
        with replacing(path, alone=True) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise disk_error(path, error) from None
