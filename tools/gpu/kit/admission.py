"""Admission's times beside torch's sort; without a device only that nothing was measured."""

from __future__ import annotations

import torch

from sglang_dspark.benchmarks import admission
from tools.gpu.kit.device import device_name, say

if __name__ == "__main__":
    say(device=device_name(), measured=torch.cuda.is_available())
    for row in admission.rows() if torch.cuda.is_available() else ():
        say(row=row)
