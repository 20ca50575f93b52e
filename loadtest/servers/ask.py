"""Query a running SGLang server: model, tokenizer, drafting, device.

Fields as of SGLang 0.5.23's `/server_info`, its arguments as they were resolved; older servers
answer the same under `/get_server_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_dspark.common.files import FAULTS, integer
from sglang_dspark.errors import DSparkError

_PATHS = ("/server_info", "/get_server_info")
_WAIT_S = 10.0
_MOST_DRAFTS = 4096


@dataclass(frozen=True)
class Served:
    """A server. model, tokenizer: its arguments; algorithm: "" without speculation; drafts:
    proposed a step; device: `cpu`, `cuda`, ...; metrics: whether it has a `/metrics` page."""

    url: str
    model: str
    tokenizer: str
    algorithm: str
    drafts: int
    device: str
    metrics: bool


def ask_server(url: str) -> Served:
    """Facts of the server at `url`.

    Raises DSparkError when nothing answers there, what answers is no SGLang server, or it generates
    no text.
    """
    info = _info(url)
    try:
        found = _served(url, info)
        embeds = bool(info.get("is_embedding"))
    except FAULTS:
        raise _no_sglang(url, "its answer lacks SGLang's fields") from None
    if embeds:
        raise DSparkError(f"the server at {url} serves embeddings, no text; name another --url")
    return found


def _served(url: str, info: Mapping[str, Any]) -> Served:
    algorithm = str(info["speculative_algorithm"] or "")
    drafts = 0
    if algorithm:  # the verified window is the drafts and the bonus token
        drafts = integer(info["speculative_num_draft_tokens"], 2, _MOST_DRAFTS) - 1
    model = info["model_path"]
    tokenizer = info["tokenizer_path"] or model
    if not isinstance(model, str) or not isinstance(tokenizer, str):
        raise TypeError("a path is text")
    return Served(
        url=url,
        model=model,
        tokenizer=tokenizer,
        algorithm=algorithm,
        drafts=drafts,
        device=str(info["device"] or ""),
        metrics=bool(info["enable_metrics"]),
    )


def _info(url: str) -> Mapping[str, Any]:
    status = 0
    with httpx.Client(trust_env=False, timeout=_WAIT_S, follow_redirects=True) as http:
        for path in _PATHS:
            response = _get(http, url, path)
            status = response.status_code
            if status == 200:
                return _object(url, response)
            if status in (401, 403):
                raise DSparkError(
                    f"the server at {url} wants a key (status {status}); start it without --api-key"
                )
    raise _no_sglang(url, f"{_PATHS[0]} answers {status}")


def _get(http: httpx.Client, url: str, path: str) -> httpx.Response:
    try:
        return http.get(f"{url}{path}")
    except httpx.InvalidURL as error:
        raise DSparkError(f"{url} is no address ({error}); write http://HOST:PORT") from None
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise DSparkError(
            f"no server answers at {url} ({reason}); start it, or correct --url"
        ) from None


def _object(url: str, response: httpx.Response) -> Mapping[str, Any]:
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _no_sglang(url, f"{response.url.path} answers no JSON object")
    return value


def _no_sglang(url: str, why: str) -> DSparkError:
    return DSparkError(f"the server at {url} is no SGLang server ({why}); name another --url")
