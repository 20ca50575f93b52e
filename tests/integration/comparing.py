"""One question to the plain server and to one that drafts: answers must be the same, by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.integration.serving import Served
from tests.integration.test_greedy_equal import accepted_drafts

# Greedy, and sampling whose tokens the seed decides.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "sampling_seed": 21},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 22},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "sampling_seed": 23},
)


class Question(NamedTuple):
    """A request to /generate. fields: those next to its sampling parameters."""

    prompt: str
    sampling: dict[str, Any]
    tokens: int = 32
    fields: dict[str, Any] = {}  # noqa: RUF012  (never mutated)

    def ask(self, server: Served) -> Any:
        """The answer; a list of them where the sampling parameters ask for several."""
        return server.generate(
            self.prompt, self.tokens, sampling_params=self.sampling, **self.fields
        )


def ask_all(server: Served, questions: Sequence[Question], concurrency: int) -> list[Any]:
    """Answers in the questions' order, `concurrency` of them at a time."""
    return server.each(lambda question: question.ask(server), questions, concurrency)


def flat(answers: Sequence[Any]) -> list[dict[str, Any]]:
    """One list of single answers."""
    single: list[dict[str, Any]] = []
    for answer in answers:
        single += answer if isinstance(answer, list) else [answer]
    return single


def equal_answers(
    plain: Served, drafting: Served, questions: Sequence[Question], concurrency: int
) -> list[dict[str, Any]]:
    """Ask the plain server one by one, the other several at a time; the other's answers."""
    wanted = flat(ask_all(plain, questions, 1))
    got = flat(ask_all(drafting, questions, concurrency))
    assert len(got) == len(wanted)
    for i, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        where = f"answer {i}: {ours['text'][:200]!r}, plain {theirs['text'][:200]!r}"
        assert ours["output_ids"] == theirs["output_ids"], where
        assert ours["text"] == theirs["text"], where
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"], where
    accepted, _ = accepted_drafts(got)
    assert accepted > 0, "no draft was accepted: nothing was tested"
    return got
