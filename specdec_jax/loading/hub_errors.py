"""What went wrong between huggingface_hub and the hub, in one sentence that says what to do."""

from typing import Any

SHOWN = 300  # characters of a reason


def explanation(error: Exception, repo_id: str, revision: str | None, missing: str) -> str:
    """The sentence for what a call of huggingface_hub raised; `missing` says what the cache lacks."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why it was looked for in the cache
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
    """For an answer of the hub that is an error."""
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
    unnamed = repo_id not in str(error.response.url)  # where the hub sends for large files
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
