"""Models on the Hugging Face hub: fetches the files needed, once, into the hub's own cache.

Called by the loader for a name that is no local path.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from stemma.backend.local.model.loader import read_config, weight_files
from stemma.lang.errors import ModelLoadError

NEEDED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)

REACH_S = 5.0
"""How long the hub may take to answer at all."""


def download(repo_id: str) -> Path:
    """The local folder of a hub model, fetched if it is not there yet.

    A model that is there needs no network; a newer version on the hub is not looked for. The config
    comes first, so that a model that cannot run is refused before its weights are fetched. Raises
    ModelLoadError saying whether the id, the permission, the network or the disk is what stands in
    the way.
    """
    try:
        if (folder := find_cached(repo_id)) is not None:
            return folder
        check_reachable(repo_id)
        config = huggingface_hub.hf_hub_download(repo_id, "config.json")
        read_config(Path(config).parent)
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(NEEDED)))
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {repo_id}: {error}") from error.__cause__
    except GatedRepoError as error:
        reason: Exception = error
        problem = f"access to it is restricted; accept its terms at https://hf.co/{repo_id} and "
        problem += "log in with `hf auth login`"
    except RepositoryNotFoundError as error:
        reason, problem = error, "the hub knows no model of that name (or you may not see it)"
    except (ConnectionError, LocalEntryNotFoundError) as error:  # also that it must not be
        reason = error
        why = error.__cause__ or error
        problem = f"it is not in the local cache and the hub cannot be reached ({why}); connect "
        problem += "to the network, or give a model folder or a GGUF file that is on this machine"
    except EntryNotFoundError as error:
        reason, problem = error, "it has no config.json"
    except HFValidationError as error:
        reason, problem = error, "that is neither a local path nor a hub id (owner/name)"
    except HfHubHTTPError as error:
        reason, problem = error, f"the hub answered: {error}"
    except OSError as error:
        reason, problem = error, f"its files cannot be stored: {error}"
    raise ModelLoadError(f"cannot fetch {repo_id}: {problem}") from reason


def check_reachable(repo_id: str) -> None:
    """Raise ConnectionError if the hub does not answer. The downloads would try for half a minute.

    Whatever it answers is left to them, since they ask again where that is worth it.
    """
    url = huggingface_hub.hf_hub_url(repo_id, "config.json")
    try:
        huggingface_hub.get_hf_file_metadata(url, timeout=REACH_S)
    except (HfHubHTTPError, HFValidationError):
        return
    except ConnectionError:  # the hub library was told to stay offline
        raise
    except Exception as error:  # of whichever HTTP library it has
        raise ConnectionError(str(error)) from error


def find_cached(repo_id: str) -> Path | None:
    """The folder in the hub's cache, if an earlier fetch was not interrupted."""
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo_id, allow_patterns=list(NEEDED), local_files_only=True
            )
        )
        read_config(folder)
        weight_files(folder)
    except (LocalEntryNotFoundError, ModelLoadError):
        return None
    return folder if (folder / "tokenizer.json").is_file() else None
