"""The list of all mutants, by area; `mutant.py` says what an entry means."""

from __future__ import annotations

from tests.mutants.catalogue import (
    accept_operator,
    calibration,
    command_line,
    evaluation,
    experts,
    gpu_kit,
    kept_files,
    loadtest,
    markov_operator,
    rules,
    sampling,
    scheduling,
    serving,
    step,
    training,
    training_data,
)
from tests.mutants.catalogue.draft_law import DRAFT_LAW
from tests.mutants.mutant import Mutant

ALL: tuple[Mutant, ...] = (
    *rules.MUTANTS,
    *serving.MUTANTS,
    *step.MUTANTS,
    *experts.MUTANTS,
    *DRAFT_LAW,
    *sampling.MUTANTS,
    *accept_operator.MUTANTS,
    *markov_operator.MUTANTS,
    *scheduling.MUTANTS,
    *calibration.MUTANTS,
    *training.MUTANTS,
    *training_data.MUTANTS,
    *kept_files.MUTANTS,
    *loadtest.MUTANTS,
    *command_line.MUTANTS,
    *evaluation.MUTANTS,
    *gpu_kit.MUTANTS,
)
