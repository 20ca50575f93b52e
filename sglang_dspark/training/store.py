"""Store target responses on disk with the hidden states that training needs (paper, 5.1).

A shard holds many sequences end to end: `tokens` [N] int32; `features` [N, m*d] and `hidden` [N, d]
bfloat16, the last hidden state before the LM head; `log_partition` [N] float32, the logsumexp of
the logits, which themselves are never stored; `starts` [S+1] and `prompt_lens` [S] int64.
`meta.json` has the provenance and is checked on every open. A store without cache has tokens only.
`index.jsonl` has a line per sequence: id, domain, temperature, shard, row in it, length, and for
conversations of several turns the [start, end) of each answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_dspark.common.files import brief, load_json, parse_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.training.files import disk_error, write_json, write_tensors


@dataclass(frozen=True)
class Response:
    """One prompt with its answer.

    features[i], hidden[i] belong to tokens[i]; the last token's are zeros, as nothing is predicted
    from it.
    """

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
        """Return [start, end) of each answer of the target; by default one, from prompt_len on."""
        return self.turns or ((self.prompt_len, len(self.tokens)),)


class StoreWriter:
    """Appends shards to a directory; a run that continues skips answered prompts."""

    def __init__(self, path: Path, meta: dict[str, Any], sequences_per_shard: int = 256):
        """Open the directory.

        meta: provenance; `cached` False stores tokens only. Raises DSparkError if the directory has
        answers of another target or with other states.
        """
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.per_shard = path, sequences_per_shard
        self.pending: list[Response] = []
        self.keep_states = bool(meta.get("cached", True))
        if (path / "meta.json").exists():
            keys = ("target_sha256", "tokenizer_sha256", "layer_ids", "cached", "answers")
            check_meta(path, {k: meta[k] for k in keys if k in meta})
        write_json(path / "meta.json", meta)
        _drop_torn_line(path / "index.jsonl")
        self.done = {row["id"] for row in read_index(path)}

    def add(self, sequence: Response) -> None:
        """Queue one sequence; a full shard is written at once."""
        self.pending.append(sequence)
        if len(self.pending) >= self.per_shard:
            self.flush()

    def flush(self) -> None:
        """Write the queued sequences as one shard and add them to the index."""
        if not self.pending:
            return
        batch, self.pending = self.pending, []
        number = len(list(self.path.glob("shard-*.safetensors")))
        name = f"shard-{number:05d}.safetensors"
        write_tensors(self.path / name, self._tensors(batch), {})
        lines = []
        for i, s in enumerate(batch):
            row: dict[str, Any] = {"id": s.id, "domain": s.domain, "temperature": s.temperature}
            row |= {"shard": name, "i": i, "n": len(s.tokens)}
            lines.append(json.dumps(row | ({"answers": s.turns} if s.turns else {})) + "\n")
        index = self.path / "index.jsonl"
        try:
            with index.open("a") as out:
                out.writelines(lines)
        except OSError as error:
            _drop_torn_line(index)
            raise disk_error(index, error) from None
        self.done.update(s.id for s in batch)

    def _tensors(self, batch: list[Response]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(s.tokens) for s in batch])
        tensors = {
            "tokens": torch.cat([s.tokens for s in batch]).int(),
            "starts": torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
            "prompt_lens": torch.tensor([s.prompt_len for s in batch]),
        }
        if self.keep_states:
            tensors |= {
                "features": torch.cat([s.features for s in batch]).bfloat16(),
                "hidden": torch.cat([s.hidden for s in batch]).bfloat16(),
                "log_partition": torch.cat([s.log_partition for s in batch]),
            }
        return tensors


def _drop_torn_line(index: Path) -> None:
    """Cut a last line that a killed run left unfinished, before a new line is appended."""
    if not index.exists():
        return
    text = index.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        with index.open("r+b") as file:
            file.truncate(whole)


def read_index(path: Path) -> list[dict[str, Any]]:
    """Return the index's rows, one per sequence; an unfinished last line is ignored."""
    index = path / "index.jsonl"
    if not index.exists():
        return []
    with reading(index, "index of a response store", "make the store again"):
        lines = index.read_text(encoding="utf-8").splitlines(keepends=True)
        return [parse_json(line, finite=False) for line in lines if line.endswith("\n")]


_UNLIKE = {
    "target_sha256": "of another target",
    "tokenizer_sha256": "of another tokenizer",
    "layer_ids": "with states of other layers",
    "cached": "with another data.cache",
    "answers": "with another data.answers",
}


def check_meta(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Return the store's provenance. Raises DSparkError if it is of another target or other layers.

    Fields that an older store lacks (its tokenizer, the source of answers) are not compared.
    """
    file = path / "meta.json"
    if not file.is_file():
        raise DSparkError(f"{path} is not a response store (no meta.json); run `dspark train data`")
    meta: dict[str, Any] = {"cached": True}
    with reading(file, "record of a response store", "make the store again"):
        meta |= load_json(file)
    for key, value in expected.items():
        if key in meta and meta[key] != value:
            raise DSparkError(
                f"{path} holds answers {_UNLIKE.get(key, key)}: {key} is {brief(meta[key])} there, "
                f"{value} here; use another directory or the same settings"
            )
    return meta


@contextmanager
def _reading_sequence(path: Path) -> Iterator[None]:
    """Turn errors of reading a sequence, from its index row or shard, into a DSparkError."""
    fix = "make the store again"
    try:
        with reading(path, "whole response store", fix):
            yield
    except (SafetensorError, RuntimeError) as error:  # RuntimeError: of torch, for other shapes
        raise DSparkError(f"{path} has a shard that is damaged ({brief(error)}); {fix}") from None


class StoreReader:
    """Random access to the sequences of a store; new shards appear after `refresh`."""

    def __init__(self, path: Path):
        self.path = path
        self.meta = check_meta(path, {})
        self.rows: list[dict[str, Any]] = []
        self._shards: dict[str, tuple[Any, Tensor, Tensor]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the index again, for shards written since. Raises DSparkError if it is empty."""
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
        """Return token ids [n] and prompt length of sequence i, without its states."""
        with _reading_sequence(self.path):
            row = self.rows[i]
            handle, starts, prompts = self._shard(row["shard"])
            a, b = int(starts[row["i"]]), int(starts[row["i"] + 1])
            return handle.get_slice("tokens")[a:b].long(), int(prompts[row["i"]])

    def answers(self, i: int) -> tuple[tuple[int, int], ...]:
        """Return [start, end) of the target's answers in sequence i."""
        with _reading_sequence(self.path):
            row = self.rows[i]
            if "answers" in row:
                return tuple((a, b) for a, b in row["answers"])
            _, _, prompts = self._shard(row["shard"])
            return ((int(prompts[row["i"]]), row["n"]),)

    def bare(self, i: int) -> Response:
        """Return sequence i without states (tensors of no columns)."""
        tokens, prompt_len = self.tokens(i)
        none = torch.empty(len(tokens), 0, dtype=torch.bfloat16)
        with _reading_sequence(self.path):
            row = self.rows[i]
            return Response(
                row["id"],
                row["domain"],
                row["temperature"],
                prompt_len,
                tokens,
                none,
                none,
                torch.zeros(len(tokens)),
                tuple((a, b) for a, b in row.get("answers", ())),
            )

    def __getitem__(self, i: int) -> Response:
        """Return sequence i with its states. Raises DSparkError if the store has none."""
        if not self.meta["cached"]:
            raise DSparkError(f"{self.path} was made without states; set data.cache: false")
        bare = self.bare(i)
        with _reading_sequence(self.path):
            row = self.rows[i]
            handle, starts, _ = self._shard(row["shard"])
            rows = slice(int(starts[row["i"]]), int(starts[row["i"] + 1]))
            names = ("features", "hidden", "log_partition")
            states = {name: handle.get_slice(name)[rows] for name in names}
            if any(len(each) != len(bare.tokens) for each in states.values()):
                raise ValueError("a sequence has more tokens than states, or fewer")
            return replace(bare, **states)


def subset(rows: Sequence[dict[str, Any]], held_out_every: int) -> tuple[list[int], list[int]]:
    """Split indices for training and validation: every `held_out_every`-th one is held out."""
    every = range(len(rows))
    held = [i for i in every if i % held_out_every == held_out_every - 1]
    kept = [i for i in every if i % held_out_every != held_out_every - 1]
    return kept, held
