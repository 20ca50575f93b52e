"""Sampled acceptance's times and memory beside SGLang's operator, where it is installed."""

from __future__ import annotations

import torch

from sglang_dspark.benchmarks import accept
from tools.gpu.kit.device import device_name, say

if __name__ == "__main__":
    say(device=device_name(), measured=torch.cuda.is_available())
    for row in accept.rows() if torch.cuda.is_available() else ():
        say(row=row)
