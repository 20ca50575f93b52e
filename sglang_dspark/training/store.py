"""On-disk store of target responses with the hidden states that training needs (paper, 5.1).

A shard holds many sequences end to end: `tokens` [N] int32; `features` [N, m*d] and `hidden`
[N, d] bfloat16, the last hidden state before the LM head; `log_partition` [N] float32, the
logsumexp of the logits, which themselves are never stored; `starts` [S+1] and `prompt_lens` [S]
int64. `meta.json` carries provenance and is checked on every open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.errors import DSparkError


@dataclass(frozen=True)
class Response:
    """One prompt with its answer. features[i], hidden[i] belong to tokens[i]; the last token has
    none of its own (zeros), as nothing is predicted from it."""

    id: str
    domain: str
    temperature: float
    prompt_len: int
    tokens: Tensor  # [n] int64
    features: Tensor  # [n, m*d]
    hidden: Tensor  # [n, d]
    log_partition: Tensor  # [n] logsumexp of the target's logits; zeros outside the answers
    turns: tuple[tuple[int, int], ...] = ()  # [start, end) of each answer of a longer conversation

    @property
    def answers(self) -> tuple[tuple[int, int], ...]:
        """[start, end) of each answer of the target; one, from prompt_len on, unless told."""
        return self.turns or ((self.prompt_len, len(self.tokens)),)


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a temporary name, then rename."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(value, indent=1))
    os.replace(temporary, path)


class StoreWriter:
    """Appends shards to a directory; a run that goes on skips the prompts already answered."""

    def __init__(self, path: Path, meta: dict[str, Any], sequences_per_shard: int = 256):
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.per_shard = path, sequences_per_shard
        self.pending: list[Response] = []
        self.meta = meta
        if (path / "meta.json").exists():
            check_meta(path, {k: meta[k] for k in ("target_sha256", "layer_ids")})
        write_json(path / "meta.json", meta)
        self.done = {row["id"] for row in read_index(path)}

    def add(self, sequence: Response) -> None:
        """Queue one sequence; a full shard is written at once."""
        self.pending.append(sequence)
        if len(self.pending) >= self.per_shard:
            self.flush()

    def flush(self) -> None:
        """Write what is queued as one shard and add it to the index."""
        if not self.pending:
            return
        batch, self.pending = self.pending, []
        number = len(list(self.path.glob("shard-*.safetensors")))
        name = f"shard-{number:05d}.safetensors"
        lengths = torch.tensor([len(s.tokens) for s in batch])
        tensors = {
            "tokens": torch.cat([s.tokens for s in batch]).int(),
            "features": torch.cat([s.features for s in batch]).bfloat16(),
            "hidden": torch.cat([s.hidden for s in batch]).bfloat16(),
            "log_partition": torch.cat([s.log_partition for s in batch]),
            "starts": torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
            "prompt_lens": torch.tensor([s.prompt_len for s in batch]),
        }
        save_file(tensors, str(self.path / (name + ".tmp")))
        os.replace(self.path / (name + ".tmp"), self.path / name)
        with (self.path / "index.jsonl").open("a") as index:
            for i, s in enumerate(batch):
                row = {"id": s.id, "domain": s.domain, "temperature": s.temperature}
                row |= {"shard": name, "i": i, "n": len(s.tokens)}
                index.write(json.dumps(row) + "\n")
        self.done.update(s.id for s in batch)


def read_index(path: Path) -> list[dict[str, Any]]:
    """Rows of the index, one a sequence; a torn last line (killed run) is ignored."""
    index = path / "index.jsonl"
    if not index.exists():
        return []
    rows = []
    for line in index.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def check_meta(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The store's provenance; DSparkError when it was made for another target or other layers."""
    if not (path / "meta.json").is_file():
        raise DSparkError(f"{path} is not a response store (no meta.json); run `dspark train data`")
    meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
    for key, value in expected.items():
        if meta.get(key) != value:
            raise DSparkError(
                f"{path}: made with {key}={meta.get(key)}, but {value} is asked for; "
                "use another directory or the same settings"
            )
    return meta


class StoreReader:
    """Random access to the sequences of a store; new shards appear after `refresh`."""

    def __init__(self, path: Path):
        self.path = path
        self.meta = check_meta(path, {})
        self.rows: list[dict[str, Any]] = []
        self._shards: dict[str, tuple[Any, Tensor, Tensor]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look for shards written since."""
        self.rows = read_index(self.path)
        if not self.rows:
            raise DSparkError(f"{self.path} holds no sequences yet; run `dspark train data`")

    def _shard(self, name: str) -> tuple[Any, Tensor, Tensor]:
        if name not in self._shards:
            handle = safe_open(str(self.path / name), framework="pt")
            self._shards[name] = (
                handle,
                handle.get_tensor("starts"),
                handle.get_tensor("prompt_lens"),
            )
        return self._shards[name]

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, i: int) -> tuple[Tensor, int]:
        """Token ids [n] and prompt length of sequence i, without its states."""
        row = self.rows[i]
        handle, starts, prompts = self._shard(row["shard"])
        a, b = int(starts[row["i"]]), int(starts[row["i"] + 1])
        return handle.get_slice("tokens")[a:b].long(), int(prompts[row["i"]])

    def __getitem__(self, i: int) -> Response:
        row = self.rows[i]
        handle, starts, _ = self._shard(row["shard"])
        a, b = int(starts[row["i"]]), int(starts[row["i"] + 1])
        tokens, prompt_len = self.tokens(i)
        return Response(
            row["id"],
            row["domain"],
            row["temperature"],
            prompt_len,
            tokens,
            handle.get_slice("features")[a:b],
            handle.get_slice("hidden")[a:b],
            handle.get_slice("log_partition")[a:b],
        )


def subset(rows: Sequence[dict[str, Any]], held_out_every: int) -> tuple[list[int], list[int]]:
    """Indices for training and for validation: every `held_out_every`-th sequence is held out."""
    every = range(len(rows))
    held = [i for i in every if i % held_out_every == held_out_every - 1]
    kept = [i for i in every if i % held_out_every != held_out_every - 1]
    return kept, held
