"""Install the faked GPU in every Python process of a server, including its children."""

import sys

# Servers, their children, and the kit's stages; pip and ninja start without torch.
_STAGE = ("tools.gpu.kit.", "tools.gpu.faked.first")
_FAKED = ("sglang", "multiprocessing", *_STAGE)

if any(name in word for word in sys.orig_argv for name in _FAKED):
    from tools.gpu.faked.device import fake_device
    from tools.gpu.faked.kernels import fake_ours, fake_sglang, fake_triton

    fake_device()
    fake_triton()
    fake_sglang()
    fake_ours()
    if any(word.startswith(_STAGE) for word in sys.orig_argv):
        from tools.gpu.faked.small_shapes import shrink_shapes

        shrink_shapes()
