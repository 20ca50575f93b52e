"""Bodies of the three streamed interfaces: OpenAI completions and chat, and SGLang's `/generate`.

Fields as of SGLang 0.5.23: `continuous_usage_stats` counts the tokens of each chunk,
`return_spec_tokens_details` reports verify steps and accepted drafts in the last chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["completions", "chat", "generate"]
PATHS: dict[Api, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/generate",
}
_SGLANG_ONLY = ("return_spec_tokens_details", "ignore_eos")
# Content of a request: text or token ids; messages for chat.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one request; `extra` is passed on unchanged."""

    max_new_tokens: int = 96
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def openai(self) -> dict[str, Any]:
        """Return the fields of an OpenAI request."""
        body = {"max_tokens": self.max_new_tokens, "temperature": self.temperature}
        return {**body, "ignore_eos": self.ignore_eos, **self.extra}

    def sglang(self) -> dict[str, Any]:
        """Return the `sampling_params` of a `/generate` request."""
        body = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        return {**body, "ignore_eos": self.ignore_eos, **self.extra}


def request_body(api: Api, prompt: Prompt, sampling: Sampling, model: str = "") -> dict[str, Any]:
    """Build the JSON body of a streamed request.

    prompt: chat messages for `chat`, else text or token ids. model: name at another vendor's
    server, which gets OpenAI's own fields alone, as some servers reject unknown fields.
    """
    value = prompt if isinstance(prompt, str) else list(prompt)
    if api == "generate":
        key = "text" if isinstance(prompt, str) else "input_ids"
        return {key: value, "sampling_params": sampling.sglang(), "stream": True}
    body = {
        "model": "default",
        "messages" if api == "chat" else "prompt": value,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
        **sampling.openai(),
    }
    if model:
        own = {"model": model, "stream_options": {"include_usage": True}}
        return {k: v for k, v in {**body, **own}.items() if k not in _SGLANG_ONLY}
    return body if api == "chat" else {**body, "return_token_ids": True}
