"""Starts SGLang's own `bench_serving`, whose import asks for a package that we do not install.

`datasets` is needed for its picture benchmark alone; with random prompts nothing of it is called.
"""

from __future__ import annotations

import runpy
import sys
import types

if __name__ == "__main__":
    unused = types.ModuleType("datasets")
    unused.load_dataset = None  # type: ignore[attr-defined]
    sys.modules["datasets"] = unused
    runpy.run_module("sglang.bench_serving", run_name="__main__")
