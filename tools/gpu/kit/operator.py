"""An operator's times beside its peers: `python -m tools.gpu.kit.operator NAME`, of the benchmark
`sglang_dspark.benchmarks.NAME`. Without a device it says that nothing was measured.
"""

from __future__ import annotations

import sys
from importlib import import_module

import torch

from tools.gpu.kit.device import device_name, say

if __name__ == "__main__":
    benchmark = import_module(f"sglang_dspark.benchmarks.{sys.argv[1]}")
    say(device=device_name(), measured=torch.cuda.is_available())
    for row in benchmark.rows() if torch.cuda.is_available() else ():
        say(row=row)
