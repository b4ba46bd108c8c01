"""Request tables of `speculators` (Parquet, one row per request with the server's metrics); needs pyarrow."""

import json
from pathlib import Path
from typing import Any

from specdec_jax.replay.acceptance_log import StepLog
from specdec_jax.replay.readers.aiperf import log_of_records


def load_parquet(path: str | Path) -> StepLog:
    """The requests of a Parquet file, or of all files in a folder. Columns may have JSON text or nested values.

    Raises:
        FileNotFoundError: no such file.
        ValueError: pyarrow is not installed, no table, or no record of steps in it.
    """
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install 'specdec-jax[parquet]'") from None
    files = sorted(Path(path).glob("*.parquet")) if Path(path).is_dir() else [Path(path)]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"no Parquet file {str(path)!r}")
    entries = []
    for file in files:
        try:
            rows = parquet.read_table(file).to_pylist()
        except ArrowInvalid as error:
            raise ValueError(f"{file}: no Parquet table ({error})") from None
        entries += [(f"{file}:{number}", _opened(row)) for number, row in enumerate(rows, 1)]
    return log_of_records(entries, str(path))


def _opened(value: Any) -> Any:
    """The value with JSON objects in text parsed."""
    if isinstance(value, dict):
        return {name: _opened(part) for name, part in value.items()}
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
