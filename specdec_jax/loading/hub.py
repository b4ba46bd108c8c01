"""Hub ids, by huggingface_hub with its cache, token, mirror (HF_ENDPOINT) and HF_HUB_OFFLINE.

Small files are downloaded first, so that an unsupported model is refused before its weights are downloaded.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from specdec_jax.loading.draft_vocabulary import RANKING
from specdec_jax.loading.hf_folder import CONFIG, GENERATION, INDEX, read_config, weight_names
from specdec_jax.loading.tokenizer import TOKENIZER, TOKENIZER_FILES, needs_file

T = TypeVar("T")
HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^@\s]+))?")
WEIGHT_FILES = (".gguf", ".safetensors", ".bin", ".json")
FILES = (*WEIGHT_FILES, ".py")  # suffixes of missing files that look like hub ids
SMALL = (CONFIG, GENERATION, INDEX, RANKING, *TOKENIZER_FILES)
SHOWN = 400  # maximum characters of huggingface_hub's reason


def hub_id(source: str) -> tuple[str, str | None] | None:
    """(`org/name`, revision or None) of `org/name` or `org/name@revision`, where revision is a branch, tag or commit.

    None: not a hub id, or a local file or folder has that name.
    """
    match = HUB_ID.fullmatch(source)
    if match is None or match["repo"].lower().endswith(FILES) or Path(source).exists():
        return None
    return match["repo"], match["revision"]


def hub_folder(repo_id: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The local snapshot of a hub repository, whose missing files are downloaded; without `weights` small ones only.

    Raises FileNotFoundError with the id and the reason of huggingface_hub (no such repository or revision, no access,
    no network and no copy), or for a repository without a tokenizer or safetensors. Raises ValueError for an
    unsupported model, before its weights are downloaded.
    """
    import huggingface_hub  # imported here, because it takes 0.3 s and local models do not need it

    def request(call: Callable[..., T], at: str | None, **options: Any) -> T:
        try:
            return call(repo_id, revision=at, **options)
        except Exception as error:  # of the hub, of the connection to it, or of the disk
            name, reason = repo_id + (f"@{revision}" if revision else ""), " ".join(str(error).split())[:SHOWN]
            why = f"there is no file or folder {name!r} here, and the cache lacks files of the hub's"
            raise FileNotFoundError(f"{why}: {reason or type(error).__name__}") from None

    download = huggingface_hub.snapshot_download
    folder = Path(request(download, revision, allow_patterns=list(SMALL)))
    names = [CONFIG, *([TOKENIZER] if needs_file(folder) else []), *weight_names(folder)]
    lacking = [name for name in names if not (folder / name).is_file()]
    if not weights or not lacking:
        return folder
    if CONFIG not in lacking:
        read_config(folder)
    listed = request(huggingface_hub.HfApi().model_info, folder.name).siblings or ()
    if absent := [name for name in lacking if name not in {file.rfilename for file in listed}]:
        raise FileNotFoundError(
            f"the hub's {repo_id!r} has no {absent[0]}: give a revision that has it, a folder that transformers wrote "
            f"(save_pretrained of model and tokenizer), or a GGUF file of it (`hf download {repo_id} FILE`)"
        )
    request(download, folder.name, allow_patterns=lacking)
    return folder
