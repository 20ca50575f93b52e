"""Fake kernels: Triton's and SGLang's JIT modules compile for sm_90 and do nothing.

Each success or failure to compile is a line on stderr. Our greedy acceptance and admission return
their references' results, because invalid lengths would end a step.
"""

from __future__ import annotations

import inspect
import sys
import time
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

_OPS = ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "top_k_renorm_probs", "top_p_renorm_probs")
_told: set[str] = set()
_kept: list[torch.library.Library] = []


def _tell(line: str) -> None:
    if line not in _told:
        _told.add(line)
        print(line, file=sys.stderr, flush=True)


class _Driver:
    """A Triton driver of an H200 that launches nothing."""

    class utils:  # noqa: N801
        """Device properties that Triton reads."""

        @staticmethod
        def get_device_properties(_index: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132,
                    "warpSize": 32, "sm_clock_rate": 1980000}  # fmt: skip

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, _kind: str) -> str:
        return "int"


def fake_triton() -> None:
    """Make Triton's launches compile only; an autotuned kernel compiles its first variant."""
    triton.runtime.driver.set_active(_Driver())
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        try:
            made = run(self, *args, grid=grid, warmup=True, **given)
        except Exception as error:
            _tell(f"TRITON FAILED {name}: {error}")
            raise
        _tell(f"TRITON compiled {name}")
        return made

    def first(self: Any, *args: Any, **given: Any) -> Any:
        return self.fn.run(*args, **{**given, **self.configs[0].all_kwargs()})

    JITFunction.run, Autotuner.run = compiled, first


def fake_sglang() -> None:
    """Replace sgl_kernel's operators and, after building them, JIT modules by no-ops."""
    import sgl_kernel

    sgl_kernel.rmsnorm = lambda x, *_, out=None, **__: torch.zeros_like(x) if out is None else out
    sgl_kernel.fused_add_rmsnorm = lambda *_, **__: None
    _kept.append(torch.library.Library("sgl_kernel", "IMPL"))
    for name in _OPS:
        _kept[0].impl(name, lambda *_: None, "CPU")
    implemented = torch.library.Library.impl

    def on_both(self: Any, op: Any, function: Any, dispatch_key: str = "", **given: Any) -> Any:
        if dispatch_key == "CUDA" and self.ns == "sglang":
            implemented(self, op, function, "CPU", **given)
        return implemented(self, op, function, dispatch_key, **given)

    torch.library.Library.impl = on_both  # type: ignore[method-assign,assignment]
    import sglang.kernels.jit.utils as utils
    from sglang.kernels.jit.utils import compile as building

    load = building.load_jit

    def built(*names: Any, **given: Any) -> Any:
        made_by, began = _factory(), time.monotonic()
        try:
            load(*names, **given)
        except Exception as error:
            _tell(f"JIT FAILED {names} by {made_by}: {error}")
            raise
        _tell(f"JIT built {names} by {made_by} in {time.monotonic() - began:.1f} s")
        return _Idle()

    utils.load_jit = building.load_jit = built


def _factory() -> str:
    """Return the call of the function that loads a JIT module as a Python expression."""
    frame = sys._getframe(2)  # the caller of `load_jit`
    named = inspect.getargvalues(frame)
    values = ", ".join(f"{name}={named.locals[name]!r}" for name in named.args)
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_name}({values})"


class _Idle:
    """A module whose functions do nothing."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


def fake_ours() -> None:
    """Choose our operators, and let two also return their references' results."""
    from sglang_dspark.kernels import accept_greedy, admission, platform

    platform.runs_on = lambda device: True
    accept, admit = accept_greedy.accept_greedy_triton, admission.admit_triton

    def accepted(ids: Any, rows: Any, logits: Any, lens: Any, out: Any, room: Any) -> None:
        accept(ids, rows, logits, lens, out, room)
        width = out.tokens.shape[1]
        expected = accept_greedy.accept_greedy_torch(ids, rows, logits, lens, width)
        for each, right in zip(out, expected, strict=True):
            each.copy_(right)
        out.accepted.zero_()  # empty slots of a captured step
        out.emitted.fill_(1)

    def admitted(logits: Any, terms: Any, drafts: int) -> Any:
        return admit(logits, terms, drafts).copy_(admission.admit_torch(logits, terms, drafts))

    accept_greedy.accept_greedy_triton, admission.admit_triton = accepted, admitted
