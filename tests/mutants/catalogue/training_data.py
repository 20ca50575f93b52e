"""Own chat data, given answers, and a run's curves."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONVERSATIONS = "sglang_dspark/evaluation/conversations.py"
PROMPTS = "sglang_dspark/training/prompts.py"
CURVES = "sglang_dspark/training/curves.py"
READING = "tests/evaluation/test_conversations.py"
CHAT = "tests/training/test_chat_data.py"
CURVE_TESTS = "tests/training/test_curves.py"
ROWS = "tests/training/test_prompt_rows.py"
LOSING = (f"{ROWS}::test_a_row_that_would_lose_something_is_skipped",)
GIVEN = (f"{CHAT}::test_given_answers_are_stored_with_the_targets_states",)

MUTANTS = (
    Mutant(
        name="the row's answer stays in the prompt",
        area="chat data",
        file=CONVERSATIONS,
        old="return Conversation(turns[:end], ",
        new="return Conversation(turns, ",
        tests=(f"{READING}::test_both_forms_read_the_same_up_to_the_users_last_words",),
    ),
    Mutant(
        name="two turns of one speaker in a row",
        area="chat data",
        file=CONVERSATIONS,
        old='if role == before or role == "system":',
        new='if role == "system":',
        tests=(f"{READING}::test_a_broken_row_names_its_field",),
    ),
    Mutant(
        name="lines of a JSON list are counted from the list's start",
        area="chat data",
        file=CONVERSATIONS,
        old='line, counted = line + text.count("\\n", counted, at), at',
        new='line, counted = line + text.count("\\n", 0, at), at',
        tests=(f"{READING}::test_a_json_list_has_the_rows_of_the_lines",),
    ),
    Mutant(
        name="what was said before the last user turn is left out",
        area="chat data",
        file=PROMPTS,
        old='return (*self.before, ("user", self.turns[0]))',
        new='return (("user", self.turns[0]),)',
        tests=(f"{CHAT}::test_a_conversation_is_the_prompt_up_to_the_users_last_words",),
    ),
    Mutant(
        name="the package's own prompts inside a conversation are trained on",
        area="chat data",
        file=PROMPTS,
        old='return (*(text for role, text in self.before if role == "user"), *self.turns)',
        new="return self.turns",
        tests=(f"{CHAT}::test_the_packages_own_prompts_in_a_conversation_are_kept_out",),
    ),
    Mutant(
        name="a given answer keeps what the template puts behind it",
        area="chat data",
        file=PROMPTS,
        old="return ids[:end]",
        new="return ids + ids[-1:]",
        tests=GIVEN,
    ),
    Mutant(
        name="a given answer without its partition functions",
        area="chat data",
        file="sglang_dspark/training/responses.py",
        old="for r, first in enumerate(firsts or ()):",
        new="for r, first in enumerate(()):",
        tests=GIVEN,
    ),
    Mutant(
        name="partition functions of the first rows of a given answer only",
        area="chat data",
        file="sglang_dspark/training/responses.py",
        old="at = start + offset",
        new="at = start",
        tests=(f"{CHAT}::test_a_long_given_answer_is_cut_and_trains",),
    ),
    Mutant(
        name="given answers share a store with the target's",
        area="chat data",
        file="sglang_dspark/training/store.py",
        old='"layer_ids", "cached", "answers")',
        new='"layer_ids", "cached")',
        tests=(f"{CHAT}::test_given_and_own_answers_do_not_share_a_store",),
    ),
    Mutant(
        name="prompts that are too long are left out without a word",
        area="chat data",
        file="sglang_dspark/training/plan.py",
        old="            if skipped:\n                skipped(reason)\n    return planned",
        new="    return planned",
        tests=(f"{CHAT}::test_what_cannot_be_used_names_file_line_and_field",),
    ),
    Mutant(
        name="half a surrogate pair is read as text",
        area="chat data",
        file=CONVERSATIONS,
        old="        text.encode()\n",
        new="        pass\n",
        tests=LOSING,
    ),
    Mutant(
        name="a byte that is not UTF-8 is replaced",
        area="chat data",
        file="sglang_dspark/evaluation/prompt_files.py",
        old='errors="surrogateescape"',
        new='errors="replace"',
        tests=LOSING,
    ),
    Mutant(
        name="a prompt next to a conversation is lost",
        area="chat data",
        file=PROMPTS,
        old="    require_one_form(row)\n",
        new="",
        tests=LOSING,
    ),
    Mutant(
        name="a response next to a prompt is ignored",
        area="chat data",
        file=PROMPTS,
        old="tuple(turns), where, answer=answer)",
        new="tuple(turns), where)",
        tests=(f"{ROWS}::test_an_answer_beside_a_prompt_is_as_one_of_chat_data",),
    ),
    Mutant(
        name="a drafter is trained on answers of another kind",
        area="chat data",
        file="sglang_dspark/training/setup.py",
        old='        "answers": cfg.data.answers,\n',
        new="",
        tests=(f"{ROWS}::test_a_drafter_is_not_trained_on_other_answers_than_it_says",),
    ),
    Mutant(
        name="reasons are lost where no row is left",
        area="chat data",
        file="sglang_dspark/cli/train.py",
        old="    finally:  # also where no row is left, so that the reasons are known\n",
        new="    except KeyError:\n",
        tests=(f"{ROWS}::test_reasons_come_out_where_no_row_is_left",),
    ),
    Mutant(
        name="curves of a killed run stay beside the resumed one's",
        area="curves",
        file=CURVES,
        old="SummaryWriter(str(folder), purge_step=step + 1)",
        new="SummaryWriter(str(folder))",
        tests=(f"{CURVE_TESTS}::test_a_resumed_run_goes_on_in_the_same_curves",),
    ),
    Mutant(
        name="the last report before a resumed step is taken out",
        area="curves",
        file=CURVES,
        old="purge_step=step + 1",
        new="purge_step=step",
        tests=(f"{CURVE_TESTS}::test_a_resumed_run_goes_on_in_the_same_curves",),
    ),
    Mutant(
        name="the learning rate of the next step is reported",
        area="curves",
        file="sglang_dspark/training/trainer.py",
        old="learning_rate(self.step - 1, s)",
        new="learning_rate(self.step, s)",
        tests=(f"{CURVE_TESTS}::test_reports_are_of_the_objective_and_the_schedule",),
    ),
    Mutant(
        name="the reported part L_tv is the total variation, half of it",
        area="curves",
        file="sglang_dspark/families/learning/losses.py",
        old="2 * weight @ (1 - accept)",
        new="weight @ (1 - accept)",
        tests=("tests/training/test_losses.py::test_fused_loss_and_gradient_equal_the_papers",),
    ),
    Mutant(
        name="a missing TensorBoard is found after the answers are made",
        area="curves",
        file="sglang_dspark/cli/train.py",
        old="    require_tensorboard(cfg.curves)\n",
        new="",
        tests=(f"{CURVE_TESTS}::test_without_the_package_it_is_one_line",),
    ),
)
