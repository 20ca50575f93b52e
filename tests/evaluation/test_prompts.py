"""Prompt files: what is read, and the one clear line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import (
    EvalPrompt,
    demo_prompts,
    encode,
    limit_per_domain,
    read_prompts,
    stop_token_ids,
)
from tests.evaluation.conftest import EOS, Pair


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_demo_prompts_are_complete() -> None:
    prompts = demo_prompts()
    assert {p.domain for p in prompts} == {"math", "code", "chat"}
    assert all(sum(p.domain == d for p in prompts) == 12 for d in ("math", "code", "chat"))


def test_rows_and_fields(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        '{"id": "a", "domain": "math", "prompt": "1 + 1?"}\n'
        "\n"
        '{"task_id": 7, "text": "Write code"}\n'
        '{"turns": ["hi", "hello", "who?"]}\n'
        '{"question": "Q", "prompt_two": "X"}\n',
    )
    first, second, third, fourth = read_prompts(path)
    assert first == EvalPrompt("a", "math", ("1 + 1?",))
    assert second == EvalPrompt("7", "all", ("Write code",))
    assert third.id == "prompts-4"
    assert [m["role"] for m in third.messages()] == ["user", "assistant", "user"]
    assert fourth.turns == ("Q",)
    assert {p.domain for p in read_prompts(path, domain="code")} == {"code"}


def test_unicode_line_separators_do_not_end_a_row(tmp_path: Path) -> None:
    text = "first\u2028second\x85third"
    path = _file(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n")
    assert read_prompts(path)[0].turns == (text,)


def test_prompt_field_option(tmp_path: Path) -> None:
    path = _file(tmp_path, '{"text": "no", "task": "yes"}\n')
    assert read_prompts(path, prompt_field="task")[0].turns == ("yes",)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, found list"),
        ('{"words": "x"}', "no prompt: expected one of prompt, turns"),
        ('{"prompt": 3}', "expected a text or a list of texts"),
        ('{"turns": ["a", "b"]}', "2 turns; user and assistant alternate"),
        ('{"turns": []}', "0 turns"),
        ('{"prompt": "  "}', "empty text"),
        ('{"id": "a", "prompt": "again"}', "id 'a' is also on line 1"),
        ('{"prompt": "x", "domain": "overall"}', "domain 'overall' is what results call all"),
        ('{"prompt": "x", "domain": "macro"}', "domain 'macro' is what results call all"),
        ('{"prompt": "x \\ud800"}', "prompt: half a surrogate pair, U+D800, as character 3"),
        ('{"prompt": "x", "id": "\\udfff"}', "half a surrogate pair, U+DFFF"),
        ('{"prompt": "x", "turns": ["y"]}', "has both `turns` and `prompt`; keep one"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = _file(tmp_path, '{"id": "a", "prompt": "fine"}\n' + line + "\n")
    with pytest.raises(DSparkError, match="line 2") as caught:
        read_prompts(path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_domain_is_no_row_of_the_results(tmp_path: Path) -> None:
    path = _file(tmp_path, '{"prompt": "fine", "domain": "overall"}\n')
    assert [prompt.domain for prompt in read_prompts(path, domain="math")] == ["math"]
    with pytest.raises(DSparkError, match="name another, as --prompts DOMAIN=FILE"):
        read_prompts(path, domain="overall")


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="cannot read prompts"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DSparkError, match="holds no prompts"):
        read_prompts(_file(tmp_path, "\n\n"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x81\x82\x00")
    with pytest.raises(DSparkError, match="binary, line 1: not UTF-8: byte 0x81 at character 1"):
        read_prompts(binary)
    with pytest.raises(DSparkError, match="cannot read prompts"):
        read_prompts(tmp_path)


def test_limit_is_per_domain() -> None:
    prompts = [EvalPrompt(str(i), "ab"[i % 2], ("x",)) for i in range(6)]
    assert [p.id for p in limit_per_domain(prompts, 1)] == ["0", "1"]
    assert limit_per_domain(prompts, None) == prompts


def test_encoding_uses_the_chat_template(pair: Pair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair.target_dir)
    assert encode(tokenizer, EvalPrompt("a", "all", ("w9 w8",))) == [9, 8, 5]
    assert encode(tokenizer, EvalPrompt("a", "all", ("w9", "w1", "w2"))) == [9, 5, 1, 5, 2, 5]
    tokenizer.chat_template = None
    assert encode(tokenizer, EvalPrompt("a", "all", ("w9 w8",))) == [9, 8]
    with pytest.raises(DSparkError, match="no chat template"):
        encode(tokenizer, EvalPrompt("a", "all", ("w9", "w1", "w2")))
    assert stop_token_ids(pair.target_dir, tokenizer) == {EOS}
