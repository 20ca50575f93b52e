"""Read evaluation prompts: rows of a file (`prompt_files.py`) to conversations and token ids.

A row is a JSON object with `prompt`, or `turns` (user and assistant texts alternately, ending with
the user's, whose answer is measured), and optionally `id` and `domain`. `conversations.py` reads
chat data (`messages`, `conversations`) up to the user's last turn. Other common files work
through `--prompt-field`; the names in `PROMPT_FIELDS` and `ID_FIELDS` are found
automatically.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import brief, load_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.conversations import (
    Turn,
    as_messages,
    conversation,
    require_one_form,
    require_text,
)
from sglang_dspark.evaluation.prompt_files import FileRow, file_rows, parse_row

PROMPT_FIELDS = ("prompt", "turns", "question", "text", "instruction")
ID_FIELDS = ("id", "task_id", "question_id", "key")
DEMO_FILE = "demo_prompts.jsonl"
EVALUATION_FILE = "eval_prompts.jsonl"
CALIBRATION_FILE = "calibration_prompts.jsonl"
RESERVED = ("overall", "macro")  # rows of a result that are not domains


@dataclass(frozen=True)
class EvalPrompt:
    """One conversation to continue.

    turns: user, assistant, user, ...: an odd number of texts. system: the system prompt before
    them, or empty.
    """

    id: str
    domain: str
    turns: tuple[str, ...]
    system: str = ""

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as chat messages."""
        first: tuple[Turn, ...] = (("system", self.system),) if self.system else ()
        said = ((("user", "assistant")[k % 2], text) for k, text in enumerate(self.turns))
        return as_messages((*first, *said))


def demo_prompts() -> list[EvalPrompt]:
    """Return the few prompts of the demo, which ship with the package."""
    return _shipped(DEMO_FILE)


def evaluation_prompts() -> list[EvalPrompt]:
    """Return the shipped prompts for judging drafters: 64 each of math, code and chat."""
    return _shipped(EVALUATION_FILE)


def calibration_prompts() -> list[EvalPrompt]:
    """Return the shipped prompts for fitting calibration, which are in no other shipped set.

    About 70 each of math, code and chat, of the same kinds as the evaluation prompts.
    """
    return _shipped(CALIBRATION_FILE)


def _shipped(name: str) -> list[EvalPrompt]:
    with resources.as_file(resources.files(__package__) / name) as path:
        return read_prompts(path)


def read_prompts(
    path: Path, *, domain: str | None = None, prompt_field: str | None = None
) -> list[EvalPrompt]:
    """Read a file of prompts; skip empty lines.

    domain: of all rows; None uses each row's own, or "all" if it has none.
    prompt_field: the field that holds the text or turns; None finds one of PROMPT_FIELDS.
    Raises DSparkError that names file, line and fault.
    """
    prompts: list[EvalPrompt] = []
    seen: dict[str, str] = {}
    for row in file_rows(path):
        where = f"{path}, {row.place}"
        prompt = _parse(row, where, f"{path.stem}-{row.number}", domain, prompt_field)
        if prompt.id in seen:
            raise DSparkError(f"{where}: id {prompt.id!r} is also on {seen[prompt.id]}")
        seen[prompt.id] = row.place
        prompts.append(prompt)
    if not prompts:
        raise DSparkError(f"{path} holds no prompts")
    return prompts


def limit_per_domain(prompts: Iterable[EvalPrompt], limit: int | None) -> list[EvalPrompt]:
    """Return the first `limit` prompts of each domain, in order; None keeps all."""
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if limit is None or taken[prompt.domain] <= limit:
            kept.append(prompt)
    return kept


def encode(tokenizer: Any, prompt: EvalPrompt) -> list[int]:
    """Encode a prompt by the model's chat template, up to where the answer begins.

    Without a template, a one-turn prompt is encoded as plain text. Raises DSparkError for several
    turns and a tokenizer without a template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        if len(prompt.messages()) > 1:
            raise DSparkError(f"prompt {prompt.id}: the model has no chat template for its turns")
        return list(tokenizer(prompt.turns[0])["input_ids"])
    return list(
        tokenizer.apply_chat_template(
            prompt.messages(), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def stop_token_ids(model_dir: Path, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: of config.json, generation_config.json, the tokenizer.

    SGLang stops at the same set.
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = model_dir / name
        if file.is_file():
            with reading(file, "model's configuration", "fetch the model again"):
                found = load_json(file, finite=False).get("eos_token_id")
            ids.update([found] if isinstance(found, int) else found or [])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _parse(
    file_row: FileRow, where: str, default_id: str, domain: str | None, prompt_field: str | None
) -> EvalPrompt:
    try:
        row = parse_row(file_row)
        if prompt_field is None:
            require_one_form(row)
    except ValueError as error:
        raise DSparkError(f"{where}: {error}") from None
    found = next((row[field] for field in ID_FIELDS if field in row), default_id)
    names = str(found), str(domain or row.get("domain") or "all")
    _require_text(names, where)
    if names[1] in RESERVED:
        raise DSparkError(
            f"{where}: domain {names[1]!r} is what results call all domains together; name "
            "another, as --prompts DOMAIN=FILE"
        )
    if prompt_field is None and (chat := _chat(row, where)) is not None:
        return EvalPrompt(*names, *chat)
    fields = PROMPT_FIELDS if prompt_field is None else (prompt_field,)
    name = next((field for field in fields if field in row), None)
    if name is None:
        raise DSparkError(
            f"{where}: no prompt: expected one of {', '.join(fields)}, found "
            f"{brief(', '.join(row))}; "
            "name the field with --prompt-field"
        )
    return EvalPrompt(*names, _turns(row[name], f"{where}, {name}"))


def _chat(row: dict[str, Any], where: str) -> tuple[tuple[str, ...], str] | None:
    """Return turns and system prompt of a row of chat data, None for any other row."""
    try:
        chat = conversation(row)
    except ValueError as error:
        raise DSparkError(f"{where}: {error}") from None
    if chat is None:
        return None
    system = next((text for role, text in chat.turns if role == "system"), "")
    return tuple(text for role, text in chat.turns if role != "system"), system


def _turns(value: object, where: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DSparkError(f"{where}: expected a text or a list of texts")
    if len(texts) % 2 == 0:
        raise DSparkError(
            f"{where}: {len(texts)} turns; user and assistant alternate and the user comes last"
        )
    if not all(text.strip() for text in texts):
        raise DSparkError(f"{where}: empty text")
    _require_text(texts, where)
    return tuple(texts)


def _require_text(texts: Iterable[str], where: str) -> None:
    try:
        for text in texts:
            require_text(text, where)
    except ValueError as error:
        raise DSparkError(str(error)) from None
