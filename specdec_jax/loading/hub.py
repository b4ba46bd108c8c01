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
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

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
    except (HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(f"cannot download {repo_id!r} from the hub: {str(error).splitlines()[0]}") from None
    return Path(folder)
