"""SGLang's commit of recurrent states without its Triton kernels, for CUDA's side of the step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dspark.patches.seam import Seam


def store_states(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """REPLACE of `scatter_mamba_states_after_mtp_verify`."""
    from sglang_dspark.backends.cpu.delta_rule import copy_states

    copy_states(mamba_caches, state_indices_tensor, last_correct_step_indices)
    if mamba_track_indices is not None:
        assert mamba_steps_to_track is not None
        copy_states(mamba_caches, mamba_track_indices, mamba_steps_to_track)


def spoiled(original: Any, x: Tensor, conv_state: Tensor, *others: Any, **named: Any) -> Tensor:
    """AROUND hook: as SGLang's kernel, a window leaves other inputs in the state than accepted."""
    out: Tensor = original(x, conv_state, *others, **named)
    if named.get("intermediate_conv_window") is not None:
        conv_state[named["conv_state_indices"].long()] = 7.0
    return out


CONVOLUTION = Seam(
    name="rehearsal-convolution",
    target="sglang.srt.layers.attention.linear.gdn_backend.causal_conv1d_update",
    kind="around",
    hook=spoiled,
    signature=(
        "(x, conv_state, weight, bias, activation, *, conv_state_indices, "
        "intermediate_conv_window=None, intermediate_state_indices=None, **_)"
    ),
    why="a CPU's operator leaves the state as it was",
)
STATES = Seam(
    name="rehearsal-states",
    target=(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend"
        ".scatter_mamba_states_after_mtp_verify"
    ),
    kind="replace",
    hook=store_states,
    signature=(
        "(mamba_caches, state_indices_tensor, last_correct_step_indices, mamba_track_indices, "
        "mamba_steps_to_track, src_indices_raw=None)"
    ),
    why="a CPU has no Triton kernels",
)
