"""Training states on disk: Orbax checkpoints, written atomically, of which the last few are kept."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from specdec_jax.loading.orbax_checkpoint import independent


class Checkpoints:
    """A folder of training states by step. Errors for a full disk or a damaged state name it and leave earlier states
    unchanged."""

    def __init__(self, path: str | Path, *, keep: int = 2, by_itself: bool = False):
        """`by_itself`: only this one of several processes reads; else all read, and each writes its part."""
        self.path = Path(path).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=jax.process_count() == 1 or not by_itself,
            enable_async_checkpointing=False,
            multiprocessing_options=independent() if by_itself else ocp.options.MultiprocessingOptions(),
        )
        self._manager = ocp.CheckpointManager(self.path, options=options)

    def latest(self) -> int | None:
        """The step of the newest complete state."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Writes a state. Raises OSError naming the folder."""
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state))
            self._manager.wait_until_finished()
        except Exception as error:  # tensorstore raises various errors for a full disk
            raise OSError(f"cannot write {self.path / str(step)}: {_short(error)}") from None

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step, shaped and placed as `like`.

        Raises ValueError naming the folder if it is damaged or another's.
        """
        wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except Exception as error:
            where = self.path / str(step)
            raise ValueError(
                f"{where} cannot be restored (delete it to go on from the one before): {_short(error)}"
            ) from None

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
