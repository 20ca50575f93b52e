"""Import only what an examination of arguments uses, for `dspark doctor --serve`.

SGLang resolves arguments with two thirds of the modules that a server imports. The rest is imported
because patches check their targets there, and because a decorator at the top of a module imports
torch's compiler. In an examination a patch waits for the import of its target's module
(patches/late_install.py), and the compiler for its use (late_compiler.py). No module becomes a
stub: modules that are used after all are imported, patched and compiled. Only SciPy and torch's
sharded tensors are hidden from Transformers, as no examination runs its models.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from sglang_dspark.serving.late_compiler import late_compiler

Report = Callable[[list[str]], None]
_TRANSFORMERS, _SCAN = "transformers.utils.import_utils", "create_import_structure_from_path"
_NAMES = "fetch__all__"  # function of that module that parses `__all__`
_SAME_NAME = ("torch", "accelerate")  # packages whose distributions have their names
_HIDDEN = (  # checks of Transformers that return False
    "is_scipy_available",  # `scipy.optimize`, 0.3 s, for losses and some models' images and audio
    "is_torch_distributed_available",  # `torch.distributed.tensor`, 0.4 s, for sharded models
)
_examinations: list[None] = []  # those that run now


def active() -> bool:
    """Return whether an examination runs in this process."""
    return bool(_examinations)


@contextmanager
def examination() -> Iterator[None]:
    """Import the compiler only when it is used, and make `active` true, within the block."""
    if _TRANSFORMERS not in sys.modules:
        report_imports([_TRANSFORMERS], _shorten_imports)
    listing = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: _Distributions(listing)
    _examinations.append(None)
    try:
        with late_compiler():
            yield
    finally:
        _examinations.pop()
        importlib.metadata.packages_distributions = listing


class _Distributions(Mapping[str, list[str]]):
    """Map a package to the distributions that install it, each read when it is requested.

    Transformers lists the files of all installed distributions when it is imported, and looks up
    only `_SAME_NAME`. Other names are read from the whole list.
    """

    def __init__(self, listing: Callable[[], Mapping[str, list[str]]]) -> None:
        self._all = functools.cache(listing)

    def __getitem__(self, package: str) -> list[str]:
        if package in _SAME_NAME:
            try:
                return [importlib.metadata.distribution(package).name]
            except importlib.metadata.PackageNotFoundError:
                pass  # a distribution of another name may install it
        return self._all()[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def _shorten_imports(modules: list[str]) -> None:
    """Make Transformers read its folders of models once, and disable `_HIDDEN`.

    It caches its findings of a folder, but only for 128 of several hundred. It searches
    for the last line that begins with `__all__` line by line, in two million lines.
    """
    utilities = sys.modules[_TRANSFORMERS]
    for question in _HIDDEN:
        if hasattr(utilities, question):
            setattr(utilities, question, lambda: False)
    names: Any = getattr(utilities, _NAMES, None)
    if names is not None:
        setattr(utilities, _NAMES, _from_last_line(names))
    scan: Any = getattr(utilities, _SCAN, None)
    if hasattr(scan, "cache_info"):
        setattr(utilities, _SCAN, functools.cache(scan.__wrapped__))


def _from_last_line(names: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    @functools.wraps(names)
    def find(text: str) -> list[str]:
        return names(text[text.rfind("\n__all__") + 1 :])

    return find


def report_imports(modules: Iterable[str], report: Report) -> None:
    """Call `report` with the names of these modules as they are imported, each name once.

    Modules that import each other are reported together after the outermost one. The watch lasts
    until the process ends; none of the modules may be loaded yet.
    """
    sys.meta_path.insert(0, _Watcher(set(modules), report))


class _Watcher(MetaPathFinder):
    """Find watched modules as the other finders do, with a loader that reports them."""

    def __init__(self, modules: set[str], report: Report) -> None:
        self._watched, self._report = modules, report
        self._imported: list[str] = []  # not reported yet
        self._searched: set[str] = set()  # names in search
        self._depth = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._watched or name in self._searched:  # another watcher searches
            return None
        self._searched.add(name)
        try:
            for finder in sys.meta_path:
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find is None else find(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _WatchedLoader(spec.loader, self)
                    return spec
            return None
        finally:
            self._searched.discard(name)

    def run(self, module: types.ModuleType, loader: Loader) -> None:
        """Run a module by its own loader; report it unless another import surrounds this one."""
        self._depth += 1
        try:
            loader.exec_module(module)
            self._watched.discard(module.__name__)
            self._imported.append(module.__name__)
        finally:
            self._depth -= 1
            if self._imported and not self._depth:
                names, self._imported = self._imported, []
                self._report(names)


class _WatchedLoader(Loader):
    """Load as another loader does."""

    def __init__(self, loader: Loader, watcher: _Watcher) -> None:
        self._loader, self._watcher = loader, watcher

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader  # `inspect` requests the source from it
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._watcher.run(module, self._loader)
