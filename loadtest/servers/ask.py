"""Query a running server: model, tokenizer, drafting, device.

Fields as of SGLang 0.5.23's `/server_info`, its resolved arguments; older servers answer the same
under `/get_server_info`. Another vendor's server names its model under `/v1/models`; whether it
drafts is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_dspark.common.files import FAULTS, integer
from sglang_dspark.errors import DSparkError

_PATHS = ("/server_info", "/get_server_info")
_MODELS = "/v1/models"
_WAIT_S = 10.0
_MOST_DRAFTS = 4096


@dataclass(frozen=True)
class Served:
    """A server. model, tokenizer: its arguments; algorithm: "" without speculation; drafts:
    proposed a step; device: `cpu`, `cuda`, ...; metrics: whether it has a `/metrics` page; other:
    another vendor's, of which the model's name alone is known."""

    url: str
    model: str
    tokenizer: str
    algorithm: str
    drafts: int
    device: str
    metrics: bool
    other: bool = False


def ask_server(url: str) -> Served:
    """Read the properties of the server at `url`.

    Raises DSparkError if no server answers, if it is neither an SGLang server nor one with
    `/v1/models`, or if it generates no text.
    """
    info = _info(url)
    if info is None:
        return _other(url)
    try:
        found = _served(url, info)
        embeds = bool(info.get("is_embedding"))
    except FAULTS:
        raise _no_server(url, "its answer lacks SGLang's fields") from None
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


def _other(url: str) -> Served:
    """Return another vendor's server. Raises DSparkError unless it names its first model."""
    with httpx.Client(trust_env=False, timeout=_WAIT_S, follow_redirects=True) as http:
        response = _get(http, url, _MODELS)
    if response.status_code != 200:
        raise _no_server(url, f"{_PATHS[0]} and {_MODELS} answer {response.status_code}")
    try:
        model = _object(url, response)["data"][0]["id"]
    except FAULTS:
        model = None
    if not isinstance(model, str) or not model:
        raise _no_server(url, f"{_MODELS} names no model")
    return Served(url, model, model, "", 0, "", False, other=True)


def _info(url: str) -> Mapping[str, Any] | None:
    """Return the `/server_info` of an SGLang server; None for another server."""
    with httpx.Client(trust_env=False, timeout=_WAIT_S, follow_redirects=True) as http:
        for path in _PATHS:
            response = _get(http, url, path)
            if response.status_code == 200:
                return _object(url, response)
            if response.status_code in (401, 403):
                raise DSparkError(
                    f"the server at {url} wants a key (status {response.status_code}); start it "
                    "without --api-key"
                )
    return None


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
        raise _no_server(url, f"{response.url.path} answers no JSON object")
    return value


def _no_server(url: str, why: str) -> DSparkError:
    return DSparkError(
        f"the server at {url} is neither SGLang's nor OpenAI-compatible ({why}); name another --url"
    )
