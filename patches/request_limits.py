"""Refuses what would end the scheduler, starve everyone or raise, before it gets there.

The hooks: `sglang_dspark/serving/request_limits.py` and `request_parsing.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import request_limits, request_parsing

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_OPENAI = "sglang.srt.entrypoints.openai"
_NO_500 = "upstream answers an exception while a request is read with 500, as a fault of its own"

SEAMS = (
    Seam(
        name="request-answers",
        target=f"{_MANAGER}.generate_request",
        kind="before",
        hook=request_limits.check_answers,
        signature="(self, obj, request=None)",
        why="upstream makes a request of every answer asked for, however many",
    ),
    Seam(
        name="request-values",
        target=f"{_MANAGER}._validate_one_request",
        kind="before",
        hook=request_limits.check_request,
        signature="(self, obj, input_ids)",
        why="values that upstream does not check raise in the scheduler, which ends the server",
    ),
    Seam(
        name="request-abort",
        target=f"{_MANAGER}.abort_request",
        kind="around",
        hook=request_limits.abort_by_name,
        signature="(self, rid='', abort_all=False)",
        why="upstream's scheduler ends every request whose name begins with the aborted one's",
    ),
    Seam(
        name="request-decodable",
        target=f"{_MANAGER}._create_tokenized_object",
        kind="after",
        hook=request_limits.check_decodable,
        signature=(
            "(self, obj, input_text, input_ids, input_embeds=None, mm_inputs=None, "
            "token_type_ids=None)"
        ),
        why="the scheduler's decoder raises for a value of another type, which ends the server",
    ),
    Seam(
        name="request-body",
        target="fastapi.dependencies.utils.request_body_to_args",
        kind="around",
        hook=request_parsing.read_body,
        signature="(body_fields, received_body, embed_body_fields)",
        why=_NO_500,
    ),
    Seam(
        name="request-chat",
        target=f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request",
        kind="around",
        hook=request_parsing.convert,
        signature="(self, request, raw_request=None)",
        why=_NO_500,
    ),
    Seam(
        name="request-completion",
        target=f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
        kind="around",
        hook=request_parsing.convert,
        signature="(self, request, raw_request=None)",
        why=_NO_500,
    ),
    Seam(
        name="request-parts",
        target="sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        kind="around",
        hook=request_parsing.normalize,
        signature="(self)",
        why=_NO_500,
    ),
)
