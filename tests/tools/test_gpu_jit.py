"""tools/gpu/kit/jit_modules.py: what servers build, and a failure that does not stop the others."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import pytest

from tools.gpu.kit import jit_modules
from tools.gpu.kit.jit_modules import MODELS, JitModule, build, main, modules

pytest.importorskip("sglang")

# What `tools/gpu/faked/rehearse.py` found of plain, dspark, mtp1 and upstream-dspark-static.
_ANY = {("activation", "bf16_t", "true"), ("clamp_position", "int64_t"), ("speculative_tree",)}
_QWEN3 = {
    ("fused_rope", "true", "128", "true", "bf16_t", "bf16_t"),
    ("kvcache", "2048", "2048", "128", "true"),
    ("qknorm", "128", "true", "bf16_t", "true"),
}
_SMOLLM2 = {
    ("fused_rope", "true", "64", "true", "bf16_t", "bf16_t"),
    ("kvcache", "384", "384", "32", "true"),
}
BUILT_BY_SERVERS = {
    "qwen3-4b": _ANY | _QWEN3,
    "qwen3-0.6b": _ANY | _QWEN3,
    "smollm2-135m": _ANY | _SMOLLM2,
}


@pytest.mark.parametrize("name", MODELS)
def test_each_factory_exists_upstream_and_takes_the_arguments(name: str) -> None:
    for module in modules([name]):
        inspect.signature(inspect.unwrap(module.function())).bind(*module.arguments)


@pytest.mark.parametrize("name", BUILT_BY_SERVERS)
def test_the_modules_are_those_that_servers_build(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.kernels.jit.utils import override_jit_cuda_arch

    found = set()
    with override_jit_cuda_arch(9, 0):
        for module in modules([name]):
            upstream = sys.modules[module.function().__module__]
            monkeypatch.setattr(upstream, "is_arch_support_pdl", lambda: True, raising=False)
            monkeypatch.setattr(upstream, "load_jit", lambda *args, **_: found.add(args))
            _uncached(module.function(), upstream, monkeypatch)(*module.arguments)
    assert found == BUILT_BY_SERVERS[name]


def test_models_that_share_a_module_list_it_once() -> None:
    assert modules(["qwen3-4b", "qwen3-0.6b"]) == modules(["qwen3-4b"])
    both = modules(["qwen3-4b", "smollm2-135m"])
    assert len(both) == len(set(both)) == 8


def test_a_failure_is_a_row_and_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = JitModule("lost", "layernorm.norm._no_such_module", ())
    found = JitModule("found", "layernorm.norm._is_supported_rmsnorm_hidden_size", (256,))
    monkeypatch.setattr(sys, "argv", ["jit_modules"])
    for listed, status in (((lost, found), 0), ((lost, lost), 1)):
        monkeypatch.setattr(jit_modules, "modules", lambda _names, listed=listed: listed)
        assert main() == status
        rows = _rows(capsys.readouterr().out)
        assert len(rows) == 2
        [failed, *_] = [row for row in rows if "failed" in row]
        assert failed["jit"] == "lost"
        assert "_no_such_module" in failed["failed"]


def test_a_row_names_the_module_and_its_arguments() -> None:
    row = build(JitModule("norm", "layernorm.norm._rmsnorm_kernel_class", (512,)))
    assert (row["jit"], "failed" in row) == ("norm_512", False)
    assert row["seconds"] >= 0


def test_an_unknown_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jit_modules", "none"])
    with pytest.raises(SystemExit):
        main()
    assert "no model none; there are qwen3-0.6b" in capsys.readouterr().err


def _uncached(factory: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The factory without `cache_once`, also where it calls itself."""
    plain = inspect.unwrap(factory)
    monkeypatch.setattr(upstream, plain.__name__, plain)
    return plain


def _rows(said: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"row"')]
    return [line["row"] for line in lines]
