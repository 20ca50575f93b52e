"""Build the workload: prompts in the target's chat template, and the servers' flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang_dspark.common.files import integer, load_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.families.chain.served import chain_gamma, is_chain
from sglang_dspark.loadtest.client.replay import Material
from sglang_dspark.loadtest.client.traces import RecordedLoad
from sglang_dspark.loadtest.servers.server import ServerSpec

# Small pools: a demo needs no more, and two servers fit a laptop's memory side by side.
_POOLS = ("--max-running-requests", "16", "--max-total-tokens", "32768")


def interleave(prompts: Sequence[EvalPrompt]) -> list[EvalPrompt]:
    """Reorder the prompts with alternating domains, so that any prefix is a mix."""
    queues: dict[str, list[EvalPrompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.domain, []).append(prompt)
    longest = max(len(queue) for queue in queues.values())
    return [queue[i] for i in range(longest) for queue in queues.values() if i < len(queue)]


def render(target: Path, prompt: EvalPrompt) -> str:
    """Render a prompt in the target's own chat template, up to the start of the answer.

    Done here, and not by the server's chat interface, because only SGLang's completions interface
    streams token ids. Raises DSparkError if the target has no template.
    """
    path = target / "chat_template.jinja"
    if not path.is_file():
        raise DSparkError(f"{target} has no chat_template.jinja; name a chat model with one")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(path.read_text())
    return template.render(messages=prompt.messages(), add_generation_prompt=True)


def trace_material(prompts: Sequence[EvalPrompt], tokenizer: Any) -> Material:
    """Tokenize the prompts' texts, from which a trace's prompts are built."""
    texts = ["\n\n".join((*prompt.turns, "")) for prompt in prompts]
    pieces = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return Material(tuple(tuple(piece) for piece in pieces if piece))


def require_room(target: Path, recorded: RecordedLoad) -> None:
    """Raise DSparkError if a recorded request is longer than the target's context, naming it."""
    with reading(target / "config.json", "model's configuration", "name another target"):
        raw = load_json(target / "config.json", finite=False)
        most = (raw.get("text_config") or raw).get("max_position_embeddings")
        if most is None:
            return
        room = integer(most, 1, 1 << 40)
    for row in recorded.rows:
        if row.tokens > room:
            raise DSparkError(
                f"{recorded.path}:{row.line}: {row.tokens} tokens, prompt and answer, and the "
                f"target's context is {room}; leave such requests out with open.trace.longest"
            )


def plain_server(target: Path, port: int, device: str) -> ServerSpec:
    """Define the plain server. device: `cpu`, or `cuda` for SGLang's own choice of types."""
    return ServerSpec("plain", target, port, (*device_flags(device), *_POOLS))


def dspark_server(target: Path, drafter: Path, port: int, device: str) -> ServerSpec:
    """Define the DSPARK server; its flags are the plain server's and the drafter's."""
    speculation = ("--speculative-algorithm", "DSPARK")
    draft = ("--speculative-draft-model-path", str(drafter))
    arguments = (*device_flags(device), *speculation, *draft, *_POOLS)
    return ServerSpec("dspark", target, port, arguments)


def drafter_gamma(drafter: Path) -> int:
    """Read a drafter directory's gamma, the drafts a step that DSPARK makes by default."""
    path = drafter / "config.json"
    with reading(path, "DSpark drafter's config", "name another drafter"):
        raw = load_json(path, finite=False)
        if is_chain(raw):
            return chain_gamma(raw)
        return integer(raw["block_size"], 1, 4096)


def device_flags(device: str) -> tuple[str, ...]:
    """Return the server's flags for a device: `cpu`, or `cuda` for SGLang's own choice of types."""
    # float32 on CPUs: bfloat16 is several times slower where the instruction set has no dot product
    return ("--device", "cpu", "--dtype", "float32") if device == "cpu" else ("--device", device)
