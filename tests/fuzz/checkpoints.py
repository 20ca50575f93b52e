"""Generate drafter folders: their config.json, safetensors files and index, and other files.

Other files, pickles above all, are in the same folder or have the same names.
Each folder is read as a server checks it before it starts, and as our own engine opens it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from sglang_dspark.backends.drafter_check import _check_moe
from sglang_dspark.drafter import save_drafter
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.families.dflash.checkpoint import save_dflash
from sglang_dspark.families.eagle3.checkpoint import save_eagle3
from sglang_dspark.families.mtp.checkpoint import save_mtp
from sglang_dspark.families.registry import drafter_layers, open_drafter
from sglang_dspark.serving.checkpoint import validate_drafter
from tests.drafter.helpers import tiny_config, tiny_drafter
from tests.drafter.test_speculators import written
from tests.families.helpers import random_drafter
from tests.fuzz.documents import JSON, Draw, broken, damaged
from tests.fuzz.explore import Family
from tests.fuzz.files import SENTINEL, accepts

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "F4", "X9", "")
LENGTHS = (0, 1, 7, 1 << 20, (100 << 20) + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
ARGUMENTS = SimpleNamespace(
    attn_dp_size=1, tp_size=1, ep_size=1, device="cpu", enable_unified_memory=False
)
MOE = {
    "num_experts": 4,
    "experts_per_token": 2,
    "moe_intermediate_size": 16,
    "num_shared_experts": 1,
    "residual_streams": 2,
    "window": 8,
}
Files = tuple[tuple[str, bytes | None], ...]  # contents by name; None takes a file out


class Explodes:
    """Unpickled, it makes a folder."""

    def __init__(self, sentinel: str):
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self.sentinel,)


@dataclass(frozen=True)
class Heads:
    """The target's tensors that a drafter uses, [V, d] each."""

    embed_weight: Tensor
    head_weight: Tensor
    num_layers: int | None


class Loaded:
    """A drafter's folder with other files in it, read in each way that we read one."""

    def __init__(self, folder: Path, target: Target, *, served: bool):
        """served: SGLang's DSPARK serves it, so that the server's checks must take it."""
        self.folder, self.sentinel, self.served = folder, folder.parent / SENTINEL, served
        embed = torch.zeros(target.vocab_size, target.hidden_size)
        self.target, self.heads = target, Heads(embed, embed, target.num_layers)
        self.kept = {path.name: path.read_bytes() for path in folder.iterdir()}

    def __call__(self, case: Files) -> bool:
        for name, content in case:
            path = self.folder / name
            path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
        try:
            taken = [accepts(read, self.folder, self.folder) for read in self._readers()]
        finally:
            for path in self.folder.iterdir():
                path.unlink()
            for name, content in self.kept.items():
                (self.folder / name).write_bytes(content)
        assert not self.sentinel.exists(), "a pickle was loaded"
        return all(taken)

    def _readers(self) -> Iterator[Callable[[Path], object]]:
        if self.served:
            yield self._checked
        yield drafter_layers
        yield lambda path: open_drafter(path, self.heads)  # type: ignore[arg-type]

    def _checked(self, path: Path) -> None:
        _check_moe(path, ARGUMENTS)
        validate_drafter(path, self.target)


def families(folder: Path) -> Iterator[Family]:
    """They work below `folder`."""
    for name, write, served in (
        ("dense drafter", lambda path: save_drafter(tiny_drafter(), path), True),
        ("drafter with experts", lambda path: save_drafter(tiny_drafter(**MOE), path), True),
        ("speculators' drafter", lambda path: written(path, tiny_drafter()), False),
        ("DFlash drafter", lambda path: save_dflash(_other("dflash"), path), False),
        ("Eagle3 drafter", lambda path: save_eagle3(_other("eagle3"), path), False),
        ("MTP drafter", lambda path: save_mtp(_other("mtp"), path), False),
    ):
        place = folder / name.replace(" ", "-") / "drafter"
        place.mkdir(parents=True)
        write(place)  # type: ignore[no-untyped-call]
        layers = 4 if served or name.startswith("spec") else 3
        facts = json.loads((place / CONFIG).read_text())
        sizes = facts.get("transformer_layer_config", facts)
        target = Target("target", sizes["hidden_size"], sizes["vocab_size"], layers)
        check = Loaded(place, target, served=served)
        assert check(()), f"{name}: the valid one is refused"
        configs = broken(facts, JSON).map(lambda content: ((CONFIG, content),))
        yield Family(f"{name}, config", "checkpoints", configs, check, 1.5 if served else 0.7)
        if served:
            yield Family(f"{name}, weights", "checkpoints", _weights(check), check, 1.5)


def _other(kind: str) -> Any:
    return random_drafter(kind, tiny_config().vocab_size)


def _weights(check: Loaded) -> st.SearchStrategy[Files]:
    """Other safetensors files, and other files in the same folder."""
    valid = check.kept[WEIGHTS]
    pickled = _pickles(str(check.sentinel))
    elsewhere = ("weights.safetensors", "a.safetensors", "zz.safetensors", WEIGHTS)
    beside = ("pytorch_model.bin", "model.pt", "token_map.pt", "optimizer.pth", "config.pkl")
    named = st.tuples(st.sampled_from(elsewhere), st.sampled_from(pickled))
    return st.one_of(
        _headers(valid).map(lambda content: ((WEIGHTS, content),)),
        damaged(valid).map(lambda content: ((WEIGHTS, content),)),
        named.map(lambda each: (each,)),
        st.tuples(st.sampled_from(beside), st.sampled_from(pickled)).map(lambda each: (each,)),
        st.tuples(st.sampled_from(beside), st.sampled_from(pickled)).map(
            lambda each: ((WEIGHTS, None), each)
        ),
        st.tuples(_indices(valid), st.booleans()).map(
            lambda each: ((INDEX, each[0]), *(() if each[1] else ((WEIGHTS, None),)))
        ),
        _headers(valid).map(lambda content: (("more.safetensors", content),)),
    )


def _pickles(sentinel: str) -> list[bytes]:
    """Pickles that do something when they are loaded: plain ones, and torch's old and new files."""
    bomb = Explodes(sentinel)
    found = [pickle.dumps(bomb, protocol) for protocol in range(6)]
    for new in (True, False):
        out = io.BytesIO()
        torch.save({"weight": bomb}, out, _use_new_zipfile_serialization=new)
        found.append(out.getvalue())
    return [*found, struct.pack("<Q", len(found[0])) + found[0]]


def _indices(valid: bytes) -> st.SearchStrategy[bytes]:
    """Indices of shards, some of which name files elsewhere."""
    names = [name for name in _header(valid)[0] if name != "__metadata__"]
    whole = {"metadata": {"total_size": 9}, "weight_map": dict.fromkeys(names[:4], WEIGHTS)}
    places = (
        WEIGHTS,
        f"../{WEIGHTS}",
        f"./{WEIGHTS}",
        "/etc/passwd",
        "",
        ".",
        "..",
        "gone",
        "a\0b",
    )
    lists = st.dictionaries(st.sampled_from(names), st.sampled_from(places), max_size=4)
    maps = lists.map(lambda each: json.dumps({"weight_map": each}).encode())
    return st.one_of(maps, broken(whole, JSON))


def _header(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    length = int(struct.unpack("<Q", content[:8])[0])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _packed(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _headers(valid: bytes) -> st.SearchStrategy[bytes]:
    """Files with another header, or another length before it."""
    header, data = _header(valid)
    text = json.dumps(header).encode()

    @st.composite
    def changed(draw: Draw) -> bytes:
        made = {name: dict(each) for name, each in header.items()}
        for _ in range(draw(st.integers(1, 3))):
            _rewrite(draw, made)
        more = draw(st.sampled_from((b"", b"\0" * 64)))
        return _packed(json.dumps(made).encode(), data + more)

    lengths = st.sampled_from(LENGTHS).map(lambda length: _packed(text, data, length))
    documents = broken(header, JSON).map(lambda each: _packed(each, data))
    return st.one_of(changed(), changed(), lengths, documents)


def _rewrite(draw: Draw, header: dict[str, Any]) -> None:
    """Another type, shape, place, name, or one tensor less or more."""
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return
    name = names[draw(st.integers(0, len(names) - 1))]
    entry = header[name]
    size = st.sampled_from((-1, 0, 1, 2, 61, 1 << 31, 1 << 62, 1 << 64, 1.5, "2", None))
    way = draw(st.integers(0, 6))
    if way == 0:
        entry["dtype"] = draw(st.sampled_from(DTYPES))
    elif way == 1:
        entry["shape"] = draw(st.lists(size, max_size=4))
    elif way == 2:
        entry["shape"] = entry["shape"][::-1]
    elif way == 3:
        entry["data_offsets"] = draw(st.lists(size, max_size=3))
    elif way == 4:
        header[draw(st.sampled_from((f"model.{name}", "extra", "x" * 3000, "a\nb", "")))] = entry
    elif way == 5:
        del header[name]
    else:
        other: Mapping[str, Any] = header[names[draw(st.integers(0, len(names) - 1))]]
        entry["data_offsets"] = other["data_offsets"]
