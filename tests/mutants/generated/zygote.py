"""Run pytest in forks of a process that has imported the slow libraries already.

Reads a JSON object a line from standard input, `{"arguments", "timeout_s", "output"}`, forks, and
answers `{"status"}`: pytest's, or null for a run that was ended. Nothing of ours is imported before
a fork, so that each child imports the copy as it stands, mutant and all.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time

LIBRARIES = (
    *("torch", "numpy", "numba", "scipy.stats", "hypothesis", "pytest", "pydantic", "typer"),
    *("rich.console", "httpx", "safetensors.torch", "transformers", "triton", "pyarrow.parquet"),
    *("fastapi", "uvicorn", "aiohttp", "openai", "orjson", "zmq", "msgspec", "xgrammar", "gguf"),
    *("tvm_ffi", "IPython", "torch.testing", "torch.distributed", "torch._dynamo"),
    *("compressed_tensors", "sympy", "accelerate", "einops", "sentencepiece", "tiktoken"),
    *("torch.fx.experimental.symbolic_shapes", "torch._inductor.pattern_matcher", "soundfile"),
    *("transformers.models.auto.modeling_auto", "transformers.generation.utils"),
)


def main() -> None:
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # one that this install lacks costs a child time
            importlib.import_module(name)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"status": _run(**asked)}), flush=True)


def _run(arguments: list[str], timeout_s: float, output: str) -> int | None:
    process = os.fork()
    if process == 0:
        _be_pytest(arguments, output)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            _end(process)  # what it has started and left
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    _end(process)
    os.waitpid(process, 0)
    return None


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _be_pytest(arguments: list[str], output: str) -> None:
    """The child: a process group of its own, output into a file; does not return."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (file, 1), (file, 2)):
        os.dup2(old, new)
    import pytest

    status = 3
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
