"""The wheel in an environment of its own, away from the checkout: does all of it work there?"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from sglang_dspark.models.demo import ensure_demo_target
from tests.packaging.building import ROOT, Installed, install, pip
from tests.ports import free_ports

pytestmark = pytest.mark.xdist_group("packaging")
# Libraries of the extras that SGLang does not import itself
OF_EXTRAS = ("matplotlib", "locust", "gevent", "pyarrow")


@pytest.fixture(scope="module")
def bare(wheel: Path) -> Installed:
    """The base alone: as after an installation without `[loadtest]` and `[train]`."""
    return install(wheel, wheel.parent / "bare", without=OF_EXTRAS)


def test_the_checkout_is_out_of_reach(installed: Installed) -> None:
    code = "import sglang_dspark, sys; print(sglang_dspark.__file__, *sys.path, sep='\\n')"
    lines = installed.run("python", "-c", code).stdout.splitlines()
    assert Path(lines[0]).is_relative_to(installed.python.parents[1])
    assert str(ROOT) not in lines


def test_the_library_of_the_wheel_is_loaded_and_none_is_built(installed: Installed) -> None:
    """Load it without any compiler on PATH."""
    code = "from sglang_dspark.backends.cpu import csrc; print(csrc.library()._name)"
    done = installed.run("python", "-c", code, PATH="", CXX="")
    found = Path(done.stdout.strip())
    assert found.parent.name == "csrc", done.stderr
    assert found.is_relative_to(installed.python.parents[1])
    assert not (installed.home / ".cache" / "sglang-dspark" / "csrc").exists()


def test_versions_in_one_line(installed: Installed) -> None:
    done = installed.run("dspark", "--version")
    ours, theirs, torch = (version(name) for name in ("sglang-dspark", "sglang", "torch"))
    assert done.stdout == f"sglang-dspark {ours}, sglang {theirs}, torch {torch}\n", done.stderr


@pytest.mark.parametrize("extras", ["cpu", "cpu,loadtest,train", "cpu,dev"])
def test_pip_finds_every_requirement_met_and_none_in_conflict(
    installed: Installed, wheel: Path, extras: str
) -> None:
    """Of the package, and of all that it requires in turn: nothing is missing from the lock."""
    done = pip(installed, "install", "--dry-run", f"sglang-dspark[{extras}] @ {wheel.as_uri()}")
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
    assert found in ([], [f"Would install sglang-dspark-{version('sglang-dspark')}"])


def test_doctor_finds_it_fit_without_the_extras(bare: Installed) -> None:
    done = bare.run("dspark", "doctor", "--json")
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert done.returncode == 0
    drafter = Path(report["drafter"]["path"])
    assert drafter.is_relative_to(bare.python.parents[1])
    assert report["drafter"]["state"] == "valid"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("sweep --config cpu-demo", "pyarrow is not installed: pip install '.[loadtest]'"),
        ("report somewhere", "matplotlib is not installed: pip install '.[loadtest]'"),
        ("report --drafters", "matplotlib is not installed: pip install '.[train]'"),
    ],
)
def test_a_command_without_its_extra_says_which(bare: Installed, command: str, line: str) -> None:
    done = bare.run("dspark", *command.split())
    assert done.stderr == f"dspark: {line} in a checkout\n"
    assert done.returncode == 1


def test_without_sglang_the_demo_and_doctor_say_how_it_is_installed(
    wheel: Path, tmp_path: Path
) -> None:
    alone = install(wheel, tmp_path, without=("sglang",))
    words = "pip install --no-deps sglang==0.5.23"
    report = json.loads(alone.run("dspark", "doctor", "--json").stdout)
    assert any(words in problem for problem in report["problems"])
    port = str(free_ports(1))
    done = alone.run("dspark", "demo", "--serve", "--port", port, "--target", str(Path.cwd()))
    assert done.stderr.splitlines()[-1].startswith("dspark: sglang is not installed: ")
    assert words in done.stderr
    assert done.returncode == 1


def test_a_cache_that_cannot_be_written_is_one_line(installed: Installed) -> None:
    (installed.home / "a-file").write_text("")
    done = installed.run("dspark", "models", "demo", XDG_CACHE_HOME=f"{installed.home}/a-file")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dspark: cannot build the demo target in {installed.home}/a-file/")
    assert done.returncode == 1


def test_a_shipped_configuration_is_found_by_name(installed: Installed) -> None:
    for name in ("nothing", "configs/sweep/nothing.yaml"):
        done = installed.run("dspark", "sweep", "--config", name)
        assert f"no file {name}" in done.stderr
        assert "cpu-demo, cpu-trace, deeper, demo" in done.stderr
    code = (
        "from pathlib import Path; from sglang_dspark.shipped import config_file as f;"
        "from sglang_dspark.loadtest.sweep.config import load_sweep;"
        "from sglang_dspark.loadtest.sweep.setup import choose_arms, drafter_folders;"
        "c = load_sweep(f('sweep', Path('cpu-demo'))); a = choose_arms(c);"
        "print(*drafter_folders(c, a).values(), f('train', Path('paper/dspark')), sep='\\n');"
        "Path('cpu-demo').write_text(''); print(f('sweep', Path('cpu-demo')))"
    )
    done = installed.run("python", "-c", code)
    *shipped, own = map(Path, done.stdout.splitlines())
    assert [path.name for path in shipped] == [
        "smollm2-135m-dspark",
        "smollm2-135m-mtp1",
        "dspark.yaml",
    ], done.stderr
    assert all(path.exists() for path in shipped)
    assert own == Path("cpu-demo")  # a file of the user's comes first


@pytest.mark.slow
@pytest.mark.server
def test_a_sweep_by_a_shipped_configuration_serves_and_measures(installed: Installed) -> None:
    """Two servers of the demo target, plain and with the shipped drafter, one user."""
    cache = str(ensure_demo_target().parents[2])
    built = installed.run("dspark", "models", "demo", "--json", XDG_CACHE_HOME=cache)
    assert Path(json.loads(built.stdout)["path"]).is_dir(), built.stderr
    done = installed.run(
        *("dspark", "sweep", "--config", "demo", "--smoke", "--out", "run"),
        *("--json", "figures.json", "--port", str(free_ports(2))),
        timeout=1200,
        XDG_CACHE_HOME=cache,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((installed.home / "figures.json").read_text(encoding="utf-8"))
    assert figures["commit"].startswith("sglang-dspark ")
    (one_user,) = figures["metrics"]["by_concurrency"]
    assert one_user.keys() == {"concurrency", "plain", "dspark"}
    assert (installed.home / "run" / "run.json").is_file()
