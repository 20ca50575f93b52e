"""Writing files so that a full disk or a kill leaves the earlier one: a temporary name, a rename,
one clear line when it fails.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.errors import DSparkError


def write_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    """Write a safetensors file; DSparkError when it cannot be, and the earlier file stays."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    _replace(path, lambda temporary: save_file(tensors, str(temporary), meta))


def write_json(path: Path, value: Any) -> None:
    """Write JSON; DSparkError when it cannot be, and the earlier file stays."""
    text = json.dumps(value, indent=1) + "\n"
    _replace(path, lambda temporary: temporary.write_text(text))


def read_metadata(path: Path) -> dict[str, str]:
    """The string metadata of a safetensors file; DSparkError when it cannot be read."""
    try:
        with safe_open(str(path), framework="pt") as handle:
            return dict(handle.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise DSparkError(f"{path} cannot be read ({error}); remove it to start anew") from None


def disk_error(path: Path, error: Exception) -> DSparkError:
    """The one line for a write that failed."""
    return DSparkError(
        f"cannot write {path} ({error}); what was saved before is kept: free some disk there, then "
        "run the same command to go on"
    )


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from None
