"""A C++ compiler for tests that build the library of csrc/: it compiles each source once.

Set-up, wheels and csrc.build compile the same sources a dozen times in a test run, 10 s each.
Objects are kept in the user's cache by compiler, arguments, source and headers.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

UNUSED_S = 14 * 86_400.0  # after which an object is deleted


def cached_compiler(objects: Path) -> dict[str, str]:
    """Return CXX for the environment of a build; nothing where there is no compiler.

    objects: the folder of the objects.
    """
    from sglang_dspark.backends.cpu import csrc

    compiler = next(csrc.compilers(), None)
    if compiler is None:
        return {}
    return {"CXX": shlex.join([sys.executable, "-ES", __file__, str(objects), *compiler])}


def user_objects() -> Path:
    """Return the folder in the user's cache."""
    from sglang_dspark.paths import cache_root

    return cache_root() / "sglang-dspark" / "test-objects"


def main(objects: Path, command: list[str]) -> int:
    if "-c" not in command or "-o" not in command:
        return subprocess.run(command).returncode
    source, out = (Path(command[command.index(flag) + 1]) for flag in ("-c", "-o"))
    kept = objects / _key(command, source, out)
    if kept.is_file():
        os.utime(kept)
        shutil.copyfile(kept, out)
        return 0
    status = subprocess.run(command).returncode
    if status == 0:
        objects.mkdir(parents=True, exist_ok=True)
        mine = kept.with_name(f"{kept.name}.{os.getpid()}")
        shutil.copyfile(out, mine)
        mine.replace(kept)
        for other in objects.iterdir():
            if time.time() - other.stat().st_mtime > UNUSED_S:
                other.unlink(missing_ok=True)
    return status


def _key(command: list[str], source: Path, out: Path) -> str:
    """Hash what an object is made of."""
    program = Path(shutil.which(command[0]) or command[0])
    arguments = [each for each in command if each not in (str(source), str(out))]
    digest = hashlib.sha256(repr((str(program), program.stat().st_mtime, arguments)).encode())
    for file in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(file.name.encode() + file.read_bytes())
    return f"{digest.hexdigest()}.o"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
