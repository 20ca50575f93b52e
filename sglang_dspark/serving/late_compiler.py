"""Import torch's compiler when it is used, for `dspark doctor --serve`.

Modules of Transformers and SGLang import it, 0.7 s with SymPy and torch's sharded tensors, to
decorate functions that no examination of arguments calls. Here such a function is decorated at its
first call, and the module runs when another of its names is read or a part of it is imported.
(Until its first call such a function cannot be part of another that is compiled; an examination
compiles none.)
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_MODULE = "torch._dynamo"
# Transformers imports a class from it (masking_utils.py), which uses no other part of the module.
_PART = f"{_MODULE}._trace_wrapped_higher_order_op"
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")  # there and in torch.compiler


@contextmanager
def late_compiler() -> Iterator[None]:
    """Decorate functions at their first call within the block, where no import runs the module."""
    import torch

    places = [(torch, "compile"), *((torch.compiler, name) for name in _DECORATORS)]
    decorators = [getattr(place, name) for place, name in places]
    try:
        for (place, name), decorating in zip(places, decorators, strict=True):
            setattr(place, name, _on_first_call(decorating))
        if _MODULE not in sys.modules:
            _postpone(torch)
        yield
    finally:
        for (place, name), decorating in zip(places, decorators, strict=True):
            setattr(place, name, decorating)


def _postpone(torch: Any) -> None:
    """Register the module without running it, and import `_PART`."""
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None, "torch has it"
    late = importlib.util.module_from_spec(spec)
    late.__class__ = _LateModule
    sys.modules[_MODULE] = late
    setattr(torch, _MODULE.partition(".")[2], late)  # as an import does
    importlib.import_module(_PART)
    sys.meta_path.insert(0, _Parts())


class _LateModule(types.ModuleType):
    """A module with its spec that runs when any name but `_DECORATORS` is read from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # it has all that a module needs
            raise AttributeError(name)
        if name not in _DECORATORS:
            return getattr(_run(self), name)

        def decorating(*given: Any, **options: Any) -> Any:
            return getattr(_run(self), name)(*given, **options)

        return _on_first_call(decorating)


def _run(module: types.ModuleType) -> types.ModuleType:
    """Run a late module's source, once, and return the module."""
    if isinstance(module, _LateModule):
        late: Any = module
        late.__class__ = types.ModuleType  # its imports see it as half imported, as usual
        try:
            late.__spec__.loader.exec_module(late)
        except BaseException:  # as for a failing import: the next one fails with the same error
            sys.modules.pop(_MODULE, None)
            raise
    return module


class _Parts(MetaPathFinder, Loader):
    """Run the late module before a part of it is imported, and find the part that it imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        late = sys.modules.get(_MODULE)
        if not (isinstance(late, _LateModule) and name.startswith(f"{_MODULE}.")):
            return None
        _run(late)
        part = sys.modules.get(name)
        if part is None:
            return None
        # importlib reads the spec of a module that is already there, and would run it once more.
        # Not by `part.__spec__ =`, which torch's modules of settings refuse.
        spec = vars(part)["__spec__"] = ModuleSpec(name, self, loader_state=part.__spec__)
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__spec__"] = vars(module)["__spec__"].loader_state  # it has run before


def _on_first_call(decorating: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that applies at a function's first call; other objects at once."""

    @functools.wraps(decorating)
    def decorate_later(*given: Any, **options: Any) -> Any:
        if not given and not {"model", "fn"} & options.keys():
            return functools.partial(decorate_later, **options)
        if not given or not isinstance(given[0], types.FunctionType):
            return decorating(*given, **options)
        decorated = functools.cache(lambda: decorating(*given, **options))

        @functools.wraps(given[0])
        def call(*arguments: Any, **named: Any) -> Any:
            return decorated()(*arguments, **named)

        return call

    return decorate_later
