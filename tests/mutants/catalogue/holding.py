"""Corruption screen and soak: what differs, what explains it, growth, drift and accounts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SCREEN, SOAK = "loadtest/bench/screen.py", "loadtest/bench/soak.py"
LOAD, STREAM = "loadtest/bench/soak_load.py", "loadtest/client/stream.py"
SCREENS, SOAKS = ("tests/loadtest/test_screen.py",), ("tests/loadtest/test_soak.py",)

MUTANTS = (
    Mutant(
        name="holes of the heap are kept",
        area="soak",
        file="sglang_dspark/backends/cpu/platform.py",
        old="        trim(0)\n",
        new="        del trim\n        return\n",
        tests=("tests/backends/cpu/test_platform.py",),
    ),
    Mutant(
        name="an answer that is another's beginning is equal",
        area="screen",
        file=SCREEN,
        old="    same = len(a.ids) == len(b.ids) and a.finish == b.finish\n",
        new="    same = a.finish == b.finish\n",
        tests=SCREENS,
    ),
    Mutant(
        name="why an answer ended is not compared",
        area="screen",
        file=SCREEN,
        old="len(a.ids) == len(b.ids) and a.finish == b.finish",
        new="len(a.ids) == len(b.ids)",
        tests=SCREENS,
    ),
    Mutant(
        name="a tie of two unlikely tokens explains a difference",
        area="screen",
        file=SCREEN,
        old="below = top[0][0] - min(theirs, ours)",
        new="below = abs(theirs - ours)",
        tests=SCREENS,
    ),
    Mutant(
        name="the likelier of both tokens is judged",
        area="screen",
        file=SCREEN,
        old="min(theirs, ours)",
        new="max(theirs, ours)",
        tests=SCREENS,
    ),
    Mutant(
        name="the gap is asked a token too late",
        area="screen",
        file=SCREEN,
        old=".ids[: difference.position]",
        new=".ids[: difference.position + 1]",
        tests=SCREENS,
    ),
    Mutant(
        name="a cached prefix counts as prefilled in chunks",
        area="screen",
        file=SCREEN,
        old="each.prompt_tokens - each.cached > chunk",
        new="each.prompt_tokens > chunk",
        tests=SCREENS,
    ),
    Mutant(
        name="memory is judged with its start",
        area="soak",
        file=SOAK,
        old="    half = at[-1] / 2 if at else 0.0\n",
        new="    half = 0.0\n",
        tests=SOAKS,
    ),
    Mutant(
        name="growth is what may be growth",
        area="soak",
        file=SOAK,
        old="return self.judged and self.low > GROWTH",
        new="return self.judged and self.high > GROWTH",
        tests=SOAKS,
    ),
    Mutant(
        name="the middle third stands for the last",
        area="soak",
        file=SOAK,
        old="for third in (0, THIRDS - 1))",
        new="for third in (0, THIRDS - 2))",
        tests=SOAKS,
    ),
    Mutant(
        name="tokens that nobody received are not missed",
        area="soak",
        file=SOAK,
        old="not self.received <= self.generated <= most:",
        new="not self.received <= self.generated:",
        tests=SOAKS,
    ),
    Mutant(
        name="bursts come on top of the load",
        area="soak",
        file=LOAD,
        old="math.floor(self.rate * self.third_s) - len(at_once)",
        new="math.floor(self.rate * self.third_s)",
        tests=SOAKS,
    ),
    Mutant(
        name="several answers count as one",
        area="load client",
        file=STREAM,
        old='            index = choice.get("index", 0)\n',
        new="            index = 0\n",
        tests=("tests/loadtest/test_stream.py",),
    ),
)
