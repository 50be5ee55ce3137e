"""Errors of the Hub, the client and the disk: what is tried again, and what the one line says."""

import huggingface_hub.constants
import pytest
from hub_server import TOKEN

from blockdraft.hub_cards.retries import PublishError, _scrub, with_retries

REPO = "user/draft"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("Network error: HTTP status client error (403 Forbidden), domain: x"), "no right to write"),
        (PermissionError("Authentication error"), "nobody is logged in"),
        (ConnectionError("Network error: dns error"), "tried 3 times: the connection to the Hub broke"),
        (
            FileNotFoundError(2, "No such file or directory", "/home/me/run/config.json"),
            ": config.json could not be read",
        ),
        (ValueError("Invalid file /home/me/run/config.json"), ": Invalid file config.json$"),
    ],
)
def test_errors_of_the_client_and_of_hf_xet(hub, monkeypatch, error, message):
    """`hf_xet`, which is not spoken here, reports as built-in errors what the Hub answers."""
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "no-token")

    def push(api):
        raise error

    with pytest.raises(PublishError, match=message) as caught:
        with_retries(push, REPO)
    assert "/home" not in str(caught.value)


def test_no_token_and_no_folder_in_what_is_said(hub, tmp_path):
    assert _scrub(f"{TOKEN} hf_anotherSecret at {tmp_path}/x", None) == "*** *** at x"
