"""`dspark sweep --url`: servers that run already become a sweep, or one line says why not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from sglang_dspark import extras
from sglang_dspark.cli.report import write_sweep_report
from sglang_dspark.cli.sweep import prepare, sweep
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.ask import Served, ask_server
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep.config import load_sweep
from sglang_dspark.loadtest.sweep.served import Address, parse_address, parse_users, sweep_of
from sglang_dspark.loadtest.sweep.setup import gamma_of
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 300.0
PLAIN = Served("http://127.0.0.1:1", "m", "m", "", 0, "cpu", False)
MTP = replace(PLAIN, url="http://127.0.0.1:2", algorithm="EAGLE", drafts=1)
DSPARK = replace(
    PLAIN, url="http://127.0.0.1:3", algorithm="DSPARK", drafts=5, metrics=True, device="cuda"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a sweep reads of a target."""
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    return folder


@contextmanager
def running(target: Path, *arguments: str) -> Iterator[str]:
    """Run the stub of an SGLang server; yield its address."""
    port = free_ports(1)
    command = [sys.executable, "-m", "tests.loadtest.sweep_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model-path", str(target), *arguments]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + LONG_S
        while not _up(url):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield url
    finally:
        server.kill()
        server.wait()


def _up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def answering(status: int, body: bytes, path: str = "/server_info") -> Iterator[str]:
    """A server that answers one path so, and 404 to all others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == path
            self.send_response(status if known else 404)
            self.end_headers()
            self.wfile.write(body if known else b"no such page")

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def told(**other: Any) -> bytes:
    """A server's information."""
    fields = {
        "model_path": "m",
        "tokenizer_path": None,
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        "device": "cuda",
        "enable_metrics": True,
        "is_embedding": False,
    }
    return json.dumps({**fields, **other}).encode()


def swept(folder: Path, *urls: str) -> subprocess.CompletedProcess[str]:
    """`dspark sweep` of these servers with one and two users, in `folder`/run."""
    command = [sys.executable, "-m", "sglang_dspark.cli.main", "sweep"]
    command += [word for url in urls for word in ("--url", url)]
    command += ["--concurrency", "1,2", "--trials", "1", "--seconds", "1", "--out", "run"]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("boom", r"no request came through: \d+ error \(boom\)"),
        ("uncounted", r"\d+ malformed \(the server counts no tokens in its stream: it sends nei"),
    ],
)
def test_answers_that_do_not_count_end_the_sweep(
    tmp_path: Path, target: Path, form: str, said: str
) -> None:
    """With the reason, and without the name of a log that nothing writes."""
    with running(target, f"--form={form}", "--step=0.005") as url:
        done = swept(tmp_path, url)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "the pilot on plain failed" in line]
    assert re.search(said, line)
    assert line.endswith(f"; see the log of the server at {url}")
    assert "plain.log" not in done.stdout + done.stderr


def test_answers_in_one_chunk_have_throughput_and_a_reason(tmp_path: Path, target: Path) -> None:
    with running(target, "--form=whole", "--step=0.005") as url:
        done = swept(tmp_path, url)
    assert done.returncode == 0, done.stderr
    reason = "the server sends whole answers in one chunk: no speed per user can be measured; "
    (early, late) = [line for line in done.stderr.splitlines() if reason in line]
    assert early == f"    {reason}throughput is"
    assert late.endswith("throughput is (so in 2 of 2 cells of plain)")
    assert "per user" not in early.replace(reason, "")
    assert "0.0 per user" not in done.stderr
    summary = run_dir.read_summary(tmp_path / "run")
    if any(level.trials == 0 for level in summary.levels):
        return  # the machine is busy and the client was late
    assert all(level.tokens_per_s and level.speed_p50 is None for level in summary.levels)
    page = tmp_path / "run" / "report.html"
    write_sweep_report(tmp_path / "run", page)
    assert reason in page.read_text()


@pytest.mark.slow
def test_short_answers_that_loop_are_named(tmp_path: Path, target: Path) -> None:
    with running(target, "--form=short", "--step=0.005") as url:
        done = swept(tmp_path, url)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"answers are short: 2 of \d+ tokens asked for", done.stderr)) == 2
    assert "again and again" not in done.stderr  # two characters are no loop
    with running(target, "--step=0.002") as url:
        (tmp_path / "other").mkdir()
        done = swept(tmp_path / "other", url)
    found = re.findall(r"(\d+) of (\d+) answers end in one piece of text again", done.stderr)
    assert found
    assert all(some == every for some, every in found)
    assert "answers are short" not in done.stderr


def test_two_servers_are_swept_without_a_file(tmp_path: Path, target: Path) -> None:
    drafting = ["--speculative-algorithm=DSPARK", "--speculative-num-draft-tokens=3"]
    with running(target) as plain, running(target, *drafting, "--enable-metrics") as dspark:
        done = swept(tmp_path, plain, f"{dspark}/")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    info, cells = run_dir.read_run(run), run_dir.read_cells(run)
    assert [(arm.name, arm.gamma) for arm in info.arms] == [("plain", 0), ("dspark", 2)]
    assert info.arms[0].command == plain
    assert info.arms[1].command == f"{dspark} {' '.join(drafting)}"
    assert info.ended is not None
    assert sorted(cell.name for cell in cells) == sorted(
        f"{arm}-closed-{users}-0" for arm in ("plain", "dspark") for users in (1, 2)
    )
    assert all((cell.ok, cell.failures) == (cell.requests, {}) for cell in cells)
    summary = run_dir.read_summary(run)
    assert (summary.matched[0].over, summary.matched[0].under) == ("dspark", "plain")
    assert "too few to tell" in summary.verdict or "No winner" in summary.verdict
    page = run / "report.html"
    if all(not cell.void for cell in cells):  # beside a busy neighbour the client may be late
        assert page in write_sweep_report(run, page)


def test_a_server_is_asked(target: Path) -> None:
    with running(target) as url:
        assert ask_server(url) == Served(url, str(target), str(target), "", 0, "cpu", False)
    drafting = told(speculative_algorithm="EAGLE", speculative_num_draft_tokens=4)
    with answering(200, drafting, "/get_server_info") as url:
        assert ask_server(url) == Served(url, "m", "m", "EAGLE", 3, "cuda", True)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, b"", r"neither SGLang's nor OpenAI-compatible .*/v1/models answer 404"),
        (200, b"<html>", "neither SGLang's nor OpenAI-compatible .*answers no JSON object"),
        (200, b"[1]", "answers no JSON object"),
        (200, b'{"version": "1"}', "its answer lacks SGLang's fields"),
        (200, told(model_path=None), "its answer lacks SGLang's fields"),
        (200, told(speculative_algorithm="NEW"), "its answer lacks SGLang's fields"),
        (200, told(is_embedding=True), "serves embeddings, no text"),
        (401, b"", "wants a key"),
    ],
)
def test_what_is_no_server_to_sweep_is_one_line(status: int, body: bytes, said: str) -> None:
    with answering(status, body) as url, pytest.raises(DSparkError, match=said) as error:
        ask_server(url)
    assert "\n" not in str(error.value)
    assert url in str(error.value)


def test_silence_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"http://127.0.0.1:{free_ports(1)}"
    with pytest.raises(DSparkError, match=f"no server answers at {url} .*correct --url"):
        sweep(url=[url], out=Path("run"))
    with pytest.raises(DSparkError, match=r"is no address|no server answers"):
        ask_server("http://127.0.0.1:999999")
    assert not Path("run").exists()


def test_arms_name_themselves() -> None:
    servers = [DSPARK, PLAIN, MTP]
    config, arms = sweep_of([Address("", each.url) for each in servers], servers)
    assert config.names == ["dspark", "plain", "eagle"]
    assert [gamma_of(arm, {}) for arm in arms] == [5, 0, 1]
    assert config.baseline == "plain"
    assert config.compare is not None
    assert (config.compare.over, config.compare.under) == ("dspark", "plain")
    assert config.urls == {"dspark": DSPARK.url, "plain": PLAIN.url, "eagle": MTP.url}
    assert (config.api, config.trials, config.concurrency) == ("chat", 3, [1, 2, 4, 8])
    assert config.device == "cuda"

    named = [Address("old", MTP.url), Address("new", DSPARK.url)]
    config, _ = sweep_of(named, [MTP, DSPARK])
    assert (config.names, config.baseline) == (["old", "new"], "old")
    config, _ = sweep_of(named[:1], [MTP])
    assert (config.baseline, config.compare, config.device) == ("old", None, "cpu")


def test_prompts_are_rendered_where_the_template_is(target: Path) -> None:
    served = replace(PLAIN, model="owner/name", tokenizer=str(target))
    config, _ = sweep_of([Address("", served.url)], [served])
    assert (config.api, config.target) == ("completions", str(target))
    config, _ = sweep_of([Address("", served.url)], [replace(served, tokenizer="owner/name")])
    assert (config.api, config.target) == ("chat", "owner/name")


def test_servers_that_cannot_be_compared_are_refused(target: Path) -> None:
    def refuses(said: str, *served: Served, names: tuple[str, ...] = ("", "")) -> None:
        addresses = [Address(n, each.url) for n, each in zip(names, served, strict=False)]
        with pytest.raises(DSparkError, match=said):
            sweep_of(addresses, served)

    refuses(
        "serves the model m and http://127.0.0.1:3 other", PLAIN, replace(DSPARK, model="other")
    )
    refuses("the tokenizer m and .* other", PLAIN, replace(DSPARK, tokenizer="other"))
    refuses("two servers are 'plain'; name them", PLAIN, replace(PLAIN, url=MTP.url))
    refuses("two servers are 'a'; name them", PLAIN, MTP, names=("a", "a"))
    refuses("names http://127.0.0.1:1 twice", PLAIN, replace(PLAIN, algorithm="EAGLE"))
    refuses("start it with --enable-metrics", PLAIN, replace(DSPARK, metrics=False))
    two_ways = replace(PLAIN, model=str(target / ".." / target.name), tokenizer=str(target))
    same = replace(MTP, model=str(target), tokenizer=str(target))
    assert sweep_of([Address("", "x"), Address("", "y")], [two_ways, same])[0].names == [
        "plain",
        "eagle",
    ]


def test_what_is_typed_is_read_or_refused() -> None:
    assert parse_address("http://h:1/?a=b/") == Address("", "http://h:1/?a=b")
    assert parse_address("mine-2=http://h:1/") == Address("mine-2", "http://h:1")
    for text in ("h:1", "mine=h:1", "=h", ""):
        with pytest.raises(DSparkError, match="is no address"):
            parse_address(text)
    for text in ("My=http://h:1", "a b=http://h:1", "-a=http://h:1"):
        with pytest.raises(DSparkError, match="an arm's name is of a-z"):
            parse_address(text)
    assert parse_users("1,2, 8") == [1, 2, 8]
    for text in ("", "0,1", "2,1", "1,1", "1,x", "1.5"):
        with pytest.raises(DSparkError, match="ascending, as 1,2,4,8"):
            parse_users(text)


@pytest.mark.parametrize("url", ["http://me:secret@h:1", "https://secret@h/v1", "me:secret@h:1"])
def test_credentials_in_an_address_are_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(json.dumps({"arms": ["plain"], "urls": {"plain": url}, "concurrency": [1]}))
    for attempt in (
        lambda: sweep(url=[url]),
        lambda: parse_address(f"mine={url}"),
        lambda: load_sweep(path),
    ):
        with pytest.raises(DSparkError, match=r"leave it out, .* a key cannot be given") as error:
            attempt()
        assert "secret" not in str(error.value)
        assert "\n" not in str(error.value)


def test_an_at_sign_behind_the_host_is_no_credential() -> None:
    assert parse_address("http://h:1/a@b").url == "http://h:1/a@b"


def test_one_of_file_and_servers_is_wanted() -> None:
    for config, url in ((None, None), (Path("cpu-demo"), ["http://h:1"])):
        with pytest.raises(DSparkError, match="name a sweep with --config, or servers"):
            sweep(config=config, url=url)
    with pytest.raises(DSparkError, match="--smoke is of a sweep's file"):
        sweep(url=["http://h:1"], smoke=True)


def test_a_library_that_the_load_needs_is_missed_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Locust runs in a process of its own, which would miss it after the warm-up."""
    monkeypatch.setattr(extras, "not_installed", lambda extra: ["gevent", "locust"])
    said = r"gevent, locust not installed: pip install '\.\[loadtest\]' in a checkout"
    config: Any = None  # not looked at
    with pytest.raises(DSparkError, match=said):
        prepare(Console(), config, [], tmp_path)
