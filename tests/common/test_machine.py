"""Test the description of a machine: two machines differ, one is the same at every start."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sglang_dspark.backends.moe.expert_backends import key_of
from sglang_dspark.common import machine
from sglang_dspark.experts.backends import ExpertWorkload

X86 = """processor\t: 0
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
cpu MHz\t\t: {mhz}
flags\t\t: fpu fma avx2 avx512f avx512_bf16 hypervisor
"""
ARM = """processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd sve bf16
CPU implementer\t: 0x41
CPU part\t: 0xd4f
CPU revision\t: 1
"""
Describe = Callable[[str], str]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    machine.cpu_description.cache_clear()
    machine.speed.cache_clear()
    yield
    machine.cpu_description.cache_clear()
    machine.speed.cache_clear()


@pytest.fixture
def describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Return a function that describes the machine of a given /proc/cpuinfo, as a new process."""

    def said(cpuinfo: str) -> str:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
        machine.cpu_description.cache_clear()
        return machine.cpu_description()

    return said


def test_machines_of_one_model_name_are_distinguished(describe: Describe) -> None:
    older, newer = X86.format(mhz=2596), X86.replace("family\t: 25", "family\t: 26")
    assert describe(older).startswith("AMD EPYC, family 25 model 17 stepping 1; avx2 fma avx512f")
    assert describe(newer) != describe(older)
    assert describe(older.replace(" avx512_bf16", "")) != describe(older)
    assert ", implementer 0x41 part 0xd4f revision 1; asimd sve bf16; " in describe(ARM)


def test_this_machine_says_the_same_at_every_start(describe: Describe) -> None:
    assert describe(X86.format(mhz=2596)) == describe(X86.format(mhz=3100))
    assert describe(X86).count("; ") == 3  # model, instruction sets, cores, OpenMP


def test_keys_of_kept_measurements_hold_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = ExpertWorkload("cpu", "bf16", 8, 32, 16, 2, dtype=torch.float32, capability=None)
    seen = set()
    for rate in ("10 GFLOP/s", "20 GFLOP/s"):  # two starts on a machine whose speed wanders
        monkeypatch.setattr(machine, "speed", lambda rate=rate: rate)
        machine.cpu_description.cache_clear()
        seen.add(key_of(workload))
    assert len(seen) == 1
    assert "GFLOP" not in str(seen)


def test_speed_is_measured_once_on_one_thread(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(2)
    used = []
    measure = machine._median_seconds

    def counted(work: Callable[[], object]) -> float:
        used.append(torch.get_num_threads())
        return measure(work)

    monkeypatch.setattr(machine, "_median_seconds", counted)
    said = machine.speed()
    assert said == machine.speed()
    assert used == [1, 1]  # one product, one copy
    assert torch.get_num_threads() == 2
    found = re.fullmatch(r"(\d+) GFLOP/s float32, (\d+\.\d) GB/s copied", said)
    assert found
    assert float(found[1]) > 0
    assert float(found[2]) > 0


def test_only_this_cpu_gets_a_speed() -> None:
    ours = machine.cpu_description()
    assert machine.with_speed(ours) == f"{ours}; one thread: {machine.speed()}"
    assert machine.without_speed(machine.with_speed(ours)) == ours
    assert machine.with_speed("NVIDIA H100") == machine.without_speed("NVIDIA H100")


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [(X86, True), (X86.replace(" avx512_bf16", ""), False), (ARM, True),
     (X86.replace("avx512_bf16", "amx_bf16"), True), (ARM.replace(" bf16", ""), False), ("", True)],
)  # fmt: skip
def test_bfloat16_products_are_those_of_the_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, has: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine.has_bfloat16_products() is has
