"""Training states on disk: Orbax, the last few kept, each complete or not there."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """A folder of training states by step. Saving over a full disk or reading a damaged one is an error that names it,
    and leaves the earlier ones alone."""

    def __init__(self, path: str | Path, *, keep: int = 2, alone: bool = False):
        """`alone`: of several processes only this one reads; else all of them read, and write each its part."""
        self.path = Path(path).absolute()
        own = {jax.process_index()} if alone and jax.process_count() > 1 else None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=own is None,
            enable_async_checkpointing=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=jax.process_index() if own else 0, active_processes=own, barrier_sync_key_prefix="alone"
            ),
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
        except Exception as error:  # tensorstore raises what it likes for a full disk
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
