"""End an answer at the first of several stops in one accepted window, as plain decoding does.

Upstream (sglang/srt/managers/schedule_batch.py, `Req.update_finish_state`) looks for stop strings
in all tokens that a step accepted, one string after the other, and for stop tokens only if there is
none. With `{"stop": ["user"]}` a window of `<eos>`, `\\n`, `user` ends the answer in front of
`user`, where plain decoding ends it at `<eos>`; of two strings the one named first wins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam

_PART = "\ufffd"  # a tokenizer's text for bytes of an incomplete character


def end_at_the_first(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """AROUND hook of `update_finish_state`: call upstream's for one token after the other.

    Tokens after the end stay in `output_ids`, as their slots are in use; `finished_len` excludes
    them from the answer. The grammar has already accepted the whole window.
    """
    sampling = req.sampling_params
    if new_accepted_len < 2 or not (sampling.stop_strs or sampling.stop_regex_strs):
        return original(req, new_accepted_len)
    if req.finished() or req.to_finish or not _may_stop(req, new_accepted_len):
        return original(req, new_accepted_len)
    tokens, grammar = req.output_ids, req.grammar
    window = tokens[-new_accepted_len:]
    del tokens[-new_accepted_len:]
    for seen, token in enumerate(window, 1):
        tokens.append(token)
        req.grammar = grammar if seen == new_accepted_len else None
        original(req)
        if req.finished():
            break
    if req.finished() and req.finished_len is None:
        req.finished_len = len(tokens)
    req.grammar = grammar
    tokens.extend(window[seen:])


def _may_stop(req: Any, fresh: int) -> bool:
    """Return whether a stop string or pattern may end a prefix of the window, after one decoding.

    A pattern may match in a prefix alone; so may a string in bytes that the next token completes to
    another character. An invalid token has to be replaced before it is decoded.
    """
    strings, window = req.sampling_params.stop_strs, req.output_ids[-fresh:]
    if req.sampling_params.stop_regex_strs or min(window) < 0 or max(window) >= req.vocab_size:
        return True
    tail = req.tail_str(fresh)
    return any(each in tail or _PART in each for each in strings) or _PART in tail


SEAMS = (
    Seam(
        name="first-stop",
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        kind="around",
        hook=end_at_the_first,
        signature="(self, new_accepted_len=1)",
        why="of two stops in one accepted window the later one may win, unlike in plain decoding",
        issue="sgl-project/sglang#28802",
        drop_when="upstream ends an answer at the earliest stop of the accepted tokens",
    ),
)
