"""Write the prompts of tools/smollm2-135m-answers.safetensors.xz from local copies of public sets.

    python -m tools.prompts runs/prompts.jsonl --gsm8k grade-school-math --mbpp mbpp.jsonl

Each option names a copy of a set, which this tool neither downloads nor ships:

    --gsm8k          https://github.com/openai/grade-school-math
    --mbpp           mbpp.jsonl of https://github.com/google-research/google-research
    --algorithms     https://github.com/TheAlgorithms/Python
    --stdlib         the Python standard library, such as /usr/lib/python3.11
    --exercism       https://github.com/exercism/python
    --self-instruct  https://github.com/yizhongw/self-instruct
    --vicuna         https://github.com/lm-sys/FastChat
    --trivia         https://github.com/uberspot/OpenTriviaQA

Prompts of GSM8K test, MBPP 11-510 and MT-Bench are excluded; `dspark train data` skips the
package's own evaluation prompts. An id contains a hash of the prompt's text, so that a store stays
valid when a set changes.

With all sets, 5,914 of the file's first 7,308 answers match a prompt. The others answer trivia
questions that asked for an explanation where this tool does not, or vice versa: that was drawn at
random, and the seed is lost.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.common.files import parse_json, reading
from sglang_dspark.errors import DSparkError

# One prompt in three also asks for an explanation. A changed wording changes the digests.
_WORDINGS = (
    "Write a Python function `{}`. {}",
    "Implement `{}` in Python: {}",
    "Please write `{}` in Python and explain it briefly. {}",
)
# A docstring's task ends at its first paragraph, example or list of parameters.
_TASK_END = re.compile(r"\n\s*\n|>>>|:param|\bArgs\b|\bParameters\b")
_NOT_STDLIB = ("site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo")
_NOT_ALGORITHMS = ("project_euler", "scripts")  # Project Euler's functions are all named `solution`


def gsm8k(folder: Path) -> Iterator[str]:
    """Yield the training questions."""
    asked = "Please reason step by step, and put your final answer within \\boxed{}."
    for row in _rows(folder / "grade_school_math" / "data" / "train.jsonl", "question"):
        yield f"{row['question'].strip()}\n{asked}"


def mbpp(file: Path) -> Iterator[str]:
    """Yield the tasks outside 11-510 whose text differs from all of those."""
    rows = _rows(file, "task_id", "text", "test_list")
    tested = {row["text"] for row in rows if 11 <= row["task_id"] <= 510}
    for row in rows:
        if row["text"] not in tested:
            yield f"{row['text']}\nYour code should pass this test:\n{row['test_list'][0]}"


def algorithms(folder: Path) -> Iterator[str]:
    """Yield the documented functions, tests included."""
    return _functions(sorted(_modules(folder, _NOT_ALGORITHMS)))


def stdlib(folder: Path) -> Iterator[str]:
    """Yield the documented functions of the modules that programs import."""
    return _functions(sorted(_modules(folder, _NOT_STDLIB), key=lambda each: (each.parent, each)))


def exercism(folder: Path) -> Iterator[str]:
    """Yield the practice exercises."""
    for exercise in sorted((folder / "exercises" / "practice").glob("*/.docs/instructions.md")):
        text = _text(exercise).replace("# Instructions", "# Description").strip()
        yield f"Solve this exercise in Python.\n\n{text}"


def self_instruct_seed(folder: Path) -> Iterator[str]:
    """Yield the seed tasks."""
    return _instructions(folder / "data" / "seed_tasks.jsonl")


def self_instruct_user(folder: Path) -> Iterator[str]:
    """Yield the user-oriented instructions."""
    return _instructions(folder / "human_eval" / "user_oriented_instructions.jsonl")


def vicuna(folder: Path) -> Iterator[str]:
    """Yield the first turns that are not in MT-Bench."""
    data = folder / "fastchat" / "llm_judge" / "data"
    tested = {
        turn
        for row in _rows(data / "mt_bench" / "question.jsonl", "turns")
        for turn in row["turns"]
    }
    for row in _rows(data / "vicuna_bench" / "question.jsonl", "turns"):
        if row["turns"][0] not in tested:
            yield row["turns"][0]


def trivia(folder: Path) -> Iterator[str]:
    """Yield the questions without their choices, every other one with a request to explain."""
    for file in sorted((folder / "categories").glob("*")):
        for part in re.split(r"^#Q ", _text(file), flags=re.M)[1:]:
            question = _one_line(part.split("\n^")[0])
            if question.endswith("?") and 30 <= len(question) <= 200:
                explained = hashlib.sha256(question.encode()).digest()[0] % 2
                yield question + " Explain your answer." * explained


@dataclass(frozen=True)
class PromptSet:
    """One set: the option that names its copy, its rows' fields, and its reader."""

    option: str
    source: str
    domain: str
    license: str
    read: Callable[[Path], Iterator[str]]


SETS = (
    PromptSet("gsm8k", "gsm8k-train", "math", "MIT", gsm8k),
    PromptSet("mbpp", "mbpp-train", "code", "CC-BY-4.0", mbpp),
    PromptSet("algorithms", "thealgorithms-python", "code", "MIT", algorithms),
    PromptSet("stdlib", "python-stdlib", "code", "PSF-2.0", stdlib),
    PromptSet("exercism", "exercism", "code", "MIT", exercism),
    PromptSet("self_instruct", "self-instruct-seed", "chat", "Apache-2.0", self_instruct_seed),
    PromptSet(
        "self_instruct", "self-instruct-user-oriented", "chat", "Apache-2.0", self_instruct_user
    ),
    PromptSet("vicuna", "vicuna-bench", "chat", "Apache-2.0", vicuna),
    PromptSet("trivia", "opentriviaqa", "chat", "CC-BY-SA-4.0", trivia),
)


def write(file: Path, copies: Mapping[str, Path]) -> dict[str, int]:
    """Write the distinct prompts of the named sets and return the count of each.

    Raises DSparkError if a copy adds no prompts.
    """
    rows: dict[str, dict[str, Any]] = {}
    counts = {}
    for each in SETS:
        if each.option not in copies:
            continue
        before = len(rows)
        for text in each.read(copies[each.option]):
            name = f"{each.source}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
            row = {"id": name, "domain": each.domain, "source": each.source}
            rows.setdefault(text, row | {"license": each.license, "turns": [text]})
        counts[each.source] = len(rows) - before
        if len(rows) == before:
            raise DSparkError(
                f"{copies[each.option]} has no prompts of {each.source}; give --{each.option} "
                "the folder or file that this tool's --help names"
            )
    with replacing(file) as whole:
        whole.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")
    return counts


def _modules(folder: Path, skipped: Sequence[str]) -> list[Path]:
    """Return the Python files outside the skipped folders."""
    files = folder.rglob("*.py")
    return [each for each in files if not set(skipped) & set(each.relative_to(folder).parts)]


def _functions(files: Sequence[Path]) -> Iterator[str]:
    """Yield a prompt for each documented function; the order of files sets its wording."""
    documented = chain.from_iterable(map(_documented, files))
    for wording, (signature, task) in zip(cycle(_WORDINGS), documented, strict=False):
        yield wording.format(signature, task)


def _documented(file: Path) -> Iterator[tuple[str, str]]:
    """Yield signature and task of public functions; a task has 40 to 600 characters and 7 words."""
    try:
        tree = ast.parse(_text(file))
    except SyntaxError:  # the standard library contains invalid files that test tools
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name in ("main", "test"):
            continue
        task = _one_line(_TASK_END.split(ast.get_docstring(node) or "")[0])
        said = 40 <= len(task) <= 600 and len(task.split()) > 6
        if said and not node.name.startswith("_"):
            yield f"{node.name}({ast.unparse(node.args)})", task


def _instructions(file: Path) -> Iterator[str]:
    for row in _rows(file, "instruction", "instances"):
        given = row["instances"][0]["input"]
        yield row["instruction"] + (f"\n\nInput:\n{given}" if given else "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _text(file: Path) -> str:
    with reading(file, "copy of a prompt set", "clone the set again"):
        return file.read_text(encoding="utf-8", errors="ignore")


def _rows(file: Path, *fields: str) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file. Raises DSparkError if a row lacks a field."""
    text = _text(file)
    with reading(file, "copy of a prompt set", "clone the set again"):
        rows = [parse_json(line) for line in text.splitlines() if line.strip()]
        for row in rows:
            missing = [field for field in fields if field not in row]
            if missing:
                raise DSparkError(f"a row has no {missing[0]}; clone the set again")
    return rows


def main() -> int:
    """Write the file; return 0, or 1 after printing the error on one line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    for option in dict.fromkeys(each.option for each in SETS):
        parser.add_argument(f"--{option.replace('_', '-')}", type=Path)
    given = vars(parser.parse_args())
    file = given.pop("file")
    copies = {option: path for option, path in given.items() if path is not None}
    try:
        if not copies:
            raise DSparkError("no set is named: give at least one, such as --gsm8k FOLDER")
        for source, count in write(file, copies).items():
            print(f"{source}: {count}")
    except DSparkError as error:
        print(f"prompts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
