"""tools/gpu/pack and what takes its pieces in: small, checked, made once, installed when whole."""

from __future__ import annotations

import ast
import hashlib
import os
import random
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_dspark import __version__
from sglang_dspark.errors import DSparkError
from tools.gpu.packing import wheels
from tools.gpu.packing.arrival import environment, has, take_in, waits_for
from tools.gpu.packing.pieces import MANIFEST, Contents, pack, read_manifest
from tools.gpu.packing.stand_ins import cutedsl_dual_gemm as stand_in
from tools.gpu.packing.stand_ins import flash_mla_interface

ROOT = Path(__file__).resolve().parents[2]
MOST = 64 << 10  # bytes of a piece
LARGE = random.Random(0).randbytes(150_000)  # a tar of three pieces
FILES = {"weights": LARGE, "more/config.json": b"{}"}
STOOD_FOR = "sglang/kernels/ops/gemm/cutedsl_dual_gemm.py"
LATENT = "sglang/kernels/ops/attention/flash_mla_interface.py"
NAMES = ["1-models.tar", "2-models.tar", "3-models.tar", "4-small.tar"]


class Made:
    """Parcels of made-up files, and how often each was filled."""

    def __init__(self) -> None:
        self.filled: list[str] = []

    def contents(self, name: str, files: dict[str, bytes], recipe: str = "") -> Contents:
        def fill(folder: Path) -> None:
            self.filled.append(name)
            for path, content in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)

        return Contents(name, recipe, fill)

    def pack(self, folder: Path, *contents: Contents) -> None:
        pack(contents, folder, MOST, lambda line: None)


def both(made: Made) -> tuple[Contents, Contents]:
    return made.contents("models", FILES), made.contents("small", {"one": b"1"})


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """A folder of pieces: three of `models`, one of `small`."""
    made = Made()
    made.pack(tmp_path / "pieces", *both(made))
    return tmp_path / "pieces"


def bring(sent: Path, call: Path, *names: str) -> Path:
    """Copy what one call carries: the manifest and these pieces."""
    call.mkdir()
    for name in (MANIFEST, *names):
        (call / name).write_bytes((sent / name).read_bytes())
    return call


def silent(line: str) -> None:
    """Drop the line."""


def test_no_piece_is_too_large_and_all_make_the_files_again(sent: Path, tmp_path: Path) -> None:
    assert sorted(file.name for file in sent.iterdir()) == [*NAMES, MANIFEST]
    sizes = [(sent / name).stat().st_size for name in NAMES]
    assert sizes[:2] == [MOST, MOST]
    assert max(sizes) <= MOST
    home, said = tmp_path / "home", list[str]()
    assert take_in(sent, home, said.append) == []
    assert said == ["models is installed", "small is installed"]
    for path, content in FILES.items():
        assert (home / "models" / path).read_bytes() == content
    assert (home / "small" / "one").read_bytes() == b"1"
    assert list((home / "pieces").iterdir()) == []


def test_packing_again_makes_only_what_is_not_there(sent: Path) -> None:
    made, before = Made(), (sent / MANIFEST).read_text()
    made.pack(sent, *both(made))
    assert made.filled == []
    (sent / "2-models.tar").write_bytes(b"x")
    made.pack(sent, *both(made))
    assert made.filled == ["models"]
    assert (sent / MANIFEST).read_text() == before
    made.pack(sent, made.contents("models", {"a": b""}, "shorter"), both(made)[1])
    assert made.filled == ["models", "models", "small"]  # its number is another one
    assert sorted(file.name for file in sent.glob("*.tar")) == ["1-models.tar", "2-small.tar"]


def test_packing_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    made, folder = Made(), tmp_path / "pieces"

    def cut_off(files: Path) -> None:
        raise DSparkError("no network")

    first, second = both(made)
    with pytest.raises(DSparkError, match="no network"):
        made.pack(folder, first, Contents("small", "", cut_off))
    made.pack(folder, first, second)
    assert made.filled == ["models", "small"]
    assert sorted(file.name for file in folder.iterdir()) == [*NAMES, MANIFEST]


def test_pieces_of_several_calls_are_kept_until_all_are_there(sent: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert take_in(bring(sent, tmp_path / "one", NAMES[1], NAMES[3]), home, silent) == []
    assert (has("models", home), has("small", home)) == (False, True)
    assert waits_for(["models", "small"], home) == ["1-models", "3-models"]
    assert take_in(bring(sent, tmp_path / "two", NAMES[0]), home, silent) == []
    assert waits_for(["models"], home) == ["3-models"]
    nothing = tmp_path / "nothing"  # a call with neither pieces nor manifest
    assert take_in(nothing, home, silent) == []
    third = bring(sent, tmp_path / "three", NAMES[2])
    (third / MANIFEST).unlink()  # known from the calls before
    assert take_in(third, home, silent) == []
    assert (home / "models" / "weights").read_bytes() == LARGE
    assert waits_for(["models"], home) == []


def test_a_damaged_piece_is_one_line_and_is_not_kept(sent: Path, tmp_path: Path) -> None:
    home, call = tmp_path / "home", bring(sent, tmp_path / "call", *NAMES)
    spoilt = bytearray((call / NAMES[1]).read_bytes())
    spoilt[7] ^= 1
    (call / NAMES[1]).write_bytes(spoilt)
    [said] = take_in(call, home, silent)
    assert said == "piece 2-models.tar is damaged or of another packing; send it again"
    assert (has("models", home), has("small", home)) == (False, True)
    assert waits_for(["models"], home) == ["2-models"]
    assert take_in(bring(sent, tmp_path / "again", NAMES[1]), home, silent) == []
    assert (home / "models" / "weights").read_bytes() == LARGE


def test_pieces_that_make_another_parcel_are_refused(sent: Path, tmp_path: Path) -> None:
    whole = read_manifest(sent)[0].sha256
    (sent / MANIFEST).write_text((sent / MANIFEST).read_text().replace(whole, 64 * "0"))
    [said] = take_in(sent, tmp_path / "home", silent)
    assert "the pieces of models" in said
    assert said.endswith("pack it and send all of them again")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == [
        MANIFEST,
        "pieces",
        "small",
    ]


def test_a_parcel_packed_anew_takes_the_place_of_the_old_one(sent: Path, tmp_path: Path) -> None:
    home, made = tmp_path / "home", Made()
    take_in(sent, home, silent)
    made.pack(sent, made.contents("models", {"weights": b"new"}, "new"))
    assert take_in(sent, home, silent) == []
    assert (home / "models" / "weights").read_bytes() == b"new"
    assert not (home / "models" / "more").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "came without manifest.json; send it too"),
        ("{", "manifest.json is damaged; delete it and pack or send it again"),
    ],
)
def test_pieces_without_a_good_manifest_are_one_line(
    sent: Path, tmp_path: Path, content: str | None, said: str
) -> None:
    (sent / MANIFEST).unlink()
    if content is not None:
        (sent / MANIFEST).write_text(content)
    [line] = take_in(sent, tmp_path / "home", silent)
    assert line.endswith(said)
    assert not (tmp_path / "home").exists()


def wheel(folder: Path, name: str, files: dict[str, str], tag: str = "py3-none-any") -> Path:
    """A wheel of version 1 with these files."""
    about = f"{name.replace('-', '_')}-1.dist-info"
    files = files | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    listed = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    path = folder / f"{name.replace('-', '_')}-1-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in (files | {f"{about}/RECORD": listed}).items():
            archive.writestr(member, content)
    return path


def packages(tmp_path: Path, tag: str = "py3-none-any") -> Path:
    """Pieces of the parcel `sglang`, of two small wheels."""
    made, files = Made(), {}
    for module in ("sglang", "beside"):
        file = wheel(tmp_path, module, {f"{module}/__init__.py": "VALUE = 7\n"}, tag)
        files[file.name] = file.read_bytes()
    made.pack(tmp_path / "pieces", made.contents("sglang", files))
    return tmp_path / "pieces"


def test_wheels_are_imported_from_where_they_were_installed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert environment(home) == {}
    assert take_in(packages(tmp_path), home, silent) == []
    code = (
        "import sglang, beside\nfrom importlib.metadata import distribution, entry_points\n"
        "print(sglang.__file__, sglang.VALUE + beside.VALUE)\n"
        "print(distribution('sglang-dspark').locate_file(''))\n"
        "print([e.value for e in entry_points(group='sglang.srt.plugins', name='dspark')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment(home)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines() == [
        f"{home / 'sglang' / 'sglang' / '__init__.py'} 14",
        str(home / "plugin"),
        "['sglang_dspark.plugin:register']",
    ], done.stderr
    assert (home / "plugin" / f"sglang_dspark-{__version__}.dist-info").is_dir()


def test_wheels_of_another_python_are_one_line(tmp_path: Path) -> None:
    [line] = take_in(packages(tmp_path, "cp27-cp27m-any"), tmp_path / "home", silent)
    assert line.startswith("sglang cannot be installed (ERROR: ")
    assert line.endswith(f"--python {sys.version_info.major}.{sys.version_info.minor}")
    assert environment(tmp_path / "home") == {}


def test_what_a_server_does_not_need_stays_out_of_its_wheel(tmp_path: Path) -> None:
    files = {"sglang/a.py": "", "sglang/multimodal_gen/runtime/b.py": "", "sglang/c/d.json": "{}"}
    files |= {STOOD_FOR: "import cutlass\n", LATENT: "import flash_mla\n"}
    whole = wheel(tmp_path, "sglang", files)
    (tmp_path / "out").mkdir()
    thinned = wheels.thin("sglang", whole, tmp_path / "out")
    with zipfile.ZipFile(thinned) as archive:
        members = archive.namelist()
        record = archive.read("sglang-1.dist-info/RECORD").decode()
        sent = archive.read(STOOD_FOR).decode()
    left = {"sglang/a.py", "sglang/c/d.json", STOOD_FOR, LATENT}
    assert {name for name in members if not name.startswith("sglang-1.")} == left
    assert {line.split(",")[0] for line in record.splitlines()} == set(members)
    assert f"{STOOD_FOR},,\n" in record
    assert sent == Path(stand_in.__file__).read_text()


def test_a_wheel_without_the_file_of_a_stand_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match=f"has no {LATENT} any more"):
        wheels.thin("sglang", wheel(tmp_path, "sglang", {"sglang/a.py": ""}), tmp_path)


def test_another_stand_in_is_another_parcel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.py"
    recipes = set()
    for stood_for, text in ((STOOD_FOR, ""), (STOOD_FOR, "A = 1\n"), (LATENT, "A = 1\n")):
        other.write_text(text)
        monkeypatch.setattr(wheels, "STAND_INS", {"sglang": {stood_for: other}})
        recipes.add(wheels.recipe(wheels.read_pins(), "3.12"))
    assert len(recipes) == 3


def sglang_package() -> Path:
    """Return SGLang's folder; skip the test if it is not installed."""
    found = find_spec("sglang")
    if found is None or found.origin is None:
        pytest.skip("SGLang is not installed")
    return Path(found.origin).parent


def test_the_stand_ins_have_what_sglang_asks_for() -> None:
    """Read from its source, as on a machine without CuTe DSL nothing of it imports."""
    package = sglang_package()
    for stood_for, asking, answering in (
        (STOOD_FOR, "srt/layers/dual_gemm.py", stand_in),
        (LATENT, "srt/layers/attention/flashmla_backend.py", flash_mla_interface),
    ):
        module = stood_for.removesuffix(".py").replace("/", ".")
        asked = {
            name.name
            for node in ast.walk(ast.parse((package / asking).read_text()))
            if isinstance(node, ast.ImportFrom) and node.module == module
            for name in node.names
        }
        assert asked
        assert all(hasattr(answering, name) for name in asked)
    source = ast.parse((package.parent / STOOD_FOR).read_text())
    [modes] = [
        n for n in ast.walk(source) if isinstance(n, ast.ClassDef) and n.name == "DualGemmQuantMode"
    ]
    values = {
        line.targets[0].id: line.value.value
        for line in modes.body
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Constant)
    }
    assert values == {mode.name: mode.value for mode in stand_in.DualGemmQuantMode}
    assert not stand_in.can_use_dual_gemm(1, 128, 128, stand_in.DualGemmQuantMode.UNQUANT)


def pin(name: str, file: Path) -> wheels.Pin:
    return wheels.Pin(name, "1", (hashlib.sha256(file.read_bytes()).hexdigest(),))


def test_a_wheel_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    one, two = (
        wheel(tmp_path, "one", {}),
        wheel(tmp_path, "two", {}, "cp312-cp312-manylinux1_x86_64"),
    )
    pins = pin("one", one), pin("two", two)
    assert wheels.obtain(pins, tmp_path, "3.12") == {"one": one, "two": two}
    for python, damage in (("3.11", b""), ("3.12", b"x")):
        two.write_bytes(two.read_bytes() + damage)
        with pytest.raises(DSparkError) as refused:
            wheels.obtain(pins, tmp_path, python)
        assert "\n" not in str(refused.value)
        assert "two==1" in str(refused.value)


@pytest.mark.parametrize("line", ["one==1", "one --hash=sha256:" + 64 * "0"])
def test_a_pin_without_version_or_digest_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "wheels.txt").write_text(f"# list\n{line}\n")
    with pytest.raises(DSparkError, match="line 2: write NAME==VERSION"):
        wheels.read_pins(tmp_path / "wheels.txt")


def test_the_pins_are_the_locks() -> None:
    """All but SGLang's kernels, whose version goes by the machine's torch."""
    locked = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = wheels.read_pins()
    assert len(pins) > 40
    odd = [each.name for each in pins if f"{each.name}=={each.version}" not in locked]
    assert odd == ["sglang-kernel"]
    assert set(wheels.LEFT_OUT) <= {each.name for each in pins}


def test_an_unknown_python_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "tools" / "gpu" / "pack", "--python", "2.7", "--out", tmp_path / "pieces"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "invalid choice: '2.7'" in done.stderr
    assert not (tmp_path / "pieces").exists()


def test_pieces_of_no_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="hold nothing"):
        pack([], tmp_path, 0, silent)
    assert read_manifest(tmp_path) == ()
