import subprocess
import sys

import pytest

from sglang_dspark.schedule import rehearsal
from sglang_dspark.schedule.compiled import cache_folder

# As a server: other sizes, and what every numba function of the package compiled or read.
_AS_A_SERVER = """
import gc
from numba.core.dispatcher import Dispatcher
from sglang_dspark.schedule import rehearsal
rehearsal._GAMMA, rehearsal._REQUESTS = 3, 48
rehearsal.main()
found = [each for each in gc.get_objects() if isinstance(each, Dispatcher)]
ours = [each for each in found if each.py_func.__module__.startswith("sglang_dspark.schedule")]
print(sum(map(lambda each: sum(each.stats.cache_misses.values()), ours)))
print(sum(map(lambda each: sum(each.stats.cache_hits.values()), ours)))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_folder.cache_clear()
    yield cache_folder()
    cache_folder.cache_clear()


def _waited(process):
    assert process.wait(timeout=300) == 0


def test_a_server_compiles_nothing_after_it(cache):
    started = []
    with pytest.MonkeyPatch.context() as patch:
        popen = subprocess.Popen
        patch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)))
        rehearsal.compile_early()
        [process] = started
        _waited(process)
        assert cache.is_dir()
        rehearsal.compile_early()
        assert started == [process], "what is compiled is not compiled again"
    done = subprocess.run(
        [sys.executable, "-c", _AS_A_SERVER], capture_output=True, text=True, check=True
    )
    missed, read = map(int, done.stdout.split())
    assert missed == 0
    assert read > 10


def test_a_process_of_the_server_starts_none(cache):
    code = (
        "import multiprocessing, subprocess, sys\n"
        "from sglang_dspark.schedule import rehearsal\n"
        "def work():\n"
        "    subprocess.Popen = lambda *a, **k: sys.exit(3)\n"
        "    rehearsal.compile_early()\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start(); child.join(); print(child.exitcode)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_without_a_home_nothing_is_started(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError()))
    monkeypatch.setattr(subprocess, "Popen", None)  # a call would raise
    cache_folder.cache_clear()
    rehearsal.compile_early()
    cache_folder.cache_clear()
