"""The step on a GPU: the pipelined engine, admission on the device, tiers, what is scheduled."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE = "sglang_dspark/serving/step/engine.py"
AGREEMENT = "sglang_dspark/schedule/agreement.py"
RANKS = "sglang_dspark/serving/step/ranks.py"
DEVICE = "sglang_dspark/serving/cuda/device.py"
FEATURES = "sglang_dspark/serving/cuda/features.py"
PIPELINE = "tests/serving/test_step_pipeline.py"
RANKS_TESTS = "tests/serving/test_ranks.py"
DEVICE_TESTS = "tests/serving_cuda/test_device.py"
REHEARSED = ("tests/rehearsal/test_overlap_steps.py",)

MUTANTS = (
    Mutant(
        name="a step takes the time of the one that computes",
        area="pipeline",
        file=ENGINE,
        old="        self._steps.pop()\n        self._end_last(now)\n",
        new="        self._end_last(now)\n        self._steps.pop()\n",
        tests=(f"{PIPELINE}::test_every_step_has_its_own_time",),
    ),
    Mutant(
        name="a confidence is handed on before it has landed",
        area="pipeline",
        file=ENGINE,
        old="        if last is not None and repeats:\n            step = Step(",
        new="        if last is not None:\n            step = Step(",
        tests=(PIPELINE,),
    ),
    Mutant(
        name="a lost result holds up all later ones",
        area="pipeline",
        file=ENGINE,
        old="if not any(later.has_landed for later in self._steps):",
        new="if self._steps:",
        tests=(f"{PIPELINE}::test_a_step_that_never_lands_is_left_out",),
    ),
    Mutant(
        name="a prefill counts as the step before it, in flight",
        area="pipeline",
        file=ENGINE,
        old="step.began, self._interrupted = now, False\n\n    def _planned",
        new="step.began = now\n\n    def _planned",
        tests=(PIPELINE,),
    ),
    Mutant(
        name="landed confidences without the calibration",
        area="calibration",
        file=ENGINE,
        old="1.0 / (1.0 + np.exp(-(slopes * bounded + shifts)))",
        new="1.0 / (1.0 + np.exp(-bounded))",
        tests=(PIPELINE,),
    ),
    Mutant(
        name="a device's calibration without the request's own shift",
        area="calibration",
        file="sglang_dspark/schedule/online.py",
        old="self._v[regimes] if own is _NO_SHIFTS else self._v[regimes] + own[:, None]",
        new="self._v[regimes]",
        tests=(f"{PIPELINE}::test_a_device_computes_the_confidence_of_the_host",),
    ),
    Mutant(
        name="NaN admitted on the device",
        area="admission",
        file=DEVICE,
        old=".nan_to_num(0.0)",
        new=".nan_to_num(1.0)",
        tests=(DEVICE_TESTS,),
    ),
    Mutant(
        name="weights left out on the device",
        area="admission",
        file=DEVICE,
        old="None if plan.weights is None else self._upload(plan.weights),",
        new="None,",
        tests=(f"{DEVICE_TESTS}::test_lengths_are_those_of_the_host",),
    ),
    Mutant(
        name="limits left out on the device",
        area="admission",
        file=DEVICE,
        old="self._upload(plan.limits).to(torch.int32),",
        new="None,",
        tests=(f"{DEVICE_TESTS}::test_lengths_are_those_of_the_host",),
    ),
    Mutant(
        name="a pass in the tier above the one that holds it",
        area="tiers",
        file=DEVICE,
        old="bisect_left(self.tiers, tokens)",
        new="bisect_left(self.tiers, tokens + 1)",
        tests=(DEVICE_TESTS,),
    ),
    Mutant(
        name="a graph with too few seats",
        area="tiers",
        file=DEVICE,
        old=" and requests <= self._slots",
        new="",
        tests=(DEVICE_TESTS,),
    ),
    Mutant(
        name="the graph's own tensor goes to the host",
        area="pipeline",
        file=DEVICE,
        old="async_d2h(values.detach().clone())",
        new="async_d2h(values.detach())",
        tests=(f"{DEVICE_TESTS}::test_what_goes_to_the_host_outlives_the_graphs_tensor",),
    ),
    Mutant(
        name="windows on the device without the anchor",
        area="ragged layout",
        file="sglang_dspark/serving/step/layout.py",
        old="verify_lens=lengths + 1",
        new="verify_lens=lengths",
        tests=(f"{DEVICE_TESTS}::test_the_layout_counts_the_anchors",),
    ),
    Mutant(
        name="pipeline parallelism is scheduled",
        area="features",
        file=FEATURES,
        old="int(start.args.pp_size) > 1",
        new="int(start.args.pp_size) > 2",
        tests=("tests/serving_cuda/test_features.py", "tests/patches/test_drafter_mode.py"),
    ),
    Mutant(
        name="a leader that cannot plan says nothing",
        area="ranks",
        file=AGREEMENT,
        old="            self._message[0] = FAILED\n            self._broadcast()\n",
        new="",
        tests=(f"{RANKS_TESTS}::test_where_the_leader_fails_all_raise",),
    ),
    Mutant(
        name="a leader that cannot admit says nothing",
        area="ranks",
        file=RANKS,
        old="self._filled(requests, FAILED)",
        new="self._filled(requests, 0)",
        tests=(f"{RANKS_TESTS}::test_where_the_leader_fails_all_raise",),
    ),
    Mutant(
        name="a plan for other requests is acted on",
        area="ranks",
        file=AGREEMENT,
        old="(len(rows), crc32(rows.data)):",
        new="(len(rows), int(self._message[HEADER - 1])):",
        tests=(f"{RANKS_TESTS}::test_another_batch_is_noticed",),
    ),
    Mutant(
        name="lengths found by each rank for itself",
        area="ranks",
        file=RANKS,
        old="if self._broadcast is None or (self.leads and not plan.speculates):",
        new="if True:",
        tests=(f"{RANKS_TESTS}::test_where_the_leader_fails_all_raise",),
    ),
    Mutant(
        name="only the leader warms up",
        area="ranks",
        file="sglang_dspark/serving/schedule/ranks.py",
        old="        self._announcer.send(WARM_UP)\n",
        new="",
        tests=(f"{RANKS_TESTS}::test_every_rank_runs_the_passes_that_the_leader_times",),
    ),
    Mutant(
        name="a tier's time taken for the next one's",
        area="tiers",
        file="sglang_dspark/serving/schedule/profile.py",
        old="padded=bool(fastest.passes.tiers)",
        new="padded=False",
        tests=("tests/serving/test_schedule_profile.py",),
    ),
    Mutant(
        name="drafted in a step whose draft is left out",
        area="draft skip",
        file="sglang_dspark/serving/step/decode.py",
        old="if step.plan.speculates:",
        new="if True:",
        tests=REHEARSED,
        server=True,
    ),
    Mutant(
        name="what is committed is not injected",
        area="commit",
        file=DEVICE,
        old="        if verified.folded and epilogue.folds_commit:",
        new="        if not verified.folded:",
        tests=REHEARSED,
        server=True,
    ),
)
