"""Build the JIT modules of SGLang that a server compiles at its first start, in parallel.

    python -m tools.gpu.kit.jit_modules [MODEL...]

A server builds them one after the other at first use, by nvcc. Each is stored in SGLang's cache
($SGLANG_JIT_CACHE_DIR), so a server that starts later with the same variables loads it. The list
follows the output of `tools/gpu/faked/rehearse.py` for the kit's arms: bfloat16, one GPU, Triton
attention.
A JSON row per module has its seconds, and the reason if it was not built: the server then builds it
itself. Status 1 if none was built.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch

from sglang_dspark.models.simulated import SHAPES
from tools.gpu.kit.device import say

_OPS = "sglang.kernels.ops"
_DTYPE = torch.bfloat16  # `--dtype` of the kit's servers


@dataclass(frozen=True)
class Heads:
    """Sizes for which the modules of one model are compiled. kv_heads: of one rank. qk_norm: of
    the target; DSPARK's drafters normalise by a Triton kernel."""

    head_dim: int
    kv_heads: int
    qk_norm: bool = True


@dataclass(frozen=True)
class JitModule:
    """One module: the function of SGLang that builds or loads it, and its arguments."""

    name: str
    factory: str
    arguments: tuple[Any, ...]

    def function(self) -> Callable[..., object]:
        """Import the factory. Raises ImportError or AttributeError if SGLang has none."""
        module, _, name = f"{_OPS}.{self.factory}".rpartition(".")
        found: Callable[..., object] = getattr(importlib.import_module(module), name)
        return found


MODELS = {
    **{
        name: Heads(shape.head_dim, shape.kv_heads)
        for name, shape in SHAPES.items()
        if name != "tiny"  # for CPU servers
    },
    "smollm2-135m": Heads(64, 3, qk_norm=False),
}


def modules(models: Sequence[str]) -> tuple[JitModule, ...]:
    """Return the modules that servers of these models build, each once."""
    found = [
        JitModule("activation", "activation.activation.activation_module", (_DTYPE,)),
        JitModule(
            "clamp_position",
            "attention.clamp_position._jit_clamp_position_module",
            (torch.int64,),
        ),
        JitModule("speculative_tree", "speculative.tree._jit_tree_module", ()),
    ]
    for heads in (MODELS[name] for name in models):
        row = heads.kv_heads * heads.head_dim * _DTYPE.itemsize  # bytes of a token's keys
        found += [
            JitModule("kvcache", "kvcache.kvcache._jit_kvcache_module", (row, row, 0)),
            JitModule(
                "fused_rope",
                "attention.rope._jit_fused_rope_module",
                (True, heads.head_dim, _DTYPE, _DTYPE),
            ),
        ]
        if heads.qk_norm:
            found.append(
                JitModule("qknorm", "layernorm.norm._jit_qknorm_module", (heads.head_dim, _DTYPE))
            )
    return tuple(dict.fromkeys(found))


def build(module: JitModule) -> dict[str, Any]:
    """Build one module and return its row; a failure is a row, not an exception."""
    began = time.monotonic()
    named = "_".join(
        [module.name, *(str(each).removeprefix("torch.") for each in module.arguments)]
    )
    row: dict[str, Any] = {"jit": named}
    try:
        module.function()(*module.arguments)
    except Exception as error:  # nvcc, ninja or an import failed: the server builds it again
        row["failed"] = " ".join(str(error).split())[-400:] or repr(error)
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Build the modules in parallel; return 1 if none was built."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    named = parser.parse_args().models or ["qwen3-4b"]
    if unknown := [name for name in named if name not in MODELS]:
        parser.error(f"no model {unknown[0]}; there are {', '.join(MODELS)}")
    try:
        from sglang.kernels.jit.utils.compile import parallel_compile
    except ImportError as error:
        say(row={"jit": "all", "failed": str(error), "seconds": 0.0})
        return 1
    rows: list[dict[str, Any]] = []
    one_line = Lock()

    def told(module: JitModule) -> None:
        row = build(module)
        with one_line:
            rows.append(row)
            say(row=row)

    parallel_compile([partial(told, module) for module in modules(named)])
    return 0 if any("failed" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
