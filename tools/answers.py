"""Save the answers of a store in one small file, and rebuild the store from it.

    python -m tools.answers pack   --config configs/train/answers.yaml FILE
    python -m tools.answers unpack --config configs/train/answers.yaml FILE
    python -m tools.answers states --config configs/train/answers.yaml STORE

The file has only the answers' token ids, each with its prompt's id and digest; prompts stay in
their own files, under their own licences (tools/prompts.py builds the demo target's). Only stores
without states (`data.cache: false`) can be packed. `pack` keeps the file's answers and adds new
ones. `unpack` adds the answers whose prompts are present and unchanged; `dspark train data` then
answers the remaining prompts. `states` computes the states that training reads into another store,
once instead of in each step: 7 KB a token for the demo target. It adds only missing ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoConfig

from sglang_dspark.cli._workload import target_dir
from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.common.files import fault, parse_json
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.training.collect import plan_answers
from sglang_dspark.training.config import SLOW_HALVES, RunConfig, load_config, without_slow_halves
from sglang_dspark.training.plan import longest
from sglang_dspark.training.prompts import Prompt
from sglang_dspark.training.responses import ResponseGenerator
from sglang_dspark.training.store import Response, StoreReader, StoreWriter, check_meta

_TOGETHER = 16  # answers that the target reads in one batch
_META = ("target_sha256", "tokenizer_sha256", "answers")


def pack(cfg: RunConfig, file: Path) -> int:
    """Add a store's answers to a file and return their new count; a prompt keeps its first answer.

    Raises DSparkError for a store with states, and for a file of another target's answers.
    """
    reader = StoreReader(cfg.data.store)
    if reader.meta["cached"]:
        raise DSparkError(f"{cfg.data.store} has states: pack a store of `data.cache: false`")
    parts: list[Tensor] = []
    rows: list[list[Any]] = []
    if file.exists():
        tokens, rows, meta = _read(file)
        _require_same(file, meta, reader.meta)
        parts = list(tokens)
    packed = {row[-1] for row in rows}
    for response, digest in _stored(reader):
        if digest not in packed:
            rows.append([response.id, response.domain, response.temperature, digest])
            parts.append(response.tokens[response.prompt_len :].int())
            packed.add(digest)
    tensors = {
        "tokens": torch.cat(parts),
        "lengths": torch.tensor([len(part) for part in parts], dtype=torch.int32),
        "rows": _as_bytes(rows),
        "meta": _as_bytes({key: reader.meta[key] for key in _META}),
    }
    with replacing(file, alone=True) as whole:
        whole.write_bytes(lzma.compress(save(tensors), preset=9))
    return len(rows)


def unpack(cfg: RunConfig, file: Path) -> tuple[int, int]:
    """Add a file's answers to the store; return the counts of added answers and unknown prompts.

    Prompts are found by digest; an id may have changed.
    Raises DSparkError for a damaged file or the answers of another target.
    """
    tokens, rows, meta = _read(file)
    skipped: list[str] = []
    plan = plan_answers(cfg, AutoConfig.from_pretrained(str(cfg.data.target)), skipped.append)
    _require_same(file, meta, check_meta(cfg.data.store, {}))
    reader = StoreReader(cfg.data.store) if plan.writer.done else None
    stored = {digest for _, digest in _stored(reader)} if reader else set()
    prompts, added, unknown = {_digest(each.ids): each for each in plan.todo}, 0, 0
    for (_, domain, temperature, digest), answer in zip(rows, tokens, strict=True):
        if digest in stored:
            continue
        prompt = prompts.get(digest)
        if prompt is None:
            unknown += 1
            continue
        whole = torch.cat([torch.tensor(prompt.ids), answer.long()])
        none = torch.zeros(len(whole), 0)
        plan.writer.add(
            Response(
                prompt.id, domain, temperature, len(prompt.ids), whole, none, none, none.sum(1)
            )
        )
        added += 1
    plan.writer.flush()
    return added, unknown


def _stored(reader: StoreReader) -> Iterator[tuple[Response, str]]:
    """Yield a store's answers with their prompts' digests. Raises DSparkError for several turns."""
    for number in range(len(reader)):
        response = reader.bare(number)
        if len(response.answers) > 1:
            raise DSparkError(f"{reader.path}: {response.id} has several turns")
        yield response, _digest(response.tokens[: response.prompt_len].tolist())


def _require_same(file: Path, meta: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for key in _META:
        if meta[key] != here[key]:
            raise DSparkError(f"{file} has answers of another {key}: {meta[key]}, here {here[key]}")


def add_states(cfg: RunConfig, folder: Path) -> int:
    """Write a store's answers with the target's states into another store; return the added count.

    Raises DSparkError if the other store is another target's, or has other layers' states.
    """
    reader, data = StoreReader(cfg.data.store), cfg.data
    layers = cfg.drafter.target_layer_ids
    writer = StoreWriter(folder, {**reader.meta, "cached": True, "layer_ids": list(layers)})
    left = [i for i, row in enumerate(reader.rows) if row["id"] not in writer.done]
    left = _in_groups(left, [int(row["n"]) for row in reader.rows])
    torch.set_num_threads(data.threads)
    target = TargetModel.load(data.target, layers, half_products=data.half_products)
    generator = ResponseGenerator(target, _TOGETHER, longest(data), frozenset())
    for response in generator.run(map(_given, map(reader.bare, left)), lambda n: None):
        writer.add(response)
    writer.flush()
    return len(left)


def _in_groups(sequences: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Order sequences: batches of similar length, shuffled so that every prefix is a sample."""
    ordered = sorted(sequences, key=lambda i: lengths[i])
    groups = [ordered[i : i + _TOGETHER] for i in range(0, len(ordered), _TOGETHER)]
    random.Random(0).shuffle(groups)
    return [i for group in groups for i in group]


def _given(response: Response) -> Prompt:
    """Return a prompt whose answer is given instead of generated."""
    tokens = response.tokens.tolist()
    asked, answer = tokens[: response.prompt_len], tokens[response.prompt_len :]
    return Prompt(
        response.id,
        response.domain,
        tuple(asked),
        response.temperature,
        len(answer),
        answer=tuple(answer),
    )


def _read(file: Path) -> tuple[Sequence[Tensor], list[list[Any]], dict[str, Any]]:
    try:
        found = load(lzma.decompress(file.read_bytes()))
        lengths = found["lengths"].tolist()
        rows, meta = (parse_json(bytes(found[key].tolist()).decode()) for key in ("rows", "meta"))
        return found["tokens"].split(lengths), rows, meta
    except (OSError, lzma.LZMAError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise DSparkError(f"{file} is no file of answers ({fault(error)}); pack it again") from None


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(prompt)).encode()).hexdigest()[:16]


def _as_bytes(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def open_config(path: Path) -> RunConfig:
    """Read a training configuration and resolve its target to a folder on this machine."""
    asked, console = load_config(path), Console(stderr=True)
    cfg = without_slow_halves(asked)
    target = target_dir(str(cfg.data.target), console)
    if cfg is not asked:
        console.print(f"{path}: {SLOW_HALVES}", soft_wrap=True)
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"target": target})})


def main() -> int:
    """Run one command; return 0, or 1 after printing the error on one line."""
    parser = argparse.ArgumentParser(prog="python -m tools.answers", description=__doc__)
    parser.add_argument("verb", choices=("pack", "unpack", "states"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    try:
        cfg = open_config(options.config)
        if options.verb == "pack":
            print(f"{pack(cfg, options.file)} answers in {options.file}")
        elif options.verb == "states":
            print(f"{add_states(cfg, options.file)} answers added to {options.file}")
        else:
            added, unknown = unpack(cfg, options.file)
            print(f"{added} answers added to {cfg.data.store}; {unknown} have no such prompt here")
    except DSparkError as error:
        print(f"answers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
