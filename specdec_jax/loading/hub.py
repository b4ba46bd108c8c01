"""Hub ids, by huggingface_hub with its cache, token, mirror (HF_ENDPOINT) and HF_HUB_OFFLINE.

Small files are downloaded first, so that an unsupported model is refused before its weights are downloaded.
"""

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from specdec_jax.loading.draft_vocabulary import RANKING
from specdec_jax.loading.hf_folder import CONFIG, GENERATION, INDEX, check_served, weight_names
from specdec_jax.loading.tokenizer import TOKENIZER, TOKENIZER_FILES, needs_file

T = TypeVar("T")
HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^@\s]+))?")
WEIGHT_FILES = (".gguf", ".safetensors", ".bin", ".json")
FILES = (*WEIGHT_FILES, ".py")  # suffixes of missing files that look like hub ids
SMALL = (CONFIG, GENERATION, INDEX, RANKING, *TOKENIZER_FILES)
OTHER_WEIGHTS = (".bin", ".pth", ".pt", ".h5", ".msgpack", ".safetensors")
WRITTEN = "a folder that transformers wrote (save_pretrained of model and tokenizer)"
SHOWN = 300  # maximum characters of a reason
PAUSE = 1.0  # seconds between tries
TRIES = 3  # for broken connections, of which huggingface_hub retries only some kinds


class HubId(NamedTuple):
    """A repository, and its branch, tag or commit; None: main."""

    repo: str
    revision: str | None


def hub_id(source: str) -> HubId | None:
    """Parses `org/name` or `org/name@revision`; None: not a hub id, or a local file or folder has that name."""
    match = HUB_ID.fullmatch(source)
    if match is None or match["repo"].lower().endswith(FILES) or Path(source).exists():
        return None
    return HubId(match["repo"], match["revision"])


def hub_folder(
    repo_id: str, *, revision: str | None = None, cache_dir: str | Path | None = None, weights: bool = True
) -> Path:
    """The local snapshot of a hub repository; missing files that are needed are downloaded.

    Without `weights` only small files such as config.json are downloaded.

    After a download checksums are compared, and a warning names the licence of a gated model.
    Raises FileNotFoundError with the id and a remedy: no such repository or revision, no access, no network and no
    copy, no supported weights. Raises ValueError for an unsupported model, before its weights are downloaded, and for a
    file with a wrong checksum, which is removed.
    """
    import huggingface_hub  # imported here, because it takes 0.3 s and local models do not need it

    def request(call: Callable[[], T], missing: str, tries: int = TRIES) -> T:
        try:
            return call()
        except Exception as error:
            if tries > 1 and not isinstance(error, (OSError, ValueError)):  # not an error of the hub or the disk
                time.sleep(PAUSE)
                return request(call, missing, tries - 1)
            raise FileNotFoundError(_explanation(error, repo_id, revision, missing)) from None

    def snapshot(at: str | None, names: Iterable[str], missing: str, **options: Any) -> Path:
        options |= {"revision": at, "cache_dir": cache_dir, "allow_patterns": list(names)}
        return Path(request(lambda: huggingface_hub.snapshot_download(repo_id, **options), missing))

    here = f"there is no file or folder {repo_id!r} here"
    with _bars(seen=False) as bars:
        folder = snapshot(revision, SMALL, f"{here}, nor in the Hugging Face cache", tqdm_class=bars)
    if not weights:
        return folder
    lacking = [name for name in (CONFIG, TOKENIZER, *weight_names(folder)) if not (folder / name).is_file()]
    if TOKENIZER in lacking and not needs_file(folder):
        lacking.remove(TOKENIZER)
    if not lacking:
        return folder
    if CONFIG not in lacking:
        check_served(folder)
    kind = "weight file" if lacking[0].endswith(".safetensors") else "file"
    missing, api, commit = f"no such {kind}: {folder / lacking[0]}", huggingface_hub.HfApi(), folder.name
    info = request(lambda: api.model_info(repo_id, revision=commit), missing)
    _check_there(repo_id, lacking, {file.rfilename for file in info.siblings or ()})
    part = f"{repo_id!r} came in part (the same command goes on)"
    with _bars(seen=True) as bars:
        snapshot(commit, lacking, part, tqdm_class=bars)
        with bars(desc="Comparing checksums", bar_format="{desc}", total=0, leave=False):
            verified = request(lambda: api.verify_repo_checksums(repo_id, revision=commit, cache_dir=cache_dir), part)
    if names := [wrong["path"] for wrong in verified.mismatches]:
        for path in [path for name in names for path in ((folder / name).resolve(), folder / name)]:
            path.unlink(missing_ok=True)  # a link in the snapshot, and what it points to
        raise ValueError(
            f"{repo_id!r} came damaged: the checksum of {', '.join(names)} is not the hub's. It has been removed from "
            "the cache: the same command downloads it again"
        )
    if info.gated:
        card = info.card_data
        licence = getattr(card, "license_name", None) or getattr(card, "license", None) or "not named"
        page = f"{huggingface_hub.constants.ENDPOINT}/{repo_id}"
        warnings.warn(f"{repo_id} is gated: you use it under its licence, {licence} ({page})", stacklevel=2)
    return folder


def _check_there(repo_id: str, lacking: Iterable[str], names: set[str]) -> None:
    """Raises FileNotFoundError if the repository with these files lacks a required one."""
    absent = next((name for name in lacking if name not in names), None)
    if absent is None:
        return
    top = sorted(name for name in names if "/" not in name)
    ggufs = [name for name in top if name.endswith(".gguf")]
    others = [name for name in top if name.endswith(OTHER_WEIGHTS)]
    if ggufs:
        hint = f"it holds GGUF files. Give one of them: `hf download {repo_id} {ggufs[0]}` prints its path"
    elif absent == TOKENIZER and (model := [name for name in top if name.endswith(".model")]):
        hint = f"{model[0]} is not read. Give {WRITTEN}"
    elif absent != CONFIG and others:
        hint = (
            f"{others[0]} is not read. Give a revision with safetensors ({repo_id}@refs/pr/1, if that pull request "
            f"adds them), or {WRITTEN}"
        )
    else:
        hint = "it is no model in the format of transformers"
    raise FileNotFoundError(f"the hub's {repo_id!r} has no {absent}: {hint}")


@contextlib.contextmanager
def _bars(*, seen: bool) -> Iterator[Any]:
    """huggingface_hub's progress bars, or none for small files.

    All are closed after the block; some would be closed by garbage collection only, and drawn over later output.
    """
    from huggingface_hub.utils import tqdm

    drawn = []

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": None if seen else True})  # None: on terminals only
            drawn.append(self)

    try:
        yield Bar
    finally:
        for bar in drawn:
            bar.close()


def _explanation(error: Exception, repo_id: str, revision: str | None, missing: str) -> str:
    """One sentence for an error of huggingface_hub, with a remedy; `missing` describes what the cache lacks."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the reason for searching the cache
    if isinstance(error, HFValidationError):
        return f"{repo_id!r} is no valid hub id: {error}"
    if isinstance(error, HfHubHTTPError):
        return _refusal(error, repo_id, revision)
    if isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)):
        why = "cannot be reached: HF_HUB_OFFLINE is set"
    elif isinstance(error, (OSError, ValueError)):
        return f"cannot download {repo_id!r}: {_reason(error)}"
    else:
        why = f"at {constants.ENDPOINT} cannot be reached: {_reason(error)}"
    more = f" --revision {revision}" if revision else ""
    return (
        f"{missing}, and the hub {why}. Download it where there is network with `hf download {repo_id}{more}`, or give "
        "a local folder"
    )


def _refusal(error: Any, repo_id: str, revision: str | None) -> str:
    """The explanation of an HTTP error of the hub."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status, page, token = error.response.status_code, f"{constants.ENDPOINT}/{repo_id}", get_token()
    login = "run `hf auth login` or set HF_TOKEN"
    unnamed = repo_id not in str(error.response.url)  # redirects for large files
    if isinstance(error, (DisabledRepoError, RemoteEntryNotFoundError)) or (unnamed and status != 429):
        return f"cannot download {repo_id!r}: {_reason(error)}"
    if isinstance(error, RevisionNotFoundError):
        return f"the hub's {repo_id!r} has no revision {revision!r}: {page}/tree/main lists branches and tags"
    if isinstance(error, GatedRepoError) or status == 403:
        why = f"the account of your token may not read it yet ({_reason(error)})" if token else f"then {login}"
        return f"{repo_id!r} is gated: accept its licence at {page}; {why}"
    if status == 401 and token and not isinstance(error, RepositoryNotFoundError):
        return f"the hub refuses the token of HF_TOKEN or `hf auth login` for {repo_id!r}: {_reason(error)}"
    if status in (401, 404):
        private = "your token may not read it" if token else f"{login} if it is private or gated"
        return f"there is no file or folder {repo_id!r} here, and the hub shows no such model: {private} ({page})"
    if status == 429:
        wait = error.response.headers.get("Retry-After", "")
        when = f"in {wait} s" if wait.isdecimal() else "later"
        more = "" if token else f"; with a token more requests are allowed ({login})"
        return f"cannot download {repo_id!r}: too many requests, try again {when}{more} ({_reason(error)})"
    return f"cannot download {repo_id!r}: {_reason(error)}"


def _reason(error: Exception) -> str:
    text = getattr(error, "server_message", None) or str(error)
    return " ".join(text.split())[:SHOWN] or type(error).__name__
