"""A mutant: one piece of source exchanged for a wrong one, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_dspark.errors import DSparkError


@dataclass(frozen=True)
class Mutant:
    """name: its own in the whole list. area: what it breaks. file: path from the repository's root.

    old: text that stands exactly once in the file; new: what replaces it. tests: files or node ids
    of pytest, of which at least one must fail. equivalent: why nothing that can be observed
    changes; the tests must then pass. server: the tests start servers.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""
    server: bool = False

    def applied(self, text: str) -> str:
        """The file's text with the fault. Raises DSparkError unless `old` stands there once."""
        count = text.count(self.old)
        if count != 1:
            raise DSparkError(
                f"mutant {self.name}: its text stands {count} times in {self.file}, not once; "
                "the code has changed: write it anew in tests/mutants/catalogue"
            )
        return text.replace(self.old, self.new)

    def check(self, root: Path) -> None:
        """Raises DSparkError when the source has moved or a test file is gone."""
        file = root / self.file
        if not file.is_file():
            raise DSparkError(f"mutant {self.name}: {self.file} is gone: write the mutant anew")
        self.applied(file.read_text(encoding="utf-8"))
        for test in self.tests:
            if not (root / test.split("::")[0]).is_file():
                raise DSparkError(f"mutant {self.name}: its test {test} is gone: name another")
