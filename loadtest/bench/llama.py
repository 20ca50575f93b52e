"""Compare one user on SGLang, plain and with DSPARK, and on llama.cpp: `dspark bench llama`.

llama.cpp is a Python package (`ik-llama-cpp-python`, the fork with the faster CPU kernels); the
package's own `llama-quantize` converts the target's GGUF to its formats. It runs in its own process
without a server, so that only SGLang's arms have the cost of HTTP. All arms answer the same prompts
greedily with the same number of tokens; stop tokens do not end an answer. One arm runs at a time,
waiting servers are frozen, and each repeat measures all arms in another order.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, Protocol

from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import paired_ratio
from sglang_dspark.loadtest.client.client import Sampling, SGLangClient
from sglang_dspark.loadtest.client.metrics import median
from sglang_dspark.loadtest.servers.server import ServerProcess

PACKAGE = "ik-llama-cpp-python"
FORMATS = ("f16", "q8_0", "q4_0")
RIVAL = "llama.cpp"
_WORKER = "sglang_dspark.loadtest.bench.llama_worker"


@dataclass(frozen=True)
class Speed:
    """Speed of one arm in one repeat, over all its answers: output tokens/s, and tokens/s after the
    first token."""

    whole: float
    decode: float


@dataclass(frozen=True)
class Answered:
    """One answer: its tokens, seconds to the first and from there to the last."""

    tokens: int
    first_s: float
    rest_s: float


class Arm(Protocol):
    """A server that answers prompts one at a time."""

    name: str

    async def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answered]:
        """Answer the prompts in turn; return one answer for each."""


class Served:
    """A server that is frozen while others answer."""

    def __init__(self, name: str, process: ServerProcess) -> None:
        self.name, self._process = name, process

    async def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answered]:
        """Answer as `Arm`, after emptying the prefix cache. Raises DSparkError if one fails."""
        self._process.resume()
        try:
            async with SGLangClient(self._process.spec.url) as client:
                await client.complete(prompts[-1], Sampling(8))
                await client.flush_cache()
                sampling = Sampling(tokens, ignore_eos=True)
                done = [await client.complete(prompt, sampling) for prompt in prompts]
        finally:
            self._process.pause()
        return [Answered(each.tokens, each.ttft, each.decode_seconds) for each in done]


class LlamaCpp:
    """A llama.cpp process with one format's weights; it waits for input while others answer."""

    def __init__(self, kind: str, gguf: Path, threads: int) -> None:
        self.name = f"{RIVAL} {kind}"
        command = [sys.executable, "-m", _WORKER, str(gguf), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    async def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answered]:
        """Answer as `Arm`. Raises DSparkError if the process has ended."""
        self.tokens_of(prompts[-1], 8)
        return [self._answered(prompt, tokens) for prompt in prompts]

    def tokens_of(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Return the token ids of one answer."""
        return list(self._ask(prompt, tokens)["ids"])

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answered(self, prompt: Sequence[int], tokens: int) -> Answered:
        found = self._ask(prompt, tokens)
        return Answered(len(found["ids"]), found["first_s"], found["rest_s"])

    def _ask(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ids": list(prompt), "tokens": tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_line` reports how it ended
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DSparkError(
                f"the process of {self.name} ended with status {self._process.wait()}: run "
                f"{' '.join(map(str, self._process.args))} to see why"  # type: ignore[arg-type]
            )
        return dict(json.loads(line))


@dataclass(frozen=True)
class Plan:
    """prompts: token ids. tokens: of an answer. threads: that each arm computes with."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: int
    repeats: int
    threads: int


def require_package() -> None:
    """Raise DSparkError if llama.cpp's package is missing."""
    if find_spec("ik_llama_cpp") is None:
        raise DSparkError(f"llama.cpp is not installed: pip install {PACKAGE} py-cpuinfo")


def quantised(gguf: Path, kind: str, folder: Path) -> Path:
    """Convert the file's weights to another format, as a file in `folder`.

    Raises DSparkError if llama-quantize fails.
    """
    from ik_llama_cpp import find_quantize_bin

    out = folder / f"{gguf.stem}.{kind}.gguf"
    command = [str(find_quantize_bin()), "--allow-requantize", str(gguf), str(out), kind.upper()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not out.is_file():
        last = (done.stdout + done.stderr).strip().rsplit("\n", 1)[-1]
        raise DSparkError(
            f"llama-quantize made no {kind} of {gguf} (status {done.returncode}: {last}); name "
            f"other formats with --formats, or another file with --gguf"
        )
    return out


async def measure(
    arms: Sequence[Arm], plan: Plan, on_round: Callable[[str, Speed], None]
) -> dict[str, list[Speed]]:
    """Measure the speeds of every arm, by repeat. on_round: called after each."""
    found: dict[str, list[Speed]] = {arm.name: [] for arm in arms}
    order, draws = list(arms), Random(0)
    for _ in range(plan.repeats):
        draws.shuffle(order)
        for arm in order:
            speed = speed_of(await arm.answers(plan.prompts, plan.tokens))
            found[arm.name].append(speed)
            on_round(arm.name, speed)
    return found


def speed_of(answers: Sequence[Answered]) -> Speed:
    """Compute the speed over all answers of a repeat."""
    tokens = sum(each.tokens for each in answers)
    first, rest = (sum(getattr(each, name) for each in answers) for name in ("first_s", "rest_s"))
    return Speed(tokens / (first + rest), (tokens - len(answers)) / rest)


def as_metrics(found: dict[str, list[Speed]], plan: Plan, about: dict[str, Any]) -> dict[str, Any]:
    """Build JSON-ready metrics: medians, and each SGLang arm over each of llama.cpp, paired."""
    rivals = [name for name in found if name.startswith(RIVAL)]
    ours = [name for name in found if name not in rivals]
    pairs = [(mine, other) for mine in ours for other in rivals]
    return {
        **about,
        "arms": [_row(name, speeds) for name, speeds in found.items()],
        "ratios": [_ratio(mine, found[mine], other, found[other]) for mine, other in pairs],
        "prompts": len(plan.prompts),
        "tokens": plan.tokens,
        "repeats": plan.repeats,
        "threads": plan.threads,
        "method": (
            "one user, greedy, the same prompts and tokens; all arms loaded, one runs at a time; "
            "SGLang's behind HTTP, llama.cpp called in its process; rows beside int8 in eight bits "
            "(cpu.activations: narrow), as beside Q8_0; tokens/s with the prefill, decode without"
        ),
    }


def _row(name: str, speeds: Sequence[Speed]) -> dict[str, Any]:
    return {
        "arm": name,
        "tokens_per_s": median([each.whole for each in speeds]),
        "decode_tokens_per_s": median([each.decode for each in speeds]),
        "repeats": [asdict(each) for each in speeds],
    }


def _ratio(name: str, ours: Sequence[Speed], other: str, theirs: Sequence[Speed]) -> dict[str, Any]:
    found: dict[str, Any] = {"arm": name, "over": other}
    for field in ("whole", "decode"):
        ratio = paired_ratio(
            [getattr(each, field) for each in ours], [getattr(each, field) for each in theirs]
        )
        found |= {field: ratio.mid, f"{field}_ci95": ratio.bounds}
    return found
