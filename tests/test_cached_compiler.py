"""The tests' compiler: an object is reused for the same sources and for no others."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sglang_dspark.backends.cpu import csrc
from tests.cached_compiler import cached_compiler

pytestmark = pytest.mark.skipif(not any(csrc.compilers()), reason="no C++ compiler")


def test_an_object_is_made_once_for_the_same_sources(tmp_path: Path) -> None:
    source, header, out = (tmp_path / name for name in ("a.cpp", "a.h", "a.o"))
    source.write_text('#include "a.h"\nint a() { return A; }\n')
    command = [*cached_compiler(tmp_path / "objects")["CXX"].split(), "-O1"]

    def compiled(text: str, *flags: str) -> tuple[bytes, int]:
        """The object's bytes, and how many have been made by now."""
        header.write_text(text)
        out.unlink(missing_ok=True)
        line = [*command, *flags, "-c", source.name, "-o", str(out)]
        done = subprocess.run(line, cwd=tmp_path, env=os.environ)
        assert (done.returncode, out.is_file()) == (0, True)
        return out.read_bytes(), len(list((tmp_path / "objects").iterdir()))

    first = compiled("#define A 1\n")
    assert first[1] == 1
    assert compiled("#define A 1\n") == first
    other = compiled("#define A 2\n")
    assert (other[0] != first[0], other[1]) == (True, 2)
    assert compiled("#define A 2\n", "-DB")[1] == 3
    header.write_text("#error\n")
    failed = subprocess.run(
        [*command, "-c", source.name, "-o", str(out)], cwd=tmp_path, capture_output=True
    )
    assert failed.returncode
    assert len(list((tmp_path / "objects").iterdir())) == 3
