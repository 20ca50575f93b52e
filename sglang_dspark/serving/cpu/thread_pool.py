"""Threads that share a matrix product's rows and wait for the next one awake.

A decode step is a chain of some two hundred products of a few dozen microseconds. OpenMP's threads
either sleep between two of them, which costs more than they take over, or spin through whatever
else the machine has to do. Here a waiting thread spins for some tens of microseconds, about as long
as anything between two products takes, and then sleeps. Parts are taken one at a time by whoever is
free, the caller too, which therefore waits for parts that were begun and never for a thread.

Which thread computes a part changes nothing in it: results have the same bits. A process that was
forked has no threads; its caller takes all parts.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]

from sglang_dspark.serving.cpu.thread_pool_text import assembly

RUN = "dspark_pool_run"  # the symbol under which compiled code finds `pool_run`
_FUTEX = {"x86_64": 202}  # Linux's number of the system call


@dataclass
class ThreadPool:
    """The process's pool. entry: address of `run(work, data, length, threads)`, C integers."""

    entry: int
    _serve: Any
    _keep: tuple[Any, ...]
    threads: int = 1  # that take parts, a caller among them

    def grow(self, threads: int) -> None:
        """Have so many threads, the caller among them; never fewer than there are."""
        for number in range(self.threads, threads):
            served = threading.Thread(
                target=self._serve, args=(None,), name=f"products-{number}", daemon=True
            )
            served.start()
        self.threads = max(self.threads, threads)


def why_not() -> str | None:
    """Why there is no pool on this machine; None: there is."""
    if sys.platform != "linux" or platform.machine() not in _FUTEX:
        return f"threads of products wait as Linux on x86-64 can, and this is {platform.platform()}"
    return None


def sharing(threads: int) -> tuple[int, int]:
    """What compiled code shares work out by (`jit.in_parts`): the pool's entry, and the threads
    that it has then. No more than one where there is no pool."""
    pool = process_pool() if threads > 1 else None
    if pool is None:
        return 0, 1
    pool.grow(threads)
    return pool.entry, threads


@lru_cache(maxsize=1)
def process_pool() -> ThreadPool | None:
    """The pool, compiled and known to LLVM as `RUN`; None where there is a reason not to.

    Raises RuntimeError when LLVM rejects the assembly (a fault of thread_pool_text.py).
    """
    if why_not() is not None:
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(opt=2)
    syscall = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value
    llvm.add_symbol("syscall", syscall)
    module = llvm.parse_assembly(assembly(_FUTEX[platform.machine()]))
    module.triple = llvm.get_process_triple()
    module.data_layout = str(target.target_data)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    entry = engine.get_function_address("pool_run")
    llvm.add_symbol(RUN, entry)
    never = ctypes.c_int32(0)
    serve = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("pool_serve"))
    return ThreadPool(entry, lambda _: serve(ctypes.addressof(never)), (engine, target, never))
