"""Record traces for calibration from answers of the target and a replay of the drafter.

The target answers, batched and without a drafter, and the drafter's part is replayed on the answers
(`evaluation/replay.py`). The distribution is that of decoding with the drafter, at a third of the
target's work and with any number of requests in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from sglang_dspark.drafter import DSparkDrafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import DecodeSettings
from sglang_dspark.evaluation.prompts import stop_token_ids
from sglang_dspark.evaluation.recording import Workload, describe, settings_json
from sglang_dspark.evaluation.replay import Answer, Replay
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.evaluation.traces import Trace, TracedPrompt, prompt_digest
from sglang_dspark.families.registry import drafter_layers, open_drafter
from sglang_dspark.models.identity import target_sha256 as weights_sha256
from sglang_dspark.training.prompts import Prompt
from sglang_dspark.training.responses import ResponseGenerator
from sglang_dspark.training.store import Response, StoreReader


def record_answers(
    workload: Workload,
    drafter: Path,
    *,
    half_products: bool = False,
    on_finish: Callable[[], None] = lambda: None,
) -> Trace:
    """Let the target answer the workload's prompts and replay the answers with the drafter.

    half_products: the target's products in bfloat16, on CPUs that have it. `on_finish` is called
    after each answer. Raises DSparkError for a drafter that is not a DSpark drafter or does not
    fit.
    """
    settings = workload.settings
    target = TargetModel.load(workload.target, drafter_layers(drafter), half_products=half_products)
    module = open_calibrated(drafter, target)
    answers = _answers(workload, target, on_finish)
    traced = [
        TracedPrompt(prompt.id, prompt.domain, prompt_digest(ids))
        for prompt, ids in zip(workload.prompts, workload.ids, strict=True)
    ]
    replay = Replay(
        target, module, settings.temperature, stop_ids=settings.stop_ids, seed=settings.seed
    )
    return Trace(
        drafter=describe(drafter, module.config.gamma),
        target=workload.target.name,
        target_sha256=workload.target_sha256,
        settings=_settings(settings),
        prompts=tuple(traced),
        generations=tuple(replay.run(answers)),
    )


def _answers(
    workload: Workload, target: TargetModel, on_finish: Callable[[], None]
) -> list[Answer]:
    """Return the target's answers to the workload's prompts, in their order."""
    settings = workload.settings
    longest = max(map(len, workload.ids)) + settings.max_new_tokens + 1
    rows = min(settings.batch, len(workload.ids))
    generator = ResponseGenerator(target, rows, longest, settings.stop_ids, seed=settings.seed)
    prompts = (
        Prompt(str(i), prompt.domain, ids, settings.temperature, settings.max_new_tokens)
        for i, (prompt, ids) in enumerate(zip(workload.prompts, workload.ids, strict=True))
    )
    found: dict[int, Answer] = {}
    for response in generator.run(prompts, lambda _made: None):
        found[int(response.id)] = _answer(response)
        on_finish()
    return [found[i] for i in range(len(found))]


def traces_of_store(store: Path, target_dir: Path, drafter: Path) -> list[Trace]:
    """Replay the answers that `dspark train data` stored, in one trace for each temperature.

    Raises DSparkError if the store has no states, or those of another target or other layers, or
    answers that are not the target's own.
    """
    reader = StoreReader(store)
    if reader.meta.get("answers") == "given":
        raise DSparkError(
            f"{store} holds given answers, not the target's own (data.answers): use prompts"
        )
    layers = drafter_layers(drafter)
    sha256 = weights_sha256(target_dir)
    for key, wanted in (("target_sha256", sha256), ("layer_ids", list(layers))):
        if reader.meta.get(key) != wanted:
            raise DSparkError(f"{store}: {key} is {reader.meta.get(key)}, wanted {wanted}")
    target = TargetModel.load(target_dir, layers)
    module = open_calibrated(drafter, target)
    stop_ids = stop_token_ids(target_dir, AutoTokenizer.from_pretrained(str(target_dir)))
    responses = [reader[i] for i in range(len(reader))]
    several = [r.id for r in responses if len(r.answers) > 1]
    if several:
        raise DSparkError(f"{store}: {several[0]} has several turns, which cannot be replayed")
    traces = []
    for temperature in sorted({r.temperature for r in responses}):
        chosen = [r for r in responses if r.temperature == temperature]
        longest = max(len(r.tokens) - r.prompt_len for r in chosen)
        settings = DecodeSettings(max_new_tokens=longest, temperature=temperature)
        replay = Replay(target, module, temperature, stop_ids=stop_ids)
        traces.append(
            Trace(
                drafter=describe(drafter, module.config.gamma),
                target=target_dir.name,
                target_sha256=sha256,
                settings=_settings(settings),
                prompts=tuple(_traced(r) for r in chosen),
                generations=tuple(replay.run([_answer(r) for r in chosen])),
            )
        )
    return traces


def open_calibrated(drafter: Path, target: TargetModel) -> DSparkDrafter:
    """Open the drafter whose confidence is calibrated, attached to the target in float32.

    Raises DSparkError as `open_drafter` does, and for a drafter without confidence.
    """
    module = open_drafter(drafter, target)
    if not isinstance(module, DSparkDrafter):
        raise DSparkError(f"{drafter} is no DSpark drafter: it has no confidence to calibrate")
    # A target with half products has its LM head in bfloat16; the drafter's products are float32.
    module.attach(target.embed_weight.float(), target.head_weight.float())
    return module


def _answer(response: Response) -> Answer:
    return Answer(
        response.tokens,
        response.prompt_len,
        response.features,
        response.hidden,
        response.log_partition,
    )


def _traced(response: Response) -> TracedPrompt:
    ids: Sequence[int] = response.tokens[: response.prompt_len].tolist()
    return TracedPrompt(response.id, response.domain, prompt_digest(ids))


def _settings(settings: DecodeSettings) -> dict[str, Any]:
    return settings_json(settings) | {"replayed": True}
