"""Triton's interpreter (3.7), without what it repeats.

With each call of a nested function, `tl.sum` among them, it replaces all operators of
`triton.language` anew, which is most of a small kernel's time. The kernel's start has done so
already, and for `triton.language.core`, which only nested functions see, once is enough.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def patch_language_once() -> None:
    """In this process, from now on. The interpreter must have been chosen."""
    patched: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
