"""Write a run's curves for TensorBoard: `metrics.jsonl` as scalars `train/...` and `held_out/...`.

TensorBoard is an optional dependency, imported only if a config requests curves.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from sglang_dspark.errors import DSparkError
from sglang_dspark.extras import pip_install
from sglang_dspark.training.files import disk_error

_HELD_OUT = "held_out_"


def require_tensorboard(folder: Path | None) -> None:
    """Raise DSparkError if curves are wanted (`folder` is not None) without TensorBoard."""
    if folder is not None and find_spec("tensorboard") is None:
        raise DSparkError(
            "`tensorboard` in the training config needs a package that is not installed: "
            f"{pip_install('train')} in a checkout, or set tensorboard: false"
        )


class Curves:
    """Reports in the event files of a folder.

    A resumed run continues the same curves; points that an earlier run wrote past its step are
    hidden.
    """

    def __init__(self, folder: Path | None, step: int):
        """Open the files. folder: None writes nothing. step: where the run continues, 0 if new."""
        require_tensorboard(folder)
        self._writer = None
        if folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        try:
            self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        except OSError as error:
            raise disk_error(folder, error) from None

    def write(self, step: int, means: dict[str, float]) -> None:
        """Add the means reported at `step`. Raises DSparkError if the disk is full."""
        if self._writer is None:
            return
        try:
            for name, value in means.items():
                group = "held_out" if name.startswith(_HELD_OUT) else "train"
                tag = f"{group}/{name.removeprefix(_HELD_OUT)}"
                self._writer.add_scalar(tag, value, step)
            self._writer.flush()
        except OSError as error:
            raise disk_error(self._folder, error) from None

    def __enter__(self) -> Curves:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()
