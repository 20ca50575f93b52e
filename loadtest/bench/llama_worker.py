"""Run llama.cpp in its own process: `python -m sglang_dspark.loadtest.bench.llama_worker FILE`.

The number of threads follows FILE. Reads a JSON line a request, `{"ids": [...], "tokens": N}`, and
writes one: the N tokens of greedy decoding after the prompt, stop tokens included, and the seconds
up to the first of them and after it. The package's own sampler copies all logits in Python; the
argmax here does not, so that only llama.cpp is timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

CONTEXT = 4096  # tokens


@dataclass(frozen=True)
class Spoken:
    """ids: output tokens. first_s: seconds to the first; rest_s: from there to the last."""

    ids: list[int]
    first_s: float
    rest_s: float


class Llama:
    """A GGUF file's model. threads: of its products."""

    def __init__(self, path: str, threads: int) -> None:
        import ik_llama_cpp  # an optional package: `bench llama` explains its installation

        self._model = ik_llama_cpp.IkLlama(path, n_ctx=CONTEXT, n_threads=threads, verbose=False)
        self._context: Any = self._model._context
        self._vocab = int(self._context.model.n_vocab)

    def answer(self, prompt: list[int], tokens: int) -> Spoken:
        """Decode greedily, with a new prefill of the prompt."""
        from ik_llama_cpp._internals import make_batch_range

        self._context.kv_cache_clear()
        began = time.perf_counter()
        self._decode(make_batch_range(prompt, pos_start=0, logits_last=True))
        ids = [self._argmax()]
        first = time.perf_counter()
        for position in range(len(prompt), len(prompt) + tokens - 1):
            self._decode(make_batch_range(ids[-1:], pos_start=position, logits_last=True))
            ids.append(self._argmax())
        return Spoken(ids, first - began, time.perf_counter() - first)

    def _decode(self, batch: Any) -> None:
        from ik_llama_cpp import _ctypes_api

        status = self._context.decode(batch)
        _ctypes_api.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode ended with {status}")

    def _argmax(self) -> int:
        logits = ctypes.cast(self._context.get_logits(-1), ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard both outputs: llama.cpp writes to them, and only replies may be on stdout."""
    kept, nowhere = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:  # an error inside is shown: its traceback is printed afterwards
        sys.stdout.flush()
        for output, copy in enumerate(kept, 1):
            os.dup2(copy, output)
            os.close(copy)
        os.close(nowhere)


def main(path: str, threads: int) -> None:
    """Answer requests until the input ends."""
    with _quiet():
        llama = Llama(path, threads)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        with _quiet():
            spoken = llama.answer(asked["ids"], asked["tokens"])
        print(json.dumps(asdict(spoken)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
