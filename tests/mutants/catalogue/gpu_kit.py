"""The GPU kit: pieces that are sent and taken in, stages that wait, models whose drafts err."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PIECES = "tools/gpu/packing/pieces.py"
ARRIVAL = "tools/gpu/packing/arrival.py"
WHEELS = "tools/gpu/packing/wheels.py"
RUNNER = "tools/gpu/kit/runner.py"
MODELS = "sglang_dspark/models/simulated.py"
SENT = "tests/tools/test_gpu_pieces.py"
STAGES = "tests/tools/test_gpu_kit.py"
MADE_UP = "tests/tools/test_gpu_models.py"
TRACE = "tools/gpu/kit/trace.py"
LOOK = "tools/gpu/kit/steps.py"
STEPS = "tests/tools/test_gpu_steps.py"
COURSE = "tools/gpu/kit/training.py"
TRAINED = "tests/tools/test_gpu_training.py"
STEP_LOG = "tests/serving/test_step_log.py"

MUTANTS = (
    Mutant(
        name="a piece of the right size is taken for whole",
        area="GPU kit",
        file=PIECES,
        old="return file_sha256(file) == piece.sha256",
        new="return True",
        tests=(f"{SENT}::test_a_damaged_piece_is_one_line_and_is_not_kept",),
    ),
    Mutant(
        name="a parcel is opened whatever its pieces make",
        area="GPU kit",
        file=PIECES,
        old="if found.hexdigest() != parcel.sha256:",
        new="if not found:",
        tests=(f"{SENT}::test_pieces_that_make_another_parcel_are_refused",),
    ),
    Mutant(
        name="what was packed once is never packed anew",
        area="GPU kit",
        file=PIECES,
        old="parcel is None or parcel.made_of != made_of or missing(parcel, folder)",
        new="parcel is None or missing(parcel, folder)",
        tests=(f"{SENT}::test_packing_again_makes_only_what_is_not_there",),
    ),
    Mutant(
        name="a lost piece is not packed again",
        area="GPU kit",
        file=PIECES,
        old="parcel is None or parcel.made_of != made_of or missing(parcel, folder)",
        new="parcel is None or parcel.made_of != made_of",
        tests=(f"{SENT}::test_packing_again_makes_only_what_is_not_there",),
    ),
    Mutant(
        name="an older parcel of the name counts as installed",
        area="GPU kit",
        file=ARRIVAL,
        old="return stamp.is_file() and stamp.read_text() == parcel.sha256",
        new="return stamp.is_file()",
        tests=(f"{SENT}::test_a_parcel_packed_anew_takes_the_place_of_the_old_one",),
    ),
    Mutant(
        name="pieces are known by the manifest of their own call alone",
        area="GPU kit",
        file=ARRIVAL,
        old="read_manifest(folder) or read_manifest(home)",
        new="read_manifest(folder)",
        tests=(f"{SENT}::test_pieces_of_several_calls_are_kept_until_all_are_there",),
    ),
    Mutant(
        name="SGLang is not told of the plugin",
        area="GPU kit",
        file=ARRIVAL,
        old='    write_whole(about / "entry_points.txt", "\\n".join(lines) + "\\n")\n',
        new="",
        tests=(f"{SENT}::test_wheels_are_imported_from_where_they_were_installed",),
    ),
    Mutant(
        name="a wheel's list keeps what was left out",
        area="GPU kit",
        file=WHEELS,
        old="        if stays(file):\n",
        new="        if file:\n",
        tests=(f"{SENT}::test_what_a_server_does_not_need_stays_out_of_its_wheel",),
    ),
    Mutant(
        name="a stand-in is not sent",
        area="GPU kit",
        file=WHEELS,
        old="            if info.filename in instead:\n",
        new="            if info.filename in patterns:\n",
        tests=(f"{SENT}::test_what_a_server_does_not_need_stays_out_of_its_wheel",),
    ),
    Mutant(
        name="a wheel for another Python will do",
        area="GPU kit",
        file=WHEELS,
        old="if parse_wheel_filename(file.name)[3] & fitting",
        new="if parse_wheel_filename(file.name)[3]",
        tests=(f"{SENT}::test_a_wheel_that_is_there_is_not_fetched_again",),
    ),
    Mutant(
        name="a stage runs without its pieces",
        area="GPU kit",
        file=RUNNER,
        old="(lacking := waiting(stage.needs, places.home)) is not None",
        new="(lacking := waiting((), places.home)) is not None",
        tests=(f"{STAGES}::test_a_stage_whose_pieces_have_not_come_waits",),
    ),
    Mutant(
        name="a stage begins whatever time is left",
        area="GPU kit",
        file=RUNNER,
        old="elif (least := stage.least_s or stage.limit_s) > left:",
        new="elif (least := 0) > left:",
        tests=(f"{STAGES}::test_a_stage_that_may_not_end_in_time_is_left_for_the_next_call",),
    ),
    Mutant(
        name="a stage that failed takes the time of the others",
        area="GPU kit",
        file=RUNNER,
        old="for stage in sorted(stages, key=lambda stage: _failed_before(stage, places)):",
        new="for stage in stages:",
        tests=(f"{STAGES}::test_what_failed_before_comes_last_until_its_code_is_another",),
    ),
    Mutant(
        name="kernels that cannot be imported are kept",
        area="GPU kit",
        file="sglang_dspark/serving/cpu/stand_ins.py",
        old=' or not _can_be_imported("sgl_kernel")',
        new="",
        tests=("tests/serving_cpu/test_stand_ins.py::test_kernels_that_can_be_imported_are_kept",),
    ),
    Mutant(
        name="drafts of the made-up models are never wrong",
        area="GPU kit",
        file=MODELS,
        old="said[wrong] = known.directions[wrong.roll(1)]",
        new="said[wrong] = known.directions[wrong]",
        tests=(f"{MADE_UP}::test_dspark_is_wrong_where_it_should_be_and_knows_it",),
    ),
    Mutant(
        name="the made-up confidence knows nothing",
        area="GPU kit",
        file=MODELS,
        old="latent[:, width].copy_(known.confidence)",
        new="latent[:, width].fill_(1.4)",
        tests=(f"{MADE_UP}::test_dspark_is_wrong_where_it_should_be_and_knows_it",),
    ),
    Mutant(
        name="all prompts of the made-up models end alike",
        area="GPU kit",
        file=MODELS,
        old="{{ message['role'] }}: {{ message['content'] }}{% endfor %}",
        new="{{ message['role'] }}: {{ message['content'] }} {% endfor %}",
        tests=("tests/models/test_golden.py",),
    ),
    Mutant(
        name="the made-up target's layers decide",
        area="GPU kit",
        file=MODELS,
        old="_SAYS = 1e-4",
        new="_SAYS = 100.0",
        tests=(f"{MADE_UP}::test_the_target_says_the_table_whatever_came_before",),
    ),
    Mutant(
        name="waits are counted while another stream computes",
        area="GPU kit",
        file=TRACE,
        old="if merged and event.begin <= merged[-1][1]:",
        new="if False:",
        tests=(f"{STEPS}::test_a_trace_says_what_host_and_device_do",),
    ),
    Mutant(
        name="SGLang's calls count as our host time",
        area="GPU kit",
        file=TRACE,
        old="step.us - sum(each.us for each in theirs if within(each, step))",
        new="step.us",
        tests=(f"{STEPS}::test_a_trace_says_what_host_and_device_do",),
    ),
    Mutant(
        name="a plan within a launch counts twice",
        area="GPU kit",
        file=TRACE,
        old="if not any(within(event, step) for step in steps)",
        new="if steps",
        tests=(f"{STEPS}::test_a_trace_says_what_host_and_device_do",),
    ),
    Mutant(
        name="spans count as work of the device",
        area="GPU kit",
        file=TRACE,
        old='_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")',
        new='_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")',
        tests=(f"{STEPS}::test_a_trace_says_what_host_and_device_do",),
    ),
    Mutant(
        name="a pass is looked up at the tier below it",
        area="GPU kit",
        file=LOOK,
        old="return table.knots[bisect_left(table.knots, tokens)]",
        new="return table.knots[max(bisect_left(table.knots, tokens) - 1, 0)]",
        tests=(f"{STEPS}::test_step_times_are_compared_by_tier",),
    ),
    Mutant(
        name="steps are predicted without their drafts",
        area="GPU kit",
        file=LOOK,
        old='each["context"], each["depth"]',
        new='each["context"], 0',
        tests=(f"{STEPS}::test_step_times_are_compared_by_tier",),
    ),
    Mutant(
        name="the slower way to train is kept",
        area="GPU kit",
        file=COURSE,
        old="compiled = compiled_s < GAIN * eager_s",
        new="compiled = compiled_s > GAIN * eager_s",
        tests=(f"{TRAINED}::test_so_many_steps_are_planned_as_fit",),
    ),
    Mutant(
        name="a run that the call cuts short is not saved",
        area="GPU kit",
        file=COURSE,
        old="            trainer.save()\n            raise TimeUpError",
        new="            raise TimeUpError",
        tests=(f"{TRAINED}::test_a_call_that_ends_leaves_a_run_that_goes_on_to_the_same_drafter",),
    ),
    Mutant(
        name="training that goes on counts as failed",
        area="GPU kit",
        file=RUNNER,
        old="return self.why in (None, _GOES_ON)",
        new="return self.why is None",
        tests=(f"{TRAINED}::test_a_stage_that_goes_on_is_neither_failed_nor_done",),
    ),
    Mutant(
        name="training that goes on counts as done",
        area="GPU kit",
        file=RUNNER,
        old="        why = _GOES_ON\n",
        new="        why = None\n",
        tests=(f"{TRAINED}::test_a_stage_that_goes_on_is_neither_failed_nor_done",),
    ),
    Mutant(
        name="a stage that fits itself in takes all its time",
        area="GPU kit",
        file=RUNNER,
        old="limit = min(stage.limit_s, left)",
        new="limit = stage.limit_s",
        tests=(f"{TRAINED}::test_a_stage_fits_itself_into_what_is_left",),
    ),
    Mutant(
        name="a process of torchrun that is alone shards nothing",
        area="GPU kit",
        file="sglang_dspark/training/distributed.py",
        old="sharded = size > 1 or dist.is_torchelastic_launched()",
        new="sharded = size > 1",
        tests=(f"{TRAINED}::test_one_process_of_torchrun_trains_as_one_without",),
    ),
    Mutant(
        name="steps are logged twice",
        area="GPU kit",
        file="sglang_dspark/serving/schedule/metrics.py",
        old="finished, self._finished = self._finished, []",
        new="finished = self._finished",
        tests=(f"{STEP_LOG}::test_lines_are_appended_and_none_comes_twice",),
    ),
    Mutant(
        name="verified drafts are no tokens of a logged step",
        area="GPU kit",
        file="sglang_dspark/serving/schedule/step_log.py",
        old='"tokens": plan.requests + int(lengths.sum()),',
        new='"tokens": plan.requests,',
        tests=(f"{STEP_LOG}::test_every_step_is_a_line",),
    ),
)
