"""Expert products and layers beside their peers, as fractions of what the device reaches.

Without a device the least times of an H100 by its data sheet, and that nothing was measured.
"""

from __future__ import annotations

import torch

from sglang_dspark.benchmarks import experts
from tools.gpu.kit.device import device_name, say

TOKENS = (1, 8, 64, 512, 4096)

if __name__ == "__main__":
    measured = torch.cuda.is_available()
    say(device=device_name(), measured=measured)
    for row in experts.measured(TOKENS) if measured else experts.plan(TOKENS):
        say(row=row)
