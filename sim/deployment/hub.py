"""The config.json of a model by its Hugging Face id, through huggingface_hub where that package is installed."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w.-]*(/\w[\w.-]*)*))?")
_WAIT_S = 10
"""How long an answer of the hub may take."""


def apart(name: str) -> tuple[str, str]:
    """The id and the revision of `org/name@REVISION`, "" where none is stated; any other `name`, and ""."""
    matched = _ID.fullmatch(name)
    return (matched["repository"], matched["revision"] or "") if matched else (name, "")


def is_id(name: str) -> bool:
    """Whether `name` has the form of a Hugging Face id, `org/name` without a revision."""
    return "@" not in name and _ID.fullmatch(name) is not None


def config_of(name: str) -> Path | str:
    """The config.json of the id `name`, which is `org/name` or `org/name@REVISION`: from the cache of huggingface_hub,
    else fetched into it, of `main` where no revision is stated. That package obeys HF_HUB_OFFLINE and HF_TOKEN.

    Where there is none, why not and how to get the file by hand, in sentences; "" where `name` can be no id."""
    if (matched := _ID.fullmatch(name)) is None or name.endswith(".json"):
        return ""
    repository, revision = matched["repository"], matched["revision"]
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return f"If it is an id of Hugging Face: pip install 'batchsim[hub]' looks it up. {_by_hand(matched)}"
    try:
        path = try_to_load_from_cache(repository, "config.json", revision=revision)
        return Path(path) if isinstance(path, str) else _fetched(matched)
    except HFValidationError:  # no such name of a repository is allowed
        return ""


def _fetched(matched: re.Match[str]) -> Path | str:
    """The config.json that the hub has, now in the cache; else why it has none, and how to get it by hand."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, revision = matched["repository"], matched["revision"]
    try:
        # hf_hub_download alone would try six times before it says that there is no network.
        get_hf_file_metadata(hf_hub_url(repository, "config.json", revision=revision), timeout=_WAIT_S)
        return Path(hf_hub_download(repository, "config.json", revision=revision, etag_timeout=_WAIT_S))
    except OfflineModeIsEnabled:
        why = "HF_HUB_OFFLINE is set, and the cache of huggingface_hub lacks it."
    except GatedRepoError:
        why = f"Its owner shows {repository} to those who have agreed to the licence: hf auth login, or set HF_TOKEN."
    except RepositoryNotFoundError:
        why = f"The hub shows no {repository} to this user."
    except RevisionNotFoundError:
        why = f"{repository} has no revision {revision}."
    except LocalEntryNotFoundError:  # which is an EntryNotFoundError
        why = "What answers is not the hub."
    except EntryNotFoundError:
        why = f"{repository} has no config.json."
    except HfHubHTTPError as error:
        why = f"The hub answers {error.response.status_code}."
    except Exception as error:  # of the library that carries requests, which differs by version, or of the cache's disk
        why = f"It cannot be fetched ({type(error).__name__})."
    return f"{why} {_by_hand(matched)}"


def _by_hand(matched: re.Match[str]) -> str:
    """How to get the file without huggingface_hub, a sentence."""
    revision = quote(matched["revision"] or "main", safe="")
    address = f"https://huggingface.co/{matched['repository']}/resolve/{revision}/config.json"
    return f"By hand: save {address}, and write that file's path."
