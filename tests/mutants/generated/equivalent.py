"""Generated mutants that no test can kill, each with the argument why."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "sglang_dspark/evaluation/statistics.py::ConfidencePairs.from_generations: argument: "
    "np.array(survival, dtype=np.float64) -> np.array(survival) #1": (
        "a list of Python's floats becomes float64 anyway, an empty one too"
    ),
    "sglang_dspark/schedule/guard.py::_loses: comparison: "
    "state.gain(config, config.doubt) < 1 + config.min_gain - HYSTERESIS -> "
    "(state.gain(config, config.doubt) <= 1 + config.min_gain - HYSTERESIS) #1": (
        "the gain is a ratio of measured times: at the margin itself either answer is right"
    ),
}
