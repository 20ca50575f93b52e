"""Test the demo's output: exactly the accepted drafts are marked, and the tables are right."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sglang_dspark.cli._demo_view import (
    ACCEPTED,
    AnswerText,
    acceptance_table,
    answers,
    remarks,
    speed_table,
)
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.loadtest.bench.compare import Pair, as_metrics
from sglang_dspark.loadtest.client.metrics import Chunk, Completion, SpecStats

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
IDS = {character: index for index, character in enumerate(ALPHABET)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of one token per byte, so that an umlaut is two tokens."""
    tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("target")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def steps(target: Path, *texts: str) -> tuple[Chunk, ...]:
    """One chunk per text, a second apart."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    ids = [tuple(tokenizer.encode(text).ids) for text in texts]
    return tuple(
        Chunk(i + 1.0, t, len(x), x) for i, (t, x) in enumerate(zip(texts, ids, strict=True))
    )


def answer(target: Path) -> Completion:
    """a | bcd | e | fg, where the last step ended on a draft: accepted are bc and fg."""
    chunks = steps(target, "a", "bcd", "e", "fg")
    return Completion(chunks, 3, "length", SpecStats(3, 4, (1, 0, 2)))


def test_marks_are_the_accepted_drafts(target: Path) -> None:
    done = answer(target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    text = AnswerText(tokenizer, coloured=False).render(done.chunks, done.drafted())
    assert text.plain == "a«bc»de«fg»"
    coloured = AnswerText(tokenizer, coloured=True).render(done.chunks, done.drafted())
    assert coloured.plain == "abcdefg"
    marked = [coloured.plain[s.start : s.end] for s in coloured.spans if s.style == ACCEPTED]
    assert marked == ["bc", "fg"]


def test_a_character_split_between_steps_is_shown_once(target: Path) -> None:
    whole = steps(target, "aü!")[0].ids
    assert len(whole) == 4
    chunks = (Chunk(1.0, "a", 2, whole[:2]), Chunk(2.0, "ü!", 2, whole[2:]))
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    text = AnswerText(tokenizer, coloured=False).render(chunks, [0, 1])
    assert text.plain == "a«ü»!"


@pytest.mark.parametrize("terminal", [True, False])
def test_view_ends_with_the_exact_text(target: Path, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    done = answer(target)
    with answers(console, target, "dspark: prompts", 1) as view:
        view.begin(EvalPrompt("chat-01", "chat", ("Hello?",)), speculates=True)
        for chunk in done.chunks:
            view.chunk(chunk)
        view.finish(done)
    shown = out.getvalue()
    assert "[chat-01] Hello?" in shown
    assert ("abcdefg" if terminal else "a«bc»de«fg»") in shown
    assert "7 tokens, 2.0 tokens/s, first after 1000 ms, tau 2.33" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_an_answer_that_is_there_already_is_only_named(target: Path, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    ours = answer(target)
    other = Completion(steps(target, "a", "b", "c", "x"), 3, "length")
    with answers(console, target, "plain: prompts", 2) as view:
        for number, done in enumerate((replace(ours, spec=None), other)):
            view.begin(EvalPrompt(f"chat-{number}", "chat", ("Hello?",)), speculates=False)
            view.finish(done, ours)
    shown = out.getvalue()
    assert "[chat-0] identical; 7 tokens, 2.0 tokens/s, first after 1000 ms" in shown
    assert "abcdefg" not in shown
    assert "[chat-1] Hello?" in shown
    assert "abcx" in shown
    assert shown.count("identical") == 1


def pairs(target: Path) -> list[Pair]:
    """Two math prompts and a chat prompt; the second math answer differs from token 3 on."""
    ours = answer(target)
    same = Completion(
        tuple(Chunk(2.0 * t, c.text, c.tokens, c.ids) for t, c in enumerate(ours.chunks, 1)),
        3,
        "length",
    )
    other = Completion(steps(target, "a", "b", "c", "x"), 3, "length")
    prompts = [EvalPrompt(f"{d}-{i}", d, ("?",)) for i, d in enumerate(("math", "math", "chat"))]
    return [
        Pair(prompts[0], ours, same),
        Pair(prompts[1], ours, other),
        Pair(prompts[2], ours, same),
    ]


def test_tables_and_figures(target: Path) -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(speed_table(pairs(target), 2))
    console.print(acceptance_table(pairs(target), 2))
    rows = [line.split() for line in console.export_text().splitlines() if line.strip()]
    chat = next(row for row in rows if row[0] == "chat")
    # 6 tokens in 3 s against 6 in 6 s, TTFT 1 and 2 s
    assert chat == ["chat", "1.0", "2.0", "2.00x", "2000", "1000", "2.33", "yes", "1/1"]
    overall = next(row for row in rows if row[0] == "overall")
    assert overall[-2:] == ["no", "2/3"]
    assert rows[-1] == ["overall", "67%", "67%"]
    assert remarks(pairs(target)) == ["math-1: outputs part at token 3"]
    metrics = as_metrics(pairs(target), 2)
    assert metrics["tau_demo"] == pytest.approx(1 + 4 / 3)
    assert metrics["domains"]["chat"]["speedup"] == pytest.approx(2.0)
    assert [a["first_difference"] for a in metrics["answers"]] == [None, 3, None]


def test_merged_steps_are_admitted(target: Path) -> None:
    done = Completion(steps(target, "a", "bcde", "fg"), 3, "length", SpecStats(3, 4, (1, 0, 2)))
    pair = Pair(EvalPrompt("chat-1", "chat", ("?",)), done, done)
    assert "1 of 3 steps reached us together" in remarks([pair])[0]
