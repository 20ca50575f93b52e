"""Test prompt mixes: every part is there, turns build on each other, bad names are reported."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.mixes import cell_prompts, load_mix, multi_turn_prompts


def test_a_mix_holds_all_of_its_parts() -> None:
    mix = load_mix("math, code,multi-turn")
    domains = [prompt.domain for prompt in mix.prompts]
    assert set(domains) == {"math", "code", "multi-turn"}
    assert sorted(i for group in mix.groups for i in group) == list(range(len(mix.prompts)))
    for group in mix.groups:
        assert len({domains[i] for i in group}) == 1
        assert (len(group) > 1) == (domains[group[0]] == "multi-turn")


def test_turns_repeat_all_before_them_and_share_their_openings() -> None:
    conversations = multi_turn_prompts()
    assert len(conversations) >= 12
    starts: dict[str, int] = {}
    for conversation in conversations:
        for earlier, later in itertools.pairwise(conversation):
            assert later.turns[: len(earlier.turns)] == earlier.turns
            assert len(later.turns) == len(earlier.turns) + 2
        opening = conversation[0].turns[0].partition("\n\n")[0]
        assert len(opening) > 500  # worth a prefix cache
        starts[opening] = starts.get(opening, 0) + 1
    assert sorted(starts.values()) == [4, 4, 4]
    ids = [prompt.id for conversation in conversations for prompt in conversation]
    assert len(set(ids)) == len(ids)


def test_longer_prompts_are_a_part_of_their_own() -> None:
    short, long = load_mix("code").prompts, load_mix("code@300").prompts
    assert {prompt.domain for prompt in long} == {"code@300"}
    starts = {prompt.turns[0].partition("\n\n")[0] for prompt in long}
    assert len(starts) == len(long) == len(short)
    for one, other in zip(short, long, strict=True):
        assert other.turns[0].endswith(f"\n\n{one.turns[0]}")
        assert 300 <= len(other.turns[0].split()) - len(one.turns[0].split()) < 500
    with pytest.raises(DSparkError, match="no prompts 'code@x'"):
        load_mix("code@x")


def test_content_is_what_the_interface_takes(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "hello", "id": "a"}\n{"turns": ["x", "y", "z"], "id": "b"}\n')
    mix = load_mix(str(own))
    chat = cell_prompts(mix, "chat")
    assert chat[0].content == [{"role": "user", "content": "hello"}]
    assert [m["role"] for m in chat[1].content] == ["user", "assistant", "user"]  # type: ignore
    assert cell_prompts(mix, "generate")[1].content == "x\n\ny\n\nz"
    rendered = cell_prompts(mix, "completions", lambda prompt: f"<{prompt.id}>")
    assert [prompt.content for prompt in rendered] == ["<a>", "<b>"]


def test_bad_mixes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="'poetry'"):
        load_mix("math,poetry")
    with pytest.raises(DSparkError, match="names nothing"):
        load_mix(" ,")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(DSparkError, match="holds no prompts"):
        load_mix(str(empty))
