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


# As the process that starts a server: it waits for what it started, and prints how many that were.
_STARTS = """
import subprocess
from sglang_dspark.schedule import rehearsal
popen, codes = subprocess.Popen, []
subprocess.Popen = lambda *a, **k: codes.append(popen(*a, **k).wait())
rehearsal.compile_early()
print(codes)
"""


def _printed(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_server_compiles_nothing_after_it(cache):
    assert _printed(_STARTS) == "[0]"
    assert _printed(_STARTS) == "[]", "what is compiled is not compiled again"
    missed, read = map(int, _printed(_AS_A_SERVER).split())
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
    assert _printed(code) == "0"


def test_without_a_home_nothing_is_started(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError()))
    monkeypatch.setattr(subprocess, "Popen", None)  # a call would raise
    cache_folder.cache_clear()
    rehearsal.compile_early()
    cache_folder.cache_clear()
