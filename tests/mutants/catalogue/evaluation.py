"""Analyses of drafters: results and their files, figures, and the options that they share."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ANALYSES = "sglang_dspark/evaluation/analyses"
WORKLOAD = "sglang_dspark/cli/_workload.py"
FIGURES = "tests/evaluation/test_figures.py"
OPTIONS = "tests/cli/test_workload_options.py"

MUTANTS = (
    Mutant(
        name="a first draft's chance that no gain needs is left out of the file",
        area="drafter results",
        file=f"{ANALYSES}/analysis.py",
        old="if v is not None or f.default is not None}",
        new="if v is not None}",
        tests=(f"{FIGURES}::test_published_results_are_read_and_written_as_they_stand",),
    ),
    Mutant(
        name="what is absent in a result file is null",
        area="drafter results",
        file=f"{ANALYSES}/analysis.py",
        old="for f, v in every if v is not None or f.default is not None}",
        new="for f, v in every}",
        tests=(f"{FIGURES}::test_published_results_are_read_and_written_as_they_stand",),
    ),
    Mutant(
        name="an analysis is drawn as another one",
        area="drafter results",
        file=f"{ANALYSES}/registry.py",
        old="    return ANALYSES[result.analysis]\n",
        new='    return ANALYSES["depth" if result.analysis == "length" else result.analysis]\n',
        tests=(f"{FIGURES}::test_every_registered_analysis_is_shown",),
    ),
    Mutant(
        name="the axis of one series stands below the other",
        area="drafter results",
        file=f"{ANALYSES}/series.py",
        old='x_label = "drafter layers"',
        new='x_label = "proposal length gamma"',
        tests=(f"{FIGURES}::test_every_analysis_has_a_figure_and_a_table",),
    ),
    Mutant(
        name="learning curves are called sampled",
        area="drafter results",
        file=f"{ANALYSES}/analysis.py",
        old=' and not self.settings.get("teacher_forced", False)',
        new="",
        tests=("tests/evaluation/test_drafter_cli.py::test_learning_curves_of_a_run",),
    ),
    Mutant(
        name="a table is judged on the prompts that it was fitted on",
        area="drafter results",
        file=f"{ANALYSES}/reliability.py",
        old="        trace = trace.of_prompts(keep)\n",
        new="",
        tests=(
            "tests/evaluation/test_reliability.py"
            "::test_prompts_that_the_table_was_fitted_on_are_left_out",
        ),
    ),
    Mutant(
        name="sampled where greedy is the default",
        area="shared options",
        file=WORKLOAD,
        old='help="0 is greedy.")] = 0.0',
        new='help="0 is greedy.")] = 1.0',
        tests=(f"{OPTIONS}::test_commands_offer_the_shared_options",),
    ),
    Mutant(
        name="a command's own default is forgotten",
        area="shared options",
        file=WORKLOAD,
        old="default=getattr(base, name)",
        new="default=field.default",
        tests=(f"{OPTIONS}::test_commands_offer_the_shared_options",),
    ),
)
