"""Run the few PTX instructions of an inline assembly on packed registers, by numpy.

Products and sums are float64 and rounded to BF16 once, which is exact for what FP4 needs.
"""

from __future__ import annotations

import re

import numpy as np
import torch


def run_ptx(text: str, inputs: dict[int, np.ndarray], outputs: int) -> list[np.ndarray]:
    """Return registers $0.. (uint32 arrays) that the assembly makes of the inputs.

    inputs: by operand number, uint32 arrays of one shape. ValueError for an unknown instruction.
    """
    shape = next(iter(inputs.values())).shape
    registers = {f"${number}": value for number, value in inputs.items()}
    for line in text.strip().strip("{}").split(";"):
        words = line.split(None, 1)
        if not words or words[0] == ".reg":
            continue
        target, *names = (part.strip() for part in words[1].split(","))
        values = [
            registers[name] if name in registers else np.full(shape, int(name, 0), np.uint32)
            for name in names
        ]
        registers[target] = _result(words[0], values)
    return [registers[f"${number}"] for number in range(outputs)]


def _result(instruction: str, values: list[np.ndarray]) -> np.ndarray:
    match instruction:
        case "mov.b32":
            return values[0]
        case "and.b32":
            return values[0] & values[1]
        case "shl.b32":
            return values[0] << values[1]
        case "shr.b32":
            return values[0] >> values[1]
        case "mul.lo.u32":
            return values[0] * values[1]
        case "prmt.b32":
            return _permuted(*values)
        case "max.bf16x2":
            return _packed(np.fmax(_halves(values[0]), _halves(values[1])))
        case "fma.rn.bf16x2":
            a, b, c = map(_halves, values)
            with np.errstate(invalid="ignore"):
                return _packed(a * b + c)
    raise ValueError(f"no instruction {instruction}")


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    eight = [part >> np.uint32(8 * i) & np.uint32(255) for part in (a, b) for i in range(4)]
    chosen = (eight[int(selector.flat[0]) >> 4 * i & 7] << np.uint32(8 * i) for i in range(4))
    return np.bitwise_or.reduce(list(chosen))


def _halves(register: np.ndarray) -> np.ndarray:
    """[*, 2] float64 of packed BF16, the low half first."""
    halves = np.stack([register << np.uint32(16), register & np.uint32(0xFFFF0000)], -1)
    return halves.view(np.float32).astype(np.float64)


def _packed(values: np.ndarray) -> np.ndarray:
    bits = torch.from_numpy(values).to(torch.float32).bfloat16().view(torch.int16).numpy()
    low, high = np.moveaxis(bits.view(np.uint16).astype(np.uint32), -1, 0)
    return low | high << np.uint32(16)


def count_instructions(text: str) -> int:
    """Count those that compute: neither declarations nor constants."""
    found = re.findall(r"^\s*([a-z][\w.]+) ", text, flags=re.MULTILINE)
    return sum(not name.startswith("mov") for name in found)
