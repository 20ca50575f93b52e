"""Resolve a model by name: a folder on this machine, or `OWNER/NAME[@REVISION]` on Hugging Face.

`huggingface_hub.snapshot_download` downloads into its cache and resumes interrupted downloads. Its
environment applies (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Only safetensors weights are
used: the other formats are pickles, which can run code.
"""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_dspark.common.files import FAULTS, brief, fault, load_json
from sglang_dspark.errors import DSparkError

FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
LEFT_OUT = ("*/*", "consolidated*")  # other formats, and a second copy of the same weights
_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]*\w)(?:@(?P<revision>\w[\w./-]*))?")
_INDEX = "model.safetensors.index.json"
_CACHE_FOLDER = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")  # the cache's folder of a model


def resolve(name_or_path: str | Path) -> Path:
    """Return the folder of a model: an existing one unchanged, else a Hugging Face id's snapshot.

    name_or_path: a folder wins over an id of the same name. A name that begins with `/`, `.` or
    `~` or ends in `/` is always a folder.
    Raises DSparkError in one line for a missing folder, an id that cannot be fetched (offline,
    unknown, not allowed, interrupted), and a model without complete safetensors weights.
    """
    given = str(name_or_path)
    path = Path(given).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise DSparkError(f"{given} is a file; name the model's folder, or a Hugging Face id")
    found = _ID.fullmatch(given)
    if found is None:
        raise DSparkError(
            f"no model at {given}: there is no such folder; name one with config.json, or a "
            "Hugging Face id as OWNER/NAME"
        )
    folder = _snapshot(given, found["name"], found["revision"])
    _require_whole(folder, given)
    return folder


def model_name(folder: Path) -> str:
    """Return a model's display name: its folder's own, or OWNER/NAME@COMMIT of a snapshot."""
    folder = folder.absolute()
    cached = _CACHE_FOLDER.fullmatch(folder.parent.parent.name)
    if cached is None or folder.parent.name != "snapshots":
        return folder.resolve().name
    return f"{cached['owner']}/{cached['name']}@{folder.name[:8]}"


@contextmanager
def offline_if_unreachable(seconds: float = 10.0) -> Iterator[None]:
    """Restrict the Hub's client to its cache if no connection to the Hub opens in time.

    seconds: for each of the Hub's addresses, by default the client's own limit. The client retries
    some requests six times, half a minute in all. Behind a proxy the connection is not checked.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _is_reachable(constants.ENDPOINT, seconds)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_reachable(address: str, seconds: float) -> bool:
    """Return False only if a connection was tried and failed; the client reports other faults."""
    parts = urlsplit(address)
    if parts.hostname is None or {parts.scheme, "all"} & urllib.request.getproxies().keys():
        return True
    try:
        port = parts.port or {"http": 80}.get(parts.scheme, 443)
        socket.create_connection((parts.hostname, port), seconds).close()
    except ValueError:  # an invalid port or host name
        return True
    except OSError:
        return False
    return True


def _snapshot(given: str, name: str, revision: str | None) -> Path:
    from httpx import HTTPError
    from huggingface_hub import errors, snapshot_download

    wanted: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": list(FILES),
        "ignore_patterns": list(LEFT_OUT),
    }
    try:
        with offline_if_unreachable():
            return Path(snapshot_download(name, **wanted))
    except errors.GatedRepoError:
        why = "its owner must let you in: ask on its page, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = "Hugging Face knows none, or HF_TOKEN does not open it: check the name and the token"
    except errors.RevisionNotFoundError:
        why = f"it has no revision {revision}: name a branch, tag or commit that it has"
    except errors.HFValidationError as error:
        why = f"{brief(error)}: write OWNER/NAME or OWNER/NAME@REVISION"
    except errors.IncompleteSnapshotError:
        why = "its files are not all in the cache: run again with a network, which fetches the rest"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = (
            "it is not in the Hugging Face cache and the hub cannot be reached: go online (HF_HUB_"
            "OFFLINE unset), set HF_ENDPOINT to a mirror, or name a folder"
        )
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: of its Rust transfer
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            why = f"refused with status {status}: set HF_TOKEN to a token that may read it"
        else:
            why = f"the download failed ({fault(error)}): run again, which goes on where it stopped"
    raise DSparkError(f"no folder {given}, and no model {given} from Hugging Face: {why}") from None


def _require_whole(folder: Path, given: str) -> None:
    """Raise DSparkError unless a snapshot has a configuration and all weights that its index names.

    A cache that another tool filled can hold a part of a model.
    """
    there = {file.name for file in folder.iterdir() if file.exists()}
    missing = {"config.json"} - there
    if _INDEX in there:
        try:
            missing |= set(map(str, load_json(folder / _INDEX)["weight_map"].values())) - there
        except (OSError, *FAULTS) as error:
            raise DSparkError(
                f"{folder / _INDEX} of {given} cannot be read ({fault(error)}); delete it and run "
                "again"
            ) from None
    elif not any(name.endswith(".safetensors") for name in there):
        raise DSparkError(
            f"{given} has no safetensors weights; other formats are not read: name a model that has"
        )
    if missing:
        raise DSparkError(
            f"{given} lacks {brief(', '.join(sorted(missing)))} in {folder}; run again with a "
            "network, or name a whole model"
        )
