"""Answer requests that would end the scheduler, starve others or raise with status 400.

Upstream, sglang/srt/managers/tokenizer_manager.py: every API calls `generate_request`, once a
request, and `_validate_one_request`, once an answer; both answer a ValueError with status 400.
Upstream does not check the values that later stages use: an empty prompt, a token id outside of the
vocabulary, top_k beyond 32 bits, more log-probabilities than there are tokens, a value of another
type than the scheduler's decoder wants. They raise in the scheduler, which ends the server.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_dspark.common.files import brief, wrong_fields
from sglang_dspark.patches.seam import Seams, Upstream
from sglang_dspark.serving import upstream
from sglang_dspark.serving.config import current_config
from sglang_dspark.serving.speed_targets import target_of

SEAMS = Seams()
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Float32 = Annotated[float, Field(ge=-3.4e38, le=3.4e38)]  # a larger value fits no float32 tensor
# Narrower than upstream's, so that no product or quotient of them leaves float32: an infinite
# logit, or a top_p that is 0 in float32, leaves a row without probability.
TopP = Annotated[float, Field(ge=1e-37)]
Factor = Annotated[float, Field(ge=1e-6)]
Bias = Annotated[float, Field(ge=-1e20, le=1e20)]
Scalar = bool | int | float | str | None
_PARSER: Any = re._parser  # type: ignore[attr-defined]  # the parser of `re.compile`
_CODES: Any = re._constants  # type: ignore[attr-defined]
_REPEATS = (_CODES.MAX_REPEAT, _CODES.MIN_REPEAT, _CODES.POSSESSIVE_REPEAT)


class Sampling(BaseModel):
    """Types and widths of `sampling_params`, as the scheduler decodes them (`SamplingParams`).

    Upstream checks the values. The last five are not for clients: they would bypass its checks.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    max_new_tokens: Int32 | None = None
    min_new_tokens: Int32 | None = None
    temperature: Float32 | None = None
    top_p: TopP | None = None
    top_k: Int32 | None = None
    min_p: Float32 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    repetition_penalty: Factor | None = None
    stop: str | list[str] | None = None
    # A set from Python, a list from elsewhere.
    stop_token_ids: Annotated[list[Int32 | None] | None, Field(strict=False)] = None
    stop_regex: str | list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: Annotated[Int32, Field(ge=1)] | None = None
    logit_bias: dict[str, Bias] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Scalar | list[Scalar] | dict[str, Scalar]] | None = None
    stop_strs: None = None
    stop_regex_strs: None = None
    stop_str_max_len: None = None
    stop_regex_max_len: None = None
    is_normalized: None = None


@SEAMS.subclass(
    "request-limits",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    why="values that upstream does not check raise in the scheduler, which ends the server; it "
    "makes a request of every answer asked for, however many; and an aborted request ends "
    "every other one whose name begins with its own",
    issue="sgl-project/sglang#31597, sgl-project/sglang#31908, sgl-project/sglang#28203, "
    "sgl-project/sglang#36856",
    drop_when="upstream checks every value that raises in its scheduler or in the decoder "
    "there, bounds stop_regex and n, and aborts by the whole request id, not by a prefix",
)
class TokenizerManager(Upstream):
    """Upstream's manager of requests, with the checks that upstream lacks."""

    def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """Check a request before upstream copies it for each requested answer."""
        check_answers(obj)
        answers: AsyncIterator[Any] = super().generate_request(obj, request)
        return answers

    def _validate_one_request(self, obj: Any, input_ids: list[int] | None) -> Any:
        """Check the values of one answer's request before upstream's own checks."""
        check_request(self, obj, input_ids)
        return super()._validate_one_request(obj, input_ids)

    def _create_tokenized_object(
        self,
        obj: Any,
        input_text: Any,
        input_ids: Any,
        input_embeds: Any = None,
        mm_inputs: Any = None,
        token_type_ids: Any = None,
    ) -> Any:
        """Check that the scheduler can decode the request."""
        made = super()._create_tokenized_object(
            obj, input_text, input_ids, input_embeds, mm_inputs, token_type_ids
        )
        check_decodable(made)
        return made

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort the request `rid`, and no other whose name begins with `rid`.

        The scheduler ends every request whose name begins with this one. If there is another such
        request, the one whose client has left runs to its end instead.
        """
        if rid and any(other != rid and other.startswith(rid) for other in self.rid_to_state):
            return
        super().abort_request(rid, abort_all)


def check_answers(obj: Any) -> None:
    """Raise ValueError for an invalid `rid`, or more answers than are served.

    A null `n` is removed, so that upstream uses its default.
    """
    several = isinstance(getattr(obj, "rid", None), list)
    obj.is_single = not several  # upstream reads it for a refused stream, before setting it
    ids = getattr(obj, "input_ids", None) or [0]
    prompts = isinstance(getattr(obj, "text", None), list) or isinstance(ids[0], list)
    if several and not prompts:
        raise ValueError("rid is a list, but the request has one prompt; give one name")
    most = current_config().requests.answers
    for sampling in _samplings(obj):
        if sampling.get("n", 1) is None:
            del sampling["n"]
        count = sampling.get("n", 1)
        if type(count) is not int or not 1 <= count <= most:
            raise ValueError(
                f"n is {brief(repr(count))}; this server gives 1 to {most} answers to a prompt "
                "(requests.answers in its --dspark-config)"
            )


def check_request(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """Raise ValueError for values that would raise in the scheduler."""
    vocab = manager.model_config.vocab_size
    _check_prompt(obj, input_ids or [], vocab, manager.model_config.hidden_size)
    for sampling in _samplings(obj):
        _check_sampling(sampling, vocab)
    _check_logprobs(obj, vocab)
    _check_hidden_states(obj)
    _check_session(obj)


def check_decodable(made: Any) -> None:
    """Raise ValueError if the scheduler cannot decode a request.

    Runs the decoder itself, without fields that the server makes: media, time statistics.
    """
    import msgspec

    given = msgspec.structs.replace(made, mm_inputs=None, time_stats=None)
    try:
        upstream.msgpack_decode(upstream.msgpack_encode(given))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"a field of the request is of a wrong type: {brief(error)}") from None


def _samplings(obj: Any) -> list[dict[str, Any]]:
    """Return a request's sampling parameters, one mapping for each prompt that has any."""
    given = getattr(obj, "sampling_params", None)
    several = given if isinstance(given, list) else [given]
    if any(each is not None and not isinstance(each, dict) for each in several):
        raise ValueError("sampling_params must be a mapping of names, or a list of such")
    return [each for each in several if each]


def _check_prompt(obj: Any, ids: list[int], vocab: int, width: int) -> None:
    """Check the prompt's tokens or embeddings, and the positions in it that the request names."""
    rows = getattr(obj, "input_embeds", None)
    if not ids and rows is None:
        raise ValueError("text or input_ids: the prompt has no token; it needs at least one")
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab:
            raise ValueError(f"input_ids contain token {token}; valid ids are 0 to {vocab - 1}")
    if not all(isinstance(row, list) and len(row) == width for row in rows or ()):
        raise ValueError(f"input_embeds: every row must have {width} numbers, as the model has")
    if not all(all(map(math.isfinite, row)) for row in rows or ()):
        raise ValueError("input_embeds contain a number that is not finite")
    for name in ("token_indices_to_pool", "multi_item_delimiter_indices"):
        places = getattr(obj, name, None)
        if places is not None and not (places and all(0 <= each < len(ids) for each in places)):
            raise ValueError(
                f"{name}: {brief(repr(places), 60)}; give one place or more of the prompt's, 0 to "
                f"{len(ids) - 1}"
            )


def _check_sampling(given: dict[str, Any], vocab: int) -> None:
    target_of(given.get("custom_params"))
    try:
        read = Sampling.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"sampling_params: {wrong_fields(error)}") from None
    # Their logits are masked, by index, until there are enough tokens.
    beyond = [t for t in read.stop_token_ids or () if t is not None and not 0 <= t < vocab]
    if beyond and read.min_new_tokens:
        raise ValueError(
            f"sampling_params: stop_token_ids contain {beyond[0]}; with min_new_tokens valid ids "
            f"are 0 to {vocab - 1}"
        )
    patterns = read.stop_regex or ()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        check_pattern(pattern)


def _check_logprobs(obj: Any, vocab: int) -> None:
    most = min(vocab, current_config().requests.logprobs)
    count, start = getattr(obj, "top_logprobs_num", None), getattr(obj, "logprob_start_len", None)
    if isinstance(count, int) and not 0 <= count <= most:
        raise ValueError(
            f"top_logprobs_num is {count}; this server gives 0 to {most} "
            "(requests.logprobs in its --dspark-config)"
        )
    if isinstance(start, int) and start < -1:
        raise ValueError(f"logprob_start_len is {start}; give a token's place, or -1 for none")


def _check_hidden_states(obj: Any) -> None:
    """Refuse hidden states under DSPARK: its steps drop them, and the list would be empty."""
    asked = getattr(obj, "return_hidden_states", False)
    if asked and str(upstream.get_spec().speculative_algorithm).upper() == "DSPARK":
        raise ValueError(
            "return_hidden_states: a server that speculates with DSPARK keeps no hidden states; "
            "ask one without --speculative-algorithm"
        )


def _check_session(obj: Any) -> None:
    given = getattr(obj, "session_params", None) or {}
    known = set(upstream.SessionParams.__struct_fields__)
    if unknown := [name for name in given if name not in known]:
        listed = ", ".join(sorted(known))
        raise ValueError(f"session_params: unknown {brief(repr(unknown[0]))}; known are {listed}")


def check_pattern(pattern: str) -> None:
    """Raise ValueError for an invalid pattern, and for one that may need exponential time.

    Such a pattern repeats a part which can match in several ways: a choice, an option or another
    repetition.

    SGLang (sglang/srt/managers/schedule_batch.py, `_check_str_based_finish`) searches the end of an
    answer for `stop_regex` in every step, on the thread that schedules. Each `a` doubles the time
    of `(a|a)*b`, and with forty of them no request of the server gets another token.
    """
    shown = brief(repr(pattern), 60)
    try:
        re.compile(pattern)
        parsed = _PARSER.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        reason = f"{shown} is no pattern: {brief(error)}"
        raise ValueError(f"sampling_params: stop_regex {reason}") from None
    for code, given in _parts(parsed):
        if code in _REPEATS and given[1] > 1 and any(map(_has_ways, _parts(given[2]))):
            raise ValueError(
                f"sampling_params: stop_regex {shown} repeats what can match in several ways, "
                "which may take exponential time; take choices, options and repetitions out of it"
            )


def _has_ways(part: tuple[Any, Any]) -> bool:
    code, given = part
    return code == _CODES.BRANCH or (code in _REPEATS and given[0] != given[1])


def _parts(given: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of the patterns in a pattern or in a part's arguments, at any depth."""
    if isinstance(given, _PARSER.SubPattern):
        for code, arguments in given:
            yield code, arguments
            yield from _parts(arguments)
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _parts(each)
