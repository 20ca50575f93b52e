"""Register the plugin: the `sglang.srt.plugins` entry that `load_plugins` calls in every process.

SGLang (sglang/srt/plugins/__init__.py) calls `register`, then applies all hooks, and logs
failures. So this module imports nothing that can fail at its top, `register` ends the
process itself, and the check that each hook was applied runs right after
`HookRegistry.apply_hooks`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_dspark.errors import DSparkError
from sglang_dspark.serving import startup, upstream

logger = logging.getLogger(__name__)


def register() -> None:
    """Check the SGLang version, read our configuration, install the patches for this device.

    Does nothing when switched off. Raises SystemExit, after one line on stderr, on any failure.
    """
    reason = startup.switched_off()
    if reason is not None:
        logger.info("sglang-dspark is off: %s", reason)
        return
    with _without_collections():
        _or_stop(_install)
    startup.mark_server()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection while the block imports.

    Installing imports most of SGLang, a million objects that stay. Scanning them repeatedly takes
    a sixth of a start's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _install() -> None:
    import sglang

    startup.check_version(sglang.__version__)

    from sglang_dspark.backends.moe import moe_config
    from sglang_dspark.patches import all_seams, late_install, registry
    from sglang_dspark.serving import upstream_check

    seams_wait = late_install.can_wait()
    if not seams_wait:  # if they can, SGLang's files are those that the name tables were made from
        upstream_check.require_all()  # before the patches, which use these names at import

    from sglang_dspark.backends.cpu import log_filters
    from sglang_dspark.serving.config import load_config

    fixes = load_config().config.upstream_fixes
    moe_config.register()
    device = startup.active_device()
    if device == "cpu":
        log_filters.install()
    else:
        _require_some_platform()
    install = late_install.install if seams_wait else registry.install
    install(all_seams(device=device, upstream_fixes=fixes))
    _verify_after_apply()


def _verify_after_apply() -> None:
    """Run `registry.verify` right after upstream has applied hooks, the earliest sound point."""
    from sglang_dspark.patches import registry
    from sglang_dspark.patches.upstream_fixes import hook_scan

    apply_hooks = upstream.HookRegistry.apply_hooks

    def apply_and_verify(cls: type) -> None:
        with _without_collections():
            apply_hooks()
            hook_scan.forget()
            _or_stop(registry.verify)

    upstream.HookRegistry.apply_hooks = classmethod(apply_and_verify)


def _or_stop(step: Callable[[], None]) -> None:
    """Run `step`; on any failure print one line on stderr and end the process."""
    try:
        step()
    except DSparkError as error:
        startup.stop(str(error))
    except Exception as error:
        logger.debug("sglang-dspark failed at start-up", exc_info=True)
        startup.stop(
            f"could not start ({type(error).__name__}: {error}); run `dspark doctor`, or set "
            "DSPARK_DISABLE=1"
        )


def _require_some_platform() -> None:
    """Require our platform if there is no accelerator and no other plugin's platform.

    SGLang only logs a platform entry point that fails, and then serves without it.
    """
    import torch

    if torch.accelerator.is_available() or upstream.current_platform.is_out_of_tree():
        return
    if startup.platform_left_out():
        raise DSparkError(
            f"SGLANG_PLUGINS names {startup.PLUGIN_NAME} but not {startup.PLATFORM_NAME}, which "
            f"this machine without a GPU needs; set "
            f"SGLANG_PLUGINS={startup.PLUGIN_NAME},{startup.PLATFORM_NAME}"
        )
    raise DSparkError(
        f"no accelerator was found and our CPU platform ({startup.PLATFORM_NAME}) did not start; "
        "run `dspark doctor`, or set DSPARK_DISABLE=1"
    )
