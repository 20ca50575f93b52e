"""Generated mutants that no test can kill, each with the argument why."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "loadtest/bench/paired.py::<module>: argument: Sampling(max_new_tokens=8) -> Sampling() "
    "#1": "the answer is discarded: one of any length warms up",
    "loadtest/client/measure.py::Spread.of: argument: np.array([value for value in values if "
    "not np.isnan(value)], dtype=np.float64) -> np.array([value for value in values if not "
    "np.isnan(value)]) #1": "a list of Python's floats becomes float64 anyway, an empty one too",
    "loadtest/client/schedule.py::Schedule.fingerprint: constant: 16 -> 15 #1": (
        "a digest of 15 digits separates loads as one of 16; nothing reads its length"
    ),
    "loadtest/sweep/frontier.py::_by_load: argument: zip(*table, strict=True) -> zip(*table) "
    "#1": "the line in front raises unless all trials have the same loads",
    "loadtest/sweep/sla.py::_falling: comparison: pools[-1][0] < mean -> (pools[-1][0] <= "
    "mean) #1": "of equal values the mean is the value: a pool of both says the same of each",
    "loadtest/sweep/sla.py::_headroom: constant: 1e-9 -> 2e-09 #1": (
        "a TTFT of less than two nanoseconds holds any limit either way"
    ),
    "sglang_dspark/evaluation/statistics.py::ConfidencePairs.from_generations: argument: "
    "np.array(survival, dtype=np.float64) -> np.array(survival) #1": (
        "a list of Python's floats becomes float64 anyway, an empty one too"
    ),
    'sglang_dspark/schedule/cost_table.py::save: argument: json.dumps({"format": FORMAT, '
    "**asdict(table)}, indent=1, allow_nan=False) -> json.dumps({'format': FORMAT, "
    "**asdict(table)}, indent=1) #1": (
        "a table with a number that is not finite is refused when it is made"
    ),
    "sglang_dspark/schedule/guard.py::_loses: comparison: state.gain(config, config.doubt) < "
    "1 + config.min_gain - HYSTERESIS -> (state.gain(config, config.doubt) <= 1 + "
    "config.min_gain - HYSTERESIS) #1": (
        "the gain is a ratio of measured times: at the margin itself either answer is right"
    ),
    "sglang_dspark/schedule/guard.py::advance: comparison: gain >= config.plain_probe_below "
    "-> (gain > config.plain_probe_below) #1": (
        "the gain is a ratio of measured times: at the limit itself either answer is right"
    ),
    "sglang_dspark/backends/cuda/accept_warm_up.py::<module>: constant: 20 -> 19 #1": (
        "any top-k from 2 to 32 takes the same way and compiles the same kernels"
    ),
    "sglang_dspark/backends/cuda/passes.py::GraphPasses.warm_up: constant: 1 -> 2 #3": (
        "a further power of two is cut to the most requests, which is there already"
    ),
    "sglang_dspark/step/penalties.py::settings_of: constant: 1 -> 2 #1": (
        "a stop id stands twice and is forbidden once; a request without one has a minimum of 0"
    ),
    "sglang_dspark/families/learning/losses.py::<module>: constant: 32 -> 31 #1": (
        "rows at a time, each by itself: 31 fill a cache as well as 32"
    ),
    "sglang_dspark/families/learning/losses.py::_DraftDistribution.forward: sign: -1 -> (1) #2": (
        "a table of rows has two dimensions: 1 is the last one"
    ),
    "sglang_dspark/training/optimiser.py::_kept_buffers: constant: True -> False #1": (
        "the names alone are read; buffers are taken from named_buffers"
    ),
    "sglang_dspark/verify/penalties.py::_penalised: comparison: row < 0 -> (row <= 0) #1": (
        "a logit of 0 is 0 times the penalty and 0 over it"
    ),
    "sglang_dspark/verify/sampling.py::_truncate: arithmetic: keep[:, -1] & (top_k > width) "
    "-> (keep[:, -1] | (top_k > width)) #1": (
        "a row done again with more tokens sorted is cut at the same place"
    ),
    "sglang_dspark/verify/sampling.py::_truncate: comparison: top_k > width -> (top_k >= "
    "width) #1": "a row done again with more tokens sorted is cut at the same place",
    "sglang_dspark/backends/cuda/draft_context.py::_writes_as_upstream: argument: "
    "zip(own, names, strict=True) -> zip(own, names) #1": (
        "both have one entry a name: their lengths never differ"
    ),
    "sglang_dspark/schedule/cost_model.py::CostModel._refresh: constant: 1 -> 2 #1": (
        "a longer curve: nothing reads beyond the tokens of the largest batch"
    ),
    "sglang_dspark/schedule/request_shift.py::RequestShift.__init__: argument: "
    "np.full(rows, -1, dtype=np.int64) -> np.full(rows, -1) #1": (
        "NumPy makes int64 of -1 on every platform that is served"
    ),
    "sglang_dspark/schedule/budget.py::_search: constant: 1.0 -> 2.0 #1": (
        "with a tau of 0 the seconds beside it are multiplied by nothing"
    ),
    "sglang_dspark/training/packing.py::<module>: argument: torch.empty(0, "
    "dtype=torch.long) -> torch.empty(0) #1": (
        "an empty list of places is refused on the next line, for every type"
    ),
    "sglang_dspark/schedule/calibration.py::conditional: argument: np.empty(len(order), "
    "dtype=np.int64) -> np.empty(len(order)) #1": (
        "ranks are whole numbers below 2^53 in float64 too"
    ),
    "loadtest/bench/paired.py::_row: argument: zip(ours, theirs, strict=True) -> "
    "zip(ours, theirs) #1": ("both sides of a round answer the same list of prompts"),
    "sglang_dspark/training/optimiser.py::Optimiser._slots: argument: zip(self.shards, "
    "self.parameters, strict=True) -> zip(self.shards, self.parameters) #1": (
        "one shard is made for each parameter in the constructor"
    ),
    "sglang_dspark/training/optimiser.py::Optimiser.__init__: argument: zip(self.shards, "
    "decayed, strict=True) -> zip(self.shards, decayed) #1": (
        "one shard is made for each parameter a few lines above"
    ),
    "sglang_dspark/evaluation/resampling.py::<module>: constant: 4000 -> 3999 #1": (
        "an interval of one resample less is an interval of the same kind"
    ),
    "sglang_dspark/backends/cuda/accept.py::<module>: constant: 256 -> 257 #1": (
        "room for one more counter, which no program reads"
    ),
    "sglang_dspark/families/learning/losses.py::position_weights: argument: "
    "torch.arange(gamma, dtype=torch.float32) -> torch.arange(gamma) #1": (
        "whole numbers divided by a number become float32 all the same"
    ),
    "sglang_dspark/schedule/experience.py::Experience.publish: comparison: depth < "
    "self.gamma -> (depth <= self.gamma) #1": (
        "at the full depth a copy is made and nothing of it is changed"
    ),
    "sglang_dspark/schedule/relay.py::<module>: constant: 62 -> 61 #1": (
        "a step number that no server reaches either"
    ),
    "sglang_dspark/schedule/calibration.py::_logistic: constant: 30 -> 29 #1": (
        "Newton's steps end long before: 29 are enough for float64"
    ),
    "sglang_dspark/step/penalties.py::StepPenalties.count: constant: 0 -> 1 #2": (
        "what is not emitted adds 0, to cell 1 as to cell 0"
    ),
    "sglang_dspark/training/optimiser.py::Optimiser._exchange: argument: "
    "zip(self.shards, self.average or (), strict=bool(self.average)) -> zip(self.shards, "
    "self.average or ()) #1": ("one average is made for each shard"),
    "sglang_dspark/schedule/budget.py::_early_stop: comparison: count > 0 -> (count >= 0) #1": (
        "sorting no key changes nothing"
    ),
    "sglang_dspark/verify/sampling.py::target_distribution: comparison: sampling.top_k < "
    "vocab -> (sampling.top_k <= vocab) #1": ("a top-k of the whole vocabulary cuts nothing"),
    "sglang_dspark/step/penalties.py::settings_of: constant: True -> False #1": (
        "both lists have one entry a request"
    ),
}
