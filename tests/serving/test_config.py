"""`DSparkConfig`: defaults, files, the origin of each value, and one line for each fault."""

from __future__ import annotations

import json
from pathlib import Path

import pydantic
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.serving.config import (
    CONFIG_VARIABLE,
    DSparkConfig,
    current_config,
    load_config,
    use_config_file,
)

LEAVES = {
    "cpu.threads",
    "cpu.matrix_kernel",
    "cpu.weights",
    "cpu.activations",
    "cpu.overlap",
    "schedule.mode",
    "verify.rule",
    "verify.window_kernel",
    "requests.answers",
    "requests.logprobs",
    "upstream_fixes",
    "schedule.algorithm",
    "schedule.profile_seconds",
    "schedule.step_log",
    "schedule.fairness_floor",
    "schedule.speed_target",
    "schedule.threshold",
    "schedule.min_acceptance",
}


@pytest.fixture(autouse=True)
def _no_ambient_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "")


def write(tmp_path: Path, text: str, name: str = "dspark.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_defaults_need_no_file() -> None:
    loaded = load_config()
    assert loaded.path is None
    assert loaded.config == DSparkConfig()
    assert set(loaded.origins) == LEAVES
    assert set(loaded.origins.values()) == {"default"}


def test_yaml_values_and_their_origins(tmp_path: Path) -> None:
    path = write(tmp_path, "cpu:\n  threads: 3\n")
    loaded = load_config(path)
    assert loaded.config.cpu.threads == 3
    assert loaded.config.cpu.matrix_kernel is True
    expected = dict.fromkeys(LEAVES, "default") | {"cpu.threads": f"file {path}"}
    assert loaded.origins == expected


@pytest.mark.parametrize("written", ["off", "'off'", "no"])
def test_a_bare_off_is_no_boolean(tmp_path: Path, written: str) -> None:
    path = write(tmp_path, f"schedule: {{mode: {written}}}\n")
    assert load_config(path).config.schedule.mode == "off"


def test_a_threshold_stands_alone(tmp_path: Path) -> None:
    assert (
        load_config(write(tmp_path, "schedule: {threshold: 0.5}")).config.schedule.threshold == 0.5
    )
    for other in ("mode: static", "fairness_floor: 1", "speed_target: 9.0"):
        path = write(tmp_path, f"schedule: {{threshold: 0.5, {other}}}", f"{other[:4]}.yaml")
        with pytest.raises(
            DSparkError, match="threshold needs mode auto, no fairness_floor and no"
        ):
            load_config(path)


def test_algorithm_1_needs_our_scheduler(tmp_path: Path) -> None:
    assert DSparkConfig().schedule.algorithm == "search"
    path = write(tmp_path, "schedule: {algorithm: early-stop, fairness_floor: 1}")
    assert load_config(path).config.schedule.algorithm == "early-stop"
    for other in ("mode: static", "mode: off", "threshold: 0.5"):
        path = write(tmp_path, f"schedule: {{algorithm: early-stop, {other}}}", f"{other[6:]}.yaml")
        with pytest.raises(
            DSparkError, match="algorithm early-stop needs mode auto and no threshold"
        ):
            load_config(path)


def test_json_is_read_too(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"cpu": {"matrix_kernel": False}}), "dspark.json")
    assert load_config(path).config.cpu.matrix_kernel is False


def test_the_variable_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(write(tmp_path, "cpu: {threads: 2}")))
    assert current_config().cpu.threads == 2


def test_use_config_file_passes_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "cpu: {threads: 5}", "here.yaml")
    monkeypatch.chdir(tmp_path)
    use_config_file(Path("here.yaml"))
    monkeypatch.chdir("/")  # a child may run elsewhere: the name passed on is absolute
    assert current_config().cpu.threads == 5


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n")).config == DSparkConfig()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "cpu: {thread: 3}",
            "field cpu.thread; known here: activations, matrix_kernel, overlap, threads, weights",
        ),
        ("gpu: {}", "unknown field gpu; known here: cpu"),
        ("cpu: {threads: 0}", "field cpu.threads: Input should be greater than or equal to 1"),
        ("cpu: {threads: two}", "field cpu.threads: Input should be a valid integer"),
        ("cpu: {matrix_kernel: 'yes'}", "field cpu.matrix_kernel: Input should be a valid boolean"),
        ("cpu: 3", "field cpu:"),
        ("cpu: {weights: int8, matrix_kernel: false}", "weights int8 needs matrix_kernel"),
        (
            "schedule: {algorithm: early_stop}",
            "field schedule.algorithm: Input should be 'search' or 'early-stop'",
        ),
        ("- cpu", "must be a mapping of field names, not a list"),
        ("cpu: [", "is neither YAML nor JSON"),
        ("\x00", "is neither YAML nor JSON"),
        ("cpu: {threads: 2}\ncpu: {threads: 3}", "the field cpu stands twice"),
        (
            "schedule: {speed_target: .inf}",
            "speed_target: Input should be a finite number",
        ),
        (
            "schedule: {speed_target: .nan}",
            "speed_target: Input should be a finite number",
        ),
        ("schedule: {speed_target: 1.0e+300}", "should be less than or equal to 1000000"),
        ("schedule: {profile_seconds: 1.0e+300}", "should be less than or equal to 600"),
        ("schedule: {fairness_floor: 999999999999999999999}", "less than or equal to 255"),
        ("cpu: {threads: " + "9" * 400 + "}", "an integer of 400 digits"),
        ("[" * 100_000, "nested deeper than 64"),
    ],
)
def test_each_fault_is_one_line_with_the_file(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(DSparkError) as raised:
        load_config(path)
    message = str(raised.value)
    assert says in message
    assert str(path) in message
    assert "\n" not in message


def test_a_missing_file_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match=r"cannot be read .*check --dspark-config"):
        load_config(tmp_path / "gone.yaml")


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(pydantic.ValidationError):
        current_config().cpu.threads = 4  # type: ignore[misc]


def test_a_minimum_of_acceptance_needs_our_scheduler(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, "schedule: {min_acceptance: 0.2, threshold: 0.1}"))
    assert loaded.config.schedule.min_acceptance == 0.2
    for number, text in enumerate(("0.0", "1.0", ".nan", "0.2, mode: static", "0.2, mode: off")):
        with pytest.raises(DSparkError, match="min_acceptance"):
            load_config(write(tmp_path, f"schedule: {{min_acceptance: {text}}}", f"{number}.yaml"))
