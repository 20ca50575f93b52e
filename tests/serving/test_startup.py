"""The off switch of the package, and how `stop` ends a process of a tree."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from sglang_dspark.serving import startup


@pytest.mark.parametrize(
    ("disable", "plugins", "off"),
    [
        ("", "", False),
        ("0", "", False),
        ("1", "", True),
        ("true", "dspark", True),
        ("", "dspark,dspark_cpu", False),
        ("", " other , dspark ", False),
        ("", "other", True),
    ],
)
def test_switches(monkeypatch: pytest.MonkeyPatch, disable: str, plugins: str, off: bool) -> None:
    monkeypatch.setenv("DSPARK_DISABLE", disable)
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    assert (startup.switched_off() is not None) is off


@pytest.mark.parametrize(
    ("plugins", "left_out"),
    [("", False), ("dspark", True), ("dspark,dspark_cpu", False), ("other", False)],
)
def test_platform_left_out(monkeypatch: pytest.MonkeyPatch, plugins: str, left_out: bool) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    assert startup.platform_left_out() is left_out


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )


def test_stop_is_one_line_and_status_1_and_passes_except_exception() -> None:
    done = run("""
        from sglang_dspark.serving import startup
        try:
            startup.stop("first\\n  second")
        except Exception:
            print("swallowed")
    """)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "sglang-dspark: first second\n"


PARENT = """
    import multiprocessing, os, signal, sys, time
    from sglang_dspark.serving import startup

    def child():
        startup.stop("child failed")

    def on_quit(number, frame):
        print("told", flush=True)
        os._exit(3)

    if __name__ == "__main__":
        signal.signal(signal.SIGQUIT, on_quit)
        MARK
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        time.sleep(0.5)
        print("child ended with", process.exitcode)
"""


def test_stop_in_a_child_notifies_a_marked_parent() -> None:
    done = run(PARENT.replace("MARK", "startup.mark_server()"))
    assert done.returncode == 3
    assert done.stdout == "told\n"
    assert done.stderr == "sglang-dspark: child failed\n"


def test_a_child_that_is_set_up_itself_still_notifies_its_parent() -> None:
    """Every process of a server is: one that refuses a drafter has read it, long after that."""
    marked = PARENT.replace("MARK", "startup.mark_server()")
    done = run(marked.replace("startup.stop(", "startup.mark_server(); startup.stop("))
    assert (done.returncode, done.stdout) == (3, "told\n")


def test_stop_in_a_child_leaves_a_foreign_parent_alone() -> None:
    done = run(PARENT.replace("MARK", "pass"))
    assert done.returncode == 0
    assert done.stdout == "child ended with 1\n"
