"""The demo's model answers prompts on the device: what drafters are trained on (`runs.py`).

A call that is cut off, or too short, leaves whole shards; training takes what there is.
"""

from __future__ import annotations

import sys

from tools.gpu.kit.device import device_name, say
from tools.gpu.kit.runs import answer_prompts, device_here, run_config, seconds_left
from tools.gpu.packing.arrival import kit_home

_ENDING_S = 45.0  # answers in flight are finished, however long it takes


def main() -> int:
    left, device = seconds_left(), device_here()
    say(device=device_name(), measured=device == "cuda")
    cfg = run_config("dspark", kit_home(), device, tiny=device == "cpu")
    say(**answer_prompts(cfg, device, left() - _ENDING_S))
    return 0


if __name__ == "__main__":
    sys.exit(main())
