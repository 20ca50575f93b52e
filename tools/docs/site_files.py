"""Add the repository's files that pages link to to the site (an mkdocs hook).

Pages link to result files and model cards as `../results/NAME.json`, which resolves in the
repository. The site has them under `repository/`, and a link to a missing file fails the strict
build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

PLACE = "repository"
_LINK = re.compile(r"(?<=\]\()\.\./([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page links to."""
    root = Path(config.config_file_path).parent
    pages = [page for page in files.documentation_pages() if page.content_string]
    for name in sorted({name for page in pages for name in _LINK.findall(page.content_string)}):
        source = root / name
        if source.is_file():
            file = File.generated(
                config,
                f"{PLACE}/{name}",
                abs_src_path=str(source),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
            files.append(file)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite the links to the files' paths in the site."""
    return _LINK.sub(rf"{PLACE}/\1", markdown)
