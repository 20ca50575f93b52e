"""Write the synthetic traces: `python -m tools.traces.make`. Seeds let a test make them again.

They have the format of Mooncake's and BurstGPT's traces, not their content: sizes fit the demo
target on a CPU. Half of the Mooncake requests begin with one of three shared documents; two of the
BurstGPT rows are failed requests without an answer.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sglang_dspark.common.atomic_write import replacing

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "sweep" / "traces"
REQUESTS = 40
MEAN_GAP_S = 0.8
BLOCK = 512
DOCUMENTS = 3
FAILED = (7, 23)


def mooncake(seed: int = 1) -> str:
    """Generate JSON lines: time in ms, lengths in tokens, numbers of the prompt's blocks."""
    generator = np.random.default_rng(seed)
    rows = []
    unused = DOCUMENTS
    for at in _times(generator):
        own = int(generator.integers(24, 2 * BLOCK // 3))
        shared = [int(generator.integers(DOCUMENTS))] if generator.random() < 0.5 else []
        length = BLOCK * len(shared) + own
        row = {
            "timestamp": round(1000 * at),
            "input_length": length,
            "output_length": int(generator.integers(8, 64)),
            "hash_ids": [*shared, unused],
        }
        unused += 1
        rows.append(json.dumps(row))
    return "\n".join(rows) + "\n"


def burstgpt(seed: int = 2) -> str:
    """Generate CSV: time in s, model, lengths in tokens, kind."""
    generator = np.random.default_rng(seed)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"]
    )
    for number, at in enumerate(_times(generator)):
        asked = int(generator.integers(12, 400))
        answered = 0 if number in FAILED else int(generator.integers(8, 64))
        kind = "API log" if generator.random() < 0.3 else "Conversation log"
        model = "GPT-4" if generator.random() < 0.2 else "ChatGPT"
        table.writerow([f"{at:.2f}", model, asked, answered, asked + answered, kind])
    return text.getvalue()


def made() -> dict[str, str]:
    """Return the content of every synthetic trace by file name."""
    return {"made-mooncake.jsonl": mooncake(), "made-burstgpt.csv": burstgpt()}


def _times(generator: np.random.Generator) -> Iterator[float]:
    """Yield bursty arrival times in s, ascending."""
    yield from np.cumsum(generator.gamma(0.4, MEAN_GAP_S / 0.4, REQUESTS)).tolist()


if __name__ == "__main__":
    for name, content in made().items():
        with replacing(FOLDER / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
        print(f"configs/sweep/traces/{name} written")
