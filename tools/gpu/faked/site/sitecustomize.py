"""Every Python of a server is told of the faked GPU, its children too."""

import sys

if any("sglang" in word or "multiprocessing" in word for word in sys.orig_argv):
    from tools.gpu.faked.device import fake_device
    from tools.gpu.faked.kernels import fake_ours, fake_sglang, fake_triton

    fake_device()
    fake_triton()
    fake_sglang()
    fake_ours()
