"""Write the generated pages of docs/: `python -m tools.docs.reference`, or `make docs-reference`.

A test compares the pages of docs/ with the generated text.
"""

from __future__ import annotations

from pathlib import Path

from sglang_dspark.common.atomic_write import replacing
from tools.docs.faults import faults_page
from tools.docs.features import gpu_page
from tools.docs.gpu_results import results_page
from tools.docs.metrics import metrics_page
from tools.docs.settings import DOCUMENTS, configuration_page, schema_text
from tools.docs.support import support_page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generated() -> dict[str, str]:
    """Return the content of every generated file by its path below docs/."""
    schemas = {f"schemas/{each.slug}.json": schema_text(each) for each in DOCUMENTS}
    pages = {
        "configuration.md": configuration_page(),
        "faults.md": faults_page(),
        "gpu.md": gpu_page(),
        "metrics.md": metrics_page(),
        "results-gpu.md": results_page(),
        "support.md": support_page(),
    }
    return pages | schemas


def write(folder: Path = DOCS) -> list[str]:
    """Write the files that differ and return their names."""
    written = []
    for name, text in generated().items():
        file = folder / name
        if file.is_file() and file.read_text() == text:
            continue
        with replacing(file) as temporary:
            temporary.write_text(text)
        written.append(name)
    return written


if __name__ == "__main__":
    for name in write():
        print(f"docs/{name} written")
