"""Write prompts of one narrow domain, to compare drafters where most first drafts are accepted.

    pip install reasoning-gym==0.1.25
    python -m tools.narrow_prompts

Writes `runs/narrow/train.jsonl` and `test.jsonl`: word problems of reasoning-gym's gsm_symbolic, a
hundred templates of GSM8K with other names and numbers
(https://github.com/open-thought/reasoning-gym). Both files use the same templates, so the test has
known wordings, which makes the domain narrow; no question is in both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sglang_dspark.common.atomic_write import replacing

FOLDER = Path(__file__).resolve().parents[1] / "runs" / "narrow"
VERSION = "0.1.25"  # another version may generate other questions from the same seed
TRAINED, TESTED = 2000, 64


def questions(seed: int, count: int, beside: Iterable[str] = ()) -> list[str]:
    """Generate up to `count` distinct questions from a seed, without those in `beside`."""
    drawn = import_module("reasoning_gym").create_dataset("gsm_symbolic", size=2 * count, seed=seed)
    texts = dict.fromkeys(drawn[i]["question"] for i in range(2 * count))
    known = set(beside)
    return [text for text in texts if text not in known][:count]


def write(path: Path, texts: list[str]) -> None:
    """Write the texts as prompts that `dspark train data` and `dspark eval record` read."""
    rows = [
        {"id": f"{path.stem}-{i}", "domain": "math", "prompt": text} for i, text in enumerate(texts)
    ]
    with replacing(path) as file:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> int:
    try:
        found = version("reasoning-gym")
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        print(f"reasoning-gym {VERSION} is needed, {found} is installed: "
              f"pip install reasoning-gym=={VERSION}", file=sys.stderr)  # fmt: skip
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    trained = questions(1, TRAINED)
    tested = questions(2, TESTED, trained)
    write(FOLDER / "train.jsonl", trained)
    write(FOLDER / "test.jsonl", tested)
    print(f"{len(trained)} questions to train on and {len(tested)} to test on: {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
