"""`dspark train`: prompts that the target writes, responses with hidden states, a drafter."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sglang_dspark.cli._progress import stages

if TYPE_CHECKING:
    from sglang_dspark.training.config import DataConfig

app = typer.Typer(help="Train a drafter for a target.", no_args_is_help=True)
ConfigOption = Annotated[Path, typer.Option("--config", help="YAML, see configs/train/")]


def _open_target(data: DataConfig, layer_ids: tuple[int, ...]) -> tuple[Any, Any]:
    import torch
    from transformers import AutoTokenizer

    from sglang_dspark.evaluation.target import TargetModel

    torch.set_num_threads(data.threads)
    tokenizer = AutoTokenizer.from_pretrained(str(data.target))
    target = TargetModel.load(data.target, layer_ids, half_products=data.half_products)
    return target, tokenizer


@app.command()
def prompts(config: ConfigOption, count: Annotated[int, typer.Option()] = 2000) -> None:
    """Let the target write `count` user prompts into the config's `self_prompts` file."""
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.training.config import load_config
    from sglang_dspark.training.prompts import Prompt, user_turn_prefix
    from sglang_dspark.training.responses import ResponseGenerator

    data = load_config(config).data
    if data.self_prompts is None:
        raise DSparkError(f"{config}: set data.self_prompts to the file to write")
    target, tokenizer = _open_target(data, ())
    prefix = user_turn_prefix(tokenizer)
    stop = frozenset({tokenizer.eos_token_id})
    wanted = (Prompt(f"self-{i}", "chat", prefix, 1.0, 120) for i in range(count))
    generator = ResponseGenerator(target, data.rows, 192, stop, keep_states=False, seed=data.seed)
    seen: set[str] = set()
    data.self_prompts.parent.mkdir(parents=True, exist_ok=True)
    with stages(Console()) as show, data.self_prompts.open("w") as out:
        for number, response in enumerate(generator.run(wanted, lambda _: None), 1):
            show("prompts by the target", number, count)
            text = tokenizer.decode(response.tokens[response.prompt_len : -1]).strip()
            ended = int(response.tokens[-1]) in stop
            if ended and len(text) >= 12 and text not in seen:
                seen.add(text)
                row = {"id": response.id, "domain": "chat", "source": "self", "turns": [text]}
                out.write(json.dumps(row) + "\n")
    print(f"{len(seen)} prompts in {data.self_prompts}")


@app.command()
def data(config: ConfigOption, minutes: Annotated[float, typer.Option()] = 1e9) -> None:
    """Let the target answer the prompts; keep tokens and hidden states. Resumable."""
    from sglang_dspark.training.config import load_config
    from sglang_dspark.training.plan import planned_prompts
    from sglang_dspark.training.provenance import target_sha256
    from sglang_dspark.training.responses import ResponseGenerator
    from sglang_dspark.training.store import StoreWriter

    cfg = load_config(config)
    layer_ids = cfg.drafter.target_layer_ids
    target, tokenizer = _open_target(cfg.data, layer_ids)
    meta = {
        "target_sha256": target_sha256(cfg.data.target),
        "layer_ids": list(layer_ids),
        "temperatures": list(cfg.data.temperatures),
        "half_products": cfg.data.half_products,
    }
    writer = StoreWriter(cfg.data.store, meta)
    todo = [p for p in planned_prompts(cfg.data, tokenizer) if p.id not in writer.done]
    deadline = time.monotonic() + 60 * minutes
    queue = (p for p in todo if time.monotonic() < deadline)
    max_len = cfg.data.max_prompt_tokens + cfg.data.max_new_tokens + 1
    stop = frozenset({tokenizer.eos_token_id})
    seed = cfg.data.seed + len(writer.done)
    generator = ResponseGenerator(target, cfg.data.rows, max_len, stop, seed=seed)
    made, started = [0], time.monotonic()

    def tick(n: int) -> None:
        made[0] += n

    with stages(Console()) as show:
        try:
            for number, response in enumerate(generator.run(queue, tick), 1):
                writer.add(response)
                show("responses", number, len(todo))
        finally:
            writer.flush()
    rate = made[0] / (time.monotonic() - started)
    print(f"{made[0]} tokens, {rate:.0f} tokens/s")
    print(f"{len(writer.done)} responses in {cfg.data.store}")


@app.command()
def drafter(config: ConfigOption) -> None:
    """Train the drafter on the stored responses; goes on where a stopped run left off."""
    from sglang_dspark.training.config import load_config
    from sglang_dspark.training.setup import prepare

    cfg = load_config(config)
    trainer, note = prepare(cfg)
    print(note)
    log = (cfg.run_dir / "metrics.jsonl").open("a")
    console = Console()
    with stages(console) as show:

        def report(step: int, means: dict[str, float]) -> None:
            log.write(json.dumps({"step": step, **means}) + "\n")
            log.flush()
            left = (cfg.schedule.steps - step) / means["steps_per_s"]
            shown = " ".join(f"{name} {value:.3f}" for name, value in means.items())
            console.print(f"step {step}: {shown}, {left / 60:.0f} min left", highlight=False)
            show("training", step, cfg.schedule.steps)

        trainer.run(report)
    log.close()
    print(f"drafter in {cfg.run_dir / 'drafter'}")
