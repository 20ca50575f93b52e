"""Show the output of `dspark demo`: streamed answers, accepted drafts marked, and final tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from sglang_dspark.cli._progress import bars
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.loadtest.bench.compare import Pair, merged_steps, summarise
from sglang_dspark.loadtest.client.metrics import Chunk, Completion

ACCEPTED = "bold green underline"
_OPEN, _CLOSE = "«", "»"  # the mark without colours


class AnswerText:
    """The text of an answer, token by token, with the accepted drafts marked."""

    def __init__(self, tokenizer: Tokenizer, coloured: bool):
        self._tokenizer = tokenizer
        self._coloured = coloured

    def render(self, chunks: Sequence[Chunk], drafted: Sequence[int]) -> Text:
        """Render an answer. drafted[i]: how many leading tokens of chunk i are accepted drafts."""
        stream = DecodeStream(skip_special_tokens=True)
        runs: list[tuple[bool, str]] = []
        for chunk, count in zip(chunks, drafted, strict=True):
            for index, token in enumerate(chunk.ids):
                piece = stream.step(self._tokenizer, token)  # None inside a character
                if piece:
                    runs.append((index < count, piece))
        text = Text()
        for marked, piece in _joined(runs):
            if marked and not self._coloured:
                text.append(f"{_OPEN}{piece}{_CLOSE}")
            else:
                text.append(piece, style=ACCEPTED if marked else "")
        return text


class AnswerView:
    """Show the answers of one server; created by `answers`."""

    def __init__(self, console: Console, display: Progress, task: TaskID, writer: AnswerText):
        self._console = console
        self._display = display
        self._task = task
        self._writer = writer
        self._live: Live | None = None
        self._chunks: list[Chunk] = []
        self._prompt: EvalPrompt | None = None
        self._speculates = False

    def begin(self, prompt: EvalPrompt, speculates: bool) -> None:
        """Begin the view of a prompt that was sent."""
        self._chunks, self._prompt, self._speculates = [], prompt, speculates

    def chunk(self, chunk: Chunk) -> None:
        """Add the tokens of one step; the last one counts as the bonus until the end is known."""
        self._chunks.append(chunk)
        if self._live is not None:
            self._live.update(self._picture())

    def finish(self, done: Completion, shown: Completion | None = None) -> None:
        """Print the complete answer permanently, with the server's counts.

        shown: the other server's answer, printed earlier: an identical one is only named.
        """
        assert self._prompt is not None, "an answer ends that has not begun"
        speed = f"{done.tokens_per_s:.1f} tokens/s, first after {1e3 * done.ttft:.0f} ms"
        tau = f", tau {done.spec.tau:.2f}" if done.spec is not None else ""
        note = f"{done.tokens} tokens, {speed}{tau}"
        self._chunks = []
        self._display.advance(self._task)
        if self._live is not None:  # remove the running text before the final print
            self._live.update(self._picture(), refresh=True)
        if shown is not None and shown.ids == done.ids:
            lines = Text(f"[{self._prompt.id}] identical; {note}", style="dim")
        else:
            body = self._writer.render(done.chunks, done.drafted())
            lines = Text("\n").join([self._title(), body, Text(f"{note}\n", style="dim")])
        # in a file, lines are not wrapped
        self._console.print(lines, soft_wrap=not self._console.is_terminal)

    def attach(self, live: Live) -> None:
        """Draw into a live display."""
        self._live = live
        live.update(self._picture())

    def _title(self) -> Text:
        prompt = self._prompt
        return Text(f"[{prompt.id}] {prompt.turns[-1]}" if prompt else "", style="bold")

    def _picture(self) -> Group:
        if not self._chunks:
            return Group(self._display)
        drafted = [
            chunk.tokens - 1 if i and self._speculates else 0
            for i, chunk in enumerate(self._chunks)
        ]
        body = self._writer.render(self._chunks, drafted)
        return Group(self._title(), body, Text(), self._display)


@contextmanager
def answers(console: Console, target: Path, label: str, count: int) -> Iterator[AnswerView]:
    """Yield a view of `count` answers: live text and a bar on a terminal, else whole answers."""
    display = bars(console)
    task = display.add_task(label, total=count, count="")
    writer = AnswerText(Tokenizer.from_file(str(target / "tokenizer.json")), console.is_terminal)
    view = AnswerView(console, display, task, writer)
    if not console.is_terminal:
        yield view
        return
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        view.attach(live)
        yield view


def legend(console: Console) -> Text:
    """Describe how accepted drafts are marked here."""
    if console.is_terminal:
        return Text.assemble(("Marked like this", ACCEPTED), ": drafted and accepted.")
    return Text(f"Between {_OPEN} and {_CLOSE}: drafted and accepted.")


def speed_table(pairs: Sequence[Pair], gamma: int) -> Table:
    """Tabulate speed, latency, tau and equality per domain."""
    table = Table(title="DSPARK against plain decoding: one user, greedy", box=box.SIMPLE_HEAD)
    table.add_column("domain", no_wrap=True)
    speeds = ("plain\ntok/s", "DSPARK\ntok/s", "speed-up", "plain\nTTFT ms", "DSPARK\nTTFT ms")
    for name in (*speeds, "tau", "identical\noutput"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summarise(pairs, gamma):
        table.add_row(
            row.domain,
            f"{row.plain_tokens_per_s:.1f}",
            f"{row.dspark_tokens_per_s:.1f}",
            f"{row.speedup:.2f}x",
            f"{row.plain_ttft_ms:.0f}",
            f"{row.dspark_ttft_ms:.0f}",
            f"{row.tau:.2f}",
            f"{'yes' if row.identical == row.prompts else 'no'} {row.identical}/{row.prompts}",
        )
    return table


def acceptance_table(pairs: Sequence[Pair], gamma: int) -> Table:
    """Tabulate how often the first k drafts of a step were all accepted."""
    table = Table(title="Steps whose first k drafts were accepted", box=box.SIMPLE_HEAD)
    table.add_column("domain")
    for k in range(1, gamma + 1):
        table.add_column(f"k = {k}", justify="right")
    for row in summarise(pairs, gamma):
        table.add_row(row.domain, *(f"{share:.0%}" for share in row.acceptance))
    return table


def remarks(pairs: Sequence[Pair]) -> list[str]:
    """Return notes on the tables: where outputs differ, and merged steps."""
    lines = [
        f"{pair.prompt.id}: outputs part at token {pair.first_difference()}"
        for pair in pairs
        if pair.first_difference() is not None
    ]
    merged = sum(merged_steps(pair.dspark) for pair in pairs)
    if merged:
        steps = sum(pair.dspark.decode_steps for pair in pairs)
        lines.append(
            f"{merged} of {steps} steps reached us together with another: marks approximate"
        )
    return lines


def _joined(runs: Sequence[tuple[bool, str]]) -> Iterator[tuple[bool, str]]:
    """Join neighbouring pieces with the same mark."""
    text, mark = "", False
    for marked, piece in runs:
        if marked != mark and text:
            yield mark, text
            text = ""
        text, mark = text + piece, marked
    if text:
        yield mark, text
