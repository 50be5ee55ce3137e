"""Requests to the Hub that are tried again, and errors that say in one line what to do."""

import json
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

logger = logging.get_logger(__name__)

WAITS = (2.0, 4.0, 8.0)  # seconds between tries; the client waits on its own within one


class PublishError(OSError):
    """A push that did not succeed; the message is one line with the repository, the cause and what to do. `temporary`:
    whether the same push may succeed later."""

    def __init__(self, message: str, temporary: bool = False):
        super().__init__(message)
        self.temporary = temporary


def with_retries(
    push: Callable[[HfApi], CommitInfo],
    repo_id: str,
    token: str | bool | None = None,
    sleep: Callable[[float], None] = time.sleep,
):
    """What `push` returns; it is tried again where that can help.

    Raises:
        ValueError: if `repo_id` cannot be a repository.
        PublishError: for everything else that the Hub, the client or the disk reports.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"`repo_id` is {repo_id!r}: give `name` or `owner/name`.") from error
    api = HfApi(token=token, library_name="blockdraft", library_version=version("blockdraft"))
    for tries, wait in enumerate((*WAITS, None), start=1):
        try:
            return push(api)
        except PublishError:
            raise
        except (OSError, ValueError, RuntimeError, HTTPError) as error:
            cause, temporary = _explain(error)
            if not temporary or wait is None:
                tried = f", tried {tries} times" if tries > 1 else ""
                message = f"{repo_id} was not published{tried}: {_scrub(cause, token)}"
                raise PublishError(message, temporary) from error
            logger.info(f"{repo_id}: {_scrub(cause, token)} Trying again in {wait:g} s.")
            sleep(wait)


def _explain(error: Exception) -> tuple[str, bool]:
    """Cause and fix of a failed push in one line, and whether to try again."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
        return "offline mode is on. Unset HF_HUB_OFFLINE and publish again.", False
    if isinstance(error, ValueError) and not isinstance(error, (HfHubHTTPError, json.JSONDecodeError)):
        return " ".join(str(error).split()), False
    for link in chain:
        if isinstance(link, HfHubHTTPError):
            return _explain_status(link.response.status_code, link.server_message)
        if found := re.search(r"HTTP status \w+ error \((\d{3})", str(link)):  # of hf_xet, within a ConnectionError
            return _explain_status(int(found[1]), None)
        if isinstance(link, LocalTokenNotFoundError) or (isinstance(link, PermissionError) and link.errno is None):
            return _explain_status(401, None)
    local = next((link for link in chain if isinstance(link, OSError) and link.errno and link.filename), None)
    if local is not None:
        return f"{Path(local.filename).name} could not be read ({local.strerror}).", False
    return f"the connection to the Hub broke ({type(chain[-1]).__name__}). Publish again later.", True


def _explain_status(status: int, said: str | None) -> tuple[str, bool]:
    said = f", {' '.join(said.split())}" if said else ""
    if status == 401:
        state = "the token is wrong or has expired" if get_token() else "nobody is logged in"
        return f"{state} (401). Log in with `hf auth login`, or set HF_TOKEN, and publish again.", False
    if status == 403:
        return f"no right to write there (403{said}). Take a token or a repository with write access.", False
    if status == 404:
        return f"the Hub does not find it (404{said}). Check its name, and that the token may read it.", False
    if status in (409, 412):
        return "another push came in between. Publish again.", True
    if status in (408, 429) or status >= 500:
        return f"the Hub did not answer ({status}{said}). Publish again later.", True
    return f"the Hub refused ({status}{said}).", False


def _scrub(message: str, token: str | bool | None) -> str:
    """Without tokens and folders of this machine, whoever put them into the message."""
    for secret in {token, get_token()}:
        if isinstance(secret, str) and secret:
            message = message.replace(secret, "***")
    message = re.sub(r"\bhf_\w{8,}", "***", message)
    return re.sub(r"(?<![\w:/.*])(?:/[^\s/'\"]+)+/", "", message)
