"""Hub ids, through huggingface_hub: its cache, its tokens, its HF_HUB_OFFLINE."""

from pathlib import Path
from typing import Any

WANTED = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED = ["*/*"]  # other formats, experiments and quantisations live in sub-folders


def hub_folder(repo_id: str, *, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The local snapshot of a hub repository, downloaded if it is not in the cache.

    Raises FileNotFoundError naming the id and what to do: no such repository, no access, no network and no copy.
    """
    import huggingface_hub  # here, because it takes 0.3 s that local models need not wait for
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    try:
        folder = huggingface_hub.snapshot_download(repo_id, allow_patterns=WANTED, ignore_patterns=UNWANTED, **options)
    except HFValidationError as error:
        raise FileNotFoundError(f"{repo_id!r} is no valid hub id: {error}") from None
    except LocalEntryNotFoundError:
        raise FileNotFoundError(
            f"{repo_id!r} is not in the Hugging Face cache, and the hub cannot be reached (offline, or HF_HUB_OFFLINE "
            f"is set). Download it where there is network with `hf download {repo_id}`, or give a local folder"
        ) from None
    except Exception as error:  # the hub's refusals, and what its HTTP client raises when a connection breaks
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise FileNotFoundError(f"cannot download {repo_id!r} from the hub: {reason}") from None
    return Path(folder)
