"""Print the entries of `REIMPLEMENTED` and `RELEASE` that differ from the installed SGLang.

Read each of these functions again before `python -m tools.upstream_hashes` (docs/upgrading.md), and
write the new hashes into upstream_uses.py and released_files.py in sglang_dspark/serving/.
"""

from __future__ import annotations

from sglang_dspark.serving import released_files
from sglang_dspark.serving.upstream_check import body_hash
from sglang_dspark.serving.upstream_uses import REIMPLEMENTED


def main() -> None:
    """Print a line for each changed function: its entry with the new hash, or that it is gone.

    If a released file changed, a line for all files follows.
    """
    for module, functions in REIMPLEMENTED.items():
        for path, (known, ours) in functions.items():
            found = body_hash(module, path)
            if found is None:
                print(f"{module}: {path} is gone ({ours})")
            elif found != known:
                print(f'{module}: "{path}": ("{found}", "{ours}"),')
    if not released_files.are_unchanged():
        print(f'released_files.py: RELEASE = "{released_files.digest()}"')


if __name__ == "__main__":
    main()
