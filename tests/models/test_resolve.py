"""A model by name, as a user meets it: through the real client of Hugging Face, against a cache in
a temporary folder and a hub on the loopback. Each call is a process of its own, since the client
reads its environment when it is imported.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.models.drafters import DEMO_DRAFTER, find_drafter, shipped_drafter_path
from sglang_dspark.models.resolve import model_name, offline_if_unreachable, resolve
from tests.models.hub import SHA, Hub, serving

WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "merges.txt": b"a b",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "training_args.bin": b"a pickle",
    "consolidated.safetensors": b"the same again",
    "modeling.py": b"code",
    "original/model.safetensors": b"the same again",
}
CODE = (
    "import sys\n"
    "from sglang_dspark.errors import DSparkError\n"
    "from sglang_dspark.models.resolve import resolve\n"
    "try:\n    print(resolve(sys.argv[1]))\n"
    "except DSparkError as error:\n    print(error, file=sys.stderr)\n    sys.exit(1)\n"
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({"org/model": FILES})) as started:
        yield started


def call(name: str, home: Path, hub: Hub | None = None) -> subprocess.CompletedProcess[str]:
    """`resolve` with its cache in `home`, of the hub, or offline."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    kept |= {"HOME": str(home), "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    kept |= {"HF_ENDPOINT": hub.url} if hub else {"HF_HUB_OFFLINE": "1"}
    kept["HF_HUB_DISABLE_XET"] = "1"
    return subprocess.run(
        [sys.executable, "-c", CODE, name],
        env=kept,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=600,
    )


def refused(name: str, home: Path, hub: Hub | None = None) -> str:
    """The line that refuses it; progress bars, which end in a carriage return, are not it."""
    done = call(name, home, hub)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1].rpartition("\r")[2]
    assert name in line
    return line


def snapshot(home: Path, *files: str, revision: str = "main") -> Path:
    """The cache as the client leaves it, with these files of the model."""
    model = home / "hub" / "models--org--model"
    folder = model / "snapshots" / SHA
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / revision).write_text(SHA)
    for name in files:
        (folder / name).write_bytes(FILES.get(name, b"{}"))
    return folder


def test_a_folder_wins(tmp_path: Path) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    done = call("org/model", tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "org/model")
    assert resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["/no/where", "./org/model", "../x", "~/org", "org/model/", "x"])
def test_what_looks_like_a_path_is_a_missing_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DSparkError, match=r"there is no such folder; .*OWNER/NAME"):
        resolve(name)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(DSparkError, match="weights is a file; name the model's folder"):
        resolve(tmp_path / "weights")


def test_it_is_fetched_without_pickles_and_kept(tmp_path: Path, hub: Hub) -> None:
    done = call("org/model", tmp_path, hub)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {file.name for file in folder.iterdir()} == set(list(FILES)[:6])
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "pytorch_model.bin" not in " ".join(hub.asked)
    assert "%" in done.stderr, "progress is shown"
    assert call("org/model", tmp_path).stdout == done.stdout, "offline, from the cache"
    assert model_name(folder) == f"org/model@{SHA[:8]}"


def test_a_revision(tmp_path: Path, hub: Hub) -> None:
    assert call("org/model@v1", tmp_path, hub).returncode == 0
    assert "api/models/org/model/revision/v1" in hub.asked
    assert "no revision v2" in refused("org/model@v2", tmp_path, hub)


def test_unknown_gated_and_closed(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/gated"] = FILES
    hub.gated.add("org/gated")
    hub.closed.add("org/closed")
    assert "Hugging Face knows none" in refused("org/none", tmp_path, hub)
    assert "HF_TOKEN" in refused("org/closed", tmp_path, hub)
    assert "its owner must let you in" in refused("org/gated", tmp_path, hub)


def test_offline_and_not_in_the_cache(tmp_path: Path, hub: Hub) -> None:
    assert "the hub cannot be reached" in refused("org/model", tmp_path)
    gone = Hub({}, url="http://127.0.0.1:9")  # the discard port: no listener
    assert "the hub cannot be reached" in refused("org/model", tmp_path, gone)


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a port that refuses connections, without proxies."""
    for proxy in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.delenv("all_proxy", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def test_a_hub_without_connection_is_offline(
    hub: Hub, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    faulty = ("hf-mirror.com", "https://h:99999", "http://a..b")  # for the client to report
    for address in (hub.url, dead, *faulty):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with offline_if_unreachable():
            assert (address == dead) == constants.HF_HUB_OFFLINE, address
        assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "ENDPOINT", dead)
    for proxy in ("http_proxy", "all_proxy"):
        with monkeypatch.context() as within:
            within.setenv(proxy, dead)
            with offline_if_unreachable():
                assert not constants.HF_HUB_OFFLINE, "a proxy may reach what this machine cannot"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    with offline_if_unreachable():
        assert constants.HF_HUB_OFFLINE, "as the user chose"
    assert constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("name", ["org/model", f"org/model@{SHA}"])
def test_a_hub_without_connection_is_not_waited_for(
    name: str, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own six attempts for a commit's file list are 23 seconds of waiting."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", dead)
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    with pytest.raises(DSparkError, match="the hub cannot be reached"):
        resolve(name)
    assert waits == []


def test_a_download_cut_short_is_not_believed(tmp_path: Path, hub: Hub) -> None:
    hub.cut.add("model.safetensors")
    assert "run again" in refused("org/model", tmp_path, hub)
    assert not list(tmp_path.rglob("snapshots/*/model.safetensors"))
    assert "run again with a network" in refused("org/model", tmp_path), "offline, from the cache"
    hub.cut.clear()
    done = call("org/model", tmp_path, hub)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_cache_without_a_listing_is_checked(tmp_path: Path) -> None:
    """As another tool, or an earlier version of the client, leaves it."""
    folder = snapshot(tmp_path, "config.json")
    assert "no safetensors weights" in refused("org/model", tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(WEIGHTS)
    assert "lacks model-2.safetensors" in refused("org/model", tmp_path)
    (folder / "model.safetensors.index.json").write_text("{")
    assert "index.json of org/model cannot be read" in refused("org/model", tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-2.safetensors").write_bytes(WEIGHTS)
    assert call("org/model", tmp_path).stdout.strip() == str(folder)
    (folder / "config.json").unlink()
    assert "lacks config.json" in refused("org/model", tmp_path)


def test_drafters_have_shipped_names_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_drafter(DEMO_DRAFTER) == shipped_drafter_path()
    (tmp_path / DEMO_DRAFTER).mkdir()
    assert find_drafter(DEMO_DRAFTER) == Path(DEMO_DRAFTER)
    with pytest.raises(DSparkError, match="none ships under that name"):
        find_drafter("other")
    with pytest.raises(DSparkError, match=r"no model at \./other: there is no such folder"):
        find_drafter("./other")
