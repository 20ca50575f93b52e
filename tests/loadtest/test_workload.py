"""Prompts and server flags."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import EvalPrompt, demo_prompts
from sglang_dspark.loadtest.servers.workload import (
    drafter_gamma,
    dspark_server,
    interleave,
    plain_server,
    render,
)


def test_shipped_prompts() -> None:
    prompts = demo_prompts()
    assert Counter(p.domain for p in prompts) == {"math": 12, "code": 12, "chat": 12}
    assert len({p.turns for p in prompts}) == 36
    assert [p.domain for p in interleave(prompts)[:4]] == ["math", "code", "chat", "math"]
    assert sorted(p.id for p in interleave(prompts)) == sorted(p.id for p in prompts)


def test_render_uses_the_models_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}\n[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    prompt = EvalPrompt("x", "math", ("1 < 2",))
    assert render(tmp_path, prompt) == "[user] 1 < 2\n[assistant]"
    with pytest.raises(DSparkError, match="no chat_template"):
        render(tmp_path / "absent", prompt)


def test_both_servers_differ_only_in_speculation() -> None:
    plain = plain_server(Path("t"), 1, "cpu")
    dspark = dspark_server(Path("t"), Path("d"), 2, "cpu")
    added = [flag for flag in dspark.arguments if flag not in plain.arguments]
    assert added == [
        "--speculative-algorithm",
        "DSPARK",
        "--speculative-draft-model-path",
        "d",
    ]
    assert "float32" in plain.arguments
    assert "float32" not in plain_server(Path("t"), 1, "cuda").arguments


def test_gamma_of_a_drafter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 5}))
    assert drafter_gamma(tmp_path) == 5
    with pytest.raises(DSparkError, match="cannot read the DSpark drafter"):
        drafter_gamma(tmp_path / "absent")
