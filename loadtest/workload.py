"""What is sent and to whom: prompts in the target's chat template, and the servers' flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.server import ServerSpec

DOMAINS = ("math", "code", "chat")
# Small pools: a demo needs no more, and two servers fit a laptop's memory side by side.
_POOLS = ("--max-running-requests", "16", "--max-total-tokens", "32768")


@dataclass(frozen=True)
class Prompt:
    """One user turn; `text` is the turn alone until `render` puts the chat template around it."""

    id: str
    domain: str
    text: str


def demo_prompts(per_domain: int | None = None) -> list[Prompt]:
    """The package's own prompts, the first `per_domain` of each domain (all when None)."""
    import sglang_dspark.evaluation as package

    return load_prompts(Path(package.__path__[0]) / "demo_prompts.jsonl", per_domain)


def load_prompts(path: Path, per_domain: int | None = None) -> list[Prompt]:
    """Prompts of a JSONL file with the fields id, domain and prompt.

    Raises DSparkError naming the line that cannot be read.
    """
    prompts: list[Prompt] = []
    taken: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DSparkError(f"cannot read prompts from {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = Prompt(str(row["id"]), str(row["domain"]), str(row["prompt"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DSparkError(
                f"{path} line {number}: expected an object with id, domain and prompt ({error!r})"
            ) from error
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if per_domain is None or taken[prompt.domain] <= per_domain:
            prompts.append(prompt)
    if not prompts:
        raise DSparkError(f"{path} holds no prompt")
    return prompts


def interleave(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts with the domains taking turns, so that any prefix is a mix."""
    queues: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.domain, []).append(prompt)
    longest = max(len(queue) for queue in queues.values())
    return [queue[i] for i in range(longest) for queue in queues.values() if i < len(queue)]


def render(target: Path, text: str) -> str:
    """`text` as a user's turn in the target's own chat template, ready for its answer."""
    path = target / "chat_template.jinja"
    if not path.is_file():
        raise DSparkError(f"{target} has no chat_template.jinja; name a chat model with one")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(path.read_text())
    turns = [{"role": "user", "content": text}]
    return template.render(messages=turns, add_generation_prompt=True)


def plain_server(target: Path, port: int, device: str) -> ServerSpec:
    """The target without speculation. device: `cpu`, or `cuda` for SGLang's own choice of types."""
    return ServerSpec("plain", target, port, (*_device_flags(device), *_POOLS))


def dspark_server(target: Path, drafter: Path, port: int, device: str) -> ServerSpec:
    """The target with DSPARK; the flags are the plain server's and the drafter's."""
    speculation = ("--speculative-algorithm", "DSPARK")
    draft = ("--speculative-draft-model-path", str(drafter))
    arguments = (*_device_flags(device), *speculation, *draft, *_POOLS)
    return ServerSpec("dspark", target, port, arguments)


def drafter_gamma(drafter: Path) -> int:
    """Block size gamma of a drafter directory."""
    path = drafter / "config.json"
    try:
        return int(json.loads(path.read_text())["block_size"])
    except (OSError, ValueError, KeyError) as error:
        raise DSparkError(f"{path} is not a DSpark drafter's config ({error!r})") from error


def _device_flags(device: str) -> tuple[str, ...]:
    # float32 on CPUs: bfloat16 is several times slower where the instruction set has no dot product
    return ("--device", "cpu", "--dtype", "float32") if device == "cpu" else ("--device", device)
