"""Print the entries of `REIMPLEMENTED` that differ from the installed SGLang.

`python -m tools.upstream_hashes`, after each of these functions was read again (docs/upgrading.md):
the new hashes go into sglang_dspark/serving/upstream_uses.py.
"""

from __future__ import annotations

from sglang_dspark.serving.upstream_check import body_hash
from sglang_dspark.serving.upstream_uses import REIMPLEMENTED


def main() -> None:
    """Print one line for each function: module, entry with its new hash, or that it is gone."""
    for module, functions in REIMPLEMENTED.items():
        for path, (known, ours) in functions.items():
            found = body_hash(module, path)
            if found is None:
                print(f"{module}: {path} is gone ({ours})")
            elif found != known:
                print(f'{module}: "{path}": ("{found}", "{ours}"),')


if __name__ == "__main__":
    main()
