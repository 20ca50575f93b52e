"""Write docs/configuration.md and docs/schemas/ from the pydantic models that read each file.

Both are generated from the models' JSON Schema, so a field, its range and its default are defined
only where they are checked. A field without a description stops the generator.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from sglang_dspark.evaluation.trace_plan import TracePlan
from sglang_dspark.loadtest.servers.arms import Arm
from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.models.golden import Golden
from sglang_dspark.serving.config import DSparkConfig
from sglang_dspark.training.config import RunConfig

Schema = Mapping[str, Any]
BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minItems": "at least {} of them",
    "minProperties": "at least {} of them",
    "minLength": "not empty",
    "pattern": "`{}`",
}
PRIMITIVES = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
}
HEAD = """# Configuration

For users who write a configuration file. This page has every field of every file. It is generated
from the code that reads the files (`make docs-reference`). An unknown field, a value out of range
and a duplicate field are refused in one line that names file and field. JSON is read like YAML.

An editor that supports JSON Schema checks a file as you type. The schemas are in `docs/schemas/`;
name one in the first line of a YAML file:

```yaml
# yaml-language-server: $schema=../../docs/schemas/training.json
```

Some rules hold between fields; they are at the end of a section.
"""


@dataclass(frozen=True)
class Document:
    """A kind of file. slug: the schema's name; rules: constraints between fields."""

    model: type[BaseModel]
    slug: str
    title: str
    about: str
    rules: tuple[str, ...] = ()


DOCUMENTS = (
    Document(
        DSparkConfig,
        "server",
        "Server",
        "Named by `--dspark-config FILE` or the variable `SGLANG_DSPARK_CONFIG`; see "
        "[operations](operations.md). No field has to be set, and `dspark doctor` shows the value "
        "and origin of each.",
        (
            "`cpu.weights` `bfloat16` and `int8` need `cpu.matrix_kernel: true`.",
            "`schedule.algorithm: early-stop` needs `schedule.mode: auto` and no "
            "`schedule.threshold`.",
            "`schedule.threshold` needs `schedule.mode: auto`, no `schedule.fairness_floor` and no "
            "`schedule.speed_target`.",
        ),
    ),
    Document(
        RunConfig,
        "training",
        "Training",
        "Named by `--config` of `dspark train` and its stages; examples in `configs/train/`.",
        ("`serving.check: true` needs `drafter.kind` `dspark` or `moe`.",),
    ),
    Document(
        SweepConfig,
        "sweep",
        "Sweep",
        "Named by `--config` of `dspark sweep`; examples in `configs/sweep/`. A section `smoke:` "
        "has fields that replace the others with `--smoke`. See "
        "[load testing](load-testing.md).",
        (
            "`baseline`, the arms of `compare` and those of `urls` are among `arms`.",
            "A service level of `slas` has at least one limit, and `speed_p10` is not above "
            "`speed_p50`.",
        ),
    ),
    Document(
        Golden,
        "golden",
        "Golden acceptance",
        "Named by `golden` of a sweep; the files of `configs/golden/`.",
        ("Acceptance is the same at every position whose drafts before it are right.",),
    ),
    Document(
        Arm,
        "arm",
        "Arm",
        "One server of a sweep; the files of `configs/serve/`.",
        (
            "`drafter` and a flag `--speculative-algorithm` come together.",
            "Flags that the sweep sets for all arms alike are refused: model, address, device, "
            "dtype, drafter and its token map, `--dspark-config`.",
        ),
    ),
    Document(
        TracePlan,
        "traces",
        "Traces",
        "Named by `--plan` of `dspark eval traces`; the published one is "
        "`configs/eval/traces.yaml`.",
        ("`answers.by` and the values of `traces` are names of `drafters`.",),
    ),
)


def schema_of(document: Document) -> dict[str, Any]:
    """Build the JSON Schema of a file; a sweep's gets `smoke`, which its reader removes first."""
    schema = _model_schema(document)
    if document.model is SweepConfig:
        quick = {"type": "object", "additionalProperties": False}
        quick["properties"] = dict(schema["properties"])  # all are optional there
        quick["description"] = "fields that --smoke puts in place of the others"
        schema["properties"]["smoke"] = quick
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": f"{document.title} of sglang-dspark",
    }


def schema_text(document: Document) -> str:
    """Return the text of the schema's file."""
    return json.dumps(schema_of(document), indent=2, ensure_ascii=False) + "\n"


def configuration_page() -> str:
    """Return docs/configuration.md."""
    return "\n".join([HEAD, *map(_chapter, DOCUMENTS)])


def _paragraph(text: str, indent: str = "") -> str:
    """Wrap a paragraph or a list item at 100 columns."""
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def field_paths(document: Document) -> set[str]:
    """Return all fields' dotted names, as `schedule.mode`, without names in mappings and lists."""
    return {
        f"{prefix}{name}"
        for _, prefix, section in _sections(document)
        for name in section["properties"]
    }


def _chapter(document: Document) -> str:
    parts = [f"## {document.title}", "", _paragraph(document.about), ""]
    parts += [f"Schema: [{document.slug}.json](schemas/{document.slug}.json).", ""]
    for heading, _, section in _sections(document):
        if heading:
            parts += [f"### {document.title}: {heading}", "", _paragraph(_sentence(section)), ""]
        parts += [*_table(document, section), ""]
    if document.rules:
        rules = (_paragraph(f"- {rule}", "  ") for rule in document.rules)
        parts += ["Between fields:", "", *rules, ""]
    return "\n".join(parts)


def _model_schema(document: Document) -> dict[str, Any]:
    """Return the model's schema; an arm's name is optional, because the file has it."""
    schema = document.model.model_json_schema()
    if document.model is Arm:
        schema["required"].remove("name")
    return schema


def _sections(document: Document) -> Iterator[tuple[str, str, Schema]]:
    """Yield heading, prefix of names and schema of the file's own fields, then of each mapping."""
    schema = _model_schema(document)
    definitions = schema.get("$defs", {})

    def below(section: Schema, prefix: str) -> Iterator[tuple[str, str, Schema]]:
        for name, field in section["properties"].items():
            names = _references(field)
            for each in names:
                kind = definitions[each]["properties"].get("kind", {}).get("const")
                path, many = f"{prefix}{name}", f" ({kind})" if len(names) > 1 else ""
                yield f"{path}{many}", f"{path}.", definitions[each]
                yield from below(definitions[each], f"{path}.")

    yield "", "", schema
    yield from below(schema, "")


def _table(document: Document, section: Schema) -> list[str]:
    rows = ["| field | type | default | range | meaning |", "|---|---|---|---|---|"]
    required = section.get("required", ())
    for name, field in section["properties"].items():
        if not field.get("description"):
            raise SystemExit(f"{document.model.__name__}: field {name} has no description")
        default = "required" if name in required else _default(field)
        cells = (f"`{name}`", _type(field), default, _range(field), field["description"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _type(field: Schema) -> str:
    """Describe the type in words."""
    if "$ref" in field or "oneOf" in field:
        return "mapping, below"
    if "anyOf" in field:
        return " or ".join(_type(each) for each in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("format") == "path":
        return "path"
    if field["type"] == "array":
        return f"list: {_type(field['items'])}"
    if field["type"] == "object":
        values = field["additionalProperties"]
        return "mapping" if values is True else f"mapping of names: {_type(values)}"
    return PRIMITIVES[field["type"]]


def _range(field: Schema) -> str:
    """Format the bounds of a value, or of a list's length and items."""
    inner = [each for each in field.get("anyOf", []) if each.get("type") != "null"]
    inner += [field["items"]] if "items" in field else []
    own = [text.format(field[name]) for name, text in BOUNDS.items() if name in field]
    return ", ".join([*own, *filter(None, map(_range, inner))])


def _default(field: Schema) -> str:
    if _references(field) and field["default"]:
        return "its own"
    if "default" not in field:
        return ""
    return f"`{json.dumps(field['default'], ensure_ascii=False)}`"


def _references(field: Schema) -> list[str]:
    """Return names of the models that a field's value, or each of its values, may have."""
    found = [field["$ref"].rpartition("/")[2]] if "$ref" in field else []
    parts = [*field.get("anyOf", []), *field.get("oneOf", [])]
    parts += [each for key in ("items", "additionalProperties") if (each := field.get(key))]
    return [
        *found,
        *(name for each in parts if isinstance(each, dict) for name in _references(each)),
    ]


def _sentence(section: Schema) -> str:
    """Return the model's docstring as one line."""
    return " ".join(section.get("description", "").split())
