"""The arms of a comparison: one YAML file per server, all else equal.

An arm's file (`configs/serve/*.yaml`) holds the settings of its server alone: drafter, flags, this
package's configuration, environment. The sweep sets target, device, port and memory, the same for
all arms, so that two arms differ only by what their files show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import fault, load_yaml, wrong_fields
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.server import ServerSpec
from sglang_dspark.loadtest.servers.workload import device_flags

# Flags that the sweep sets for every arm alike.
_SHARED = (
    "--model-path",
    "--host",
    "--port",
    "--device",
    "--dtype",
    "--speculative-draft-model-path",
    "--speculative-token-map",
    "--dspark-config",
)
_KEYS = ("--api-key", "--admin-api-key")


def _without_keys(flags: list[str]) -> list[str]:
    for flag in (each.partition("=")[0] for each in flags):
        # argparse accepts a shortened flag too
        if len(flag) > 2 and any(key.startswith(flag) for key in _KEYS):
            raise ValueError(
                f"leave {flag} out: load is sent without a key, and a run's folder keeps flags"
            )
    return flags


ServerFlags = Annotated[list[str], AfterValidator(_without_keys)]


class Arm(BaseModel):
    """One server of a comparison."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="the file's, unless given")
    about: str = Field(description="what the report says of it")
    drafter: str | None = Field(
        None, description="which of the sweep's drafters (`dspark`, `mtp`); null: no speculation"
    )
    arguments: ServerFlags = Field([], description="flags of its own, as --flag=value")
    config: dict[str, Any] = Field({}, description="content of the server's configuration file")
    environment: dict[str, str] = Field({}, description="variables of its own")
    device: Literal["any", "cuda"] = Field("any", description="cuda: refuses a CPU")

    @model_validator(mode="after")
    def _only_its_own(self) -> Arm:
        for argument in self.arguments:
            flag = argument.partition("=")[0]
            if not flag.startswith("--"):
                raise ValueError(f"write {argument!r} as --flag=value")
            if flag in _SHARED:
                raise ValueError(f"{flag} is set by the sweep, for all arms alike")
        speculates = any("--speculative-algorithm" in each for each in self.arguments)
        if speculates != (self.drafter is not None):
            raise ValueError("a drafter and --speculative-algorithm come together")
        return self

    def server(
        self,
        target: Path,
        drafters: Mapping[str, Path],
        port: int,
        device: str,
        run_dir: Path,
        shared: Sequence[str] = (),
    ) -> ServerSpec:
        """Build the server's launch. drafters: directories by kind; shared: flags of every arm.

        The package's configuration is written to `run_dir`. Raises DSparkError if the device or
        the drafter is missing.
        """
        if self.device == "cuda" and device == "cpu":
            raise DSparkError(f"arm {self.name} needs a GPU; leave it out of a sweep on the CPU")
        flags = [*device_flags(device), *shared, "--enable-metrics", *self.arguments]
        environment = dict(self.environment)
        if self.drafter is not None:
            flags += _drafter_flags(self.name, self.drafter, drafters)
        if self.config:
            path = run_dir.absolute() / f"{self.name}-dspark.json"
            text = json.dumps(self.config, indent=2) + "\n"
            replace_text(path, text, "the configuration of an arm")
            environment["SGLANG_DSPARK_CONFIG"] = str(path)
        return ServerSpec(self.name, target, port, tuple(flags), environment=environment)


def load_arm(path: Path) -> Arm:
    """Read an arm; its name is the file's. Raises DSparkError naming file and field."""
    try:
        values = load_yaml(path)
    except OSError as error:
        raise DSparkError(f"cannot read the arm {path}: {fault(error)}") from None
    except ValueError as error:
        raise DSparkError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise DSparkError(f"{path} must be a mapping of an arm's fields")
    try:
        return Arm.model_validate({"name": path.stem, **values})
    except ValidationError as error:
        raise DSparkError(f"{path}: {wrong_fields(error, Arm)}") from None


def find_arms(names: Sequence[str], folder: Path) -> list[Arm]:
    """Load arms by name from a folder of files, or by path if the name ends in .yaml.

    Raises DSparkError for an unknown or repeated name, listing the known ones.
    """
    if len(set(names)) < len(names):
        raise DSparkError(f"an arm is named twice in {', '.join(names)}")
    arms = []
    for name in names:
        path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml"))) or "nothing"
            raise DSparkError(f"no arm {name!r} at {path}; {folder} holds {known}")
        arms.append(load_arm(path))
    return arms


def _drafter_flags(arm: str, kind: str, drafters: Mapping[str, Path]) -> list[str]:
    from sglang_dspark.families.mtp.checkpoint import TOKEN_MAP  # imports torch

    if kind not in drafters:
        known = ", ".join(drafters) or "none"
        raise DSparkError(f"arm {arm} needs a drafter {kind!r}; the sweep names {known}")
    folder = drafters[kind]
    if not (folder / "config.json").is_file():
        raise DSparkError(f"drafter {kind!r} of arm {arm} is not at {folder} (no config.json)")
    token_map = folder / TOKEN_MAP  # of a drafter with a reduced vocabulary
    extra = [f"--speculative-token-map={token_map}"] if token_map.is_file() else []
    return [f"--speculative-draft-model-path={folder}", *extra]
