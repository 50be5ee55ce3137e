"""What every test file shares: seeds, threads, tokenizers, a Hub and drafts."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub.constants
import huggingface_hub.utils._http
import pytest
import torch
from chat_templates import CHATML
from goldens import load_golden
from hub_server import EXPIRED_TOKEN, READ_TOKEN, TOKEN, hub_server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def golden():
    """The loader itself: `golden("k3_mla")` gives a `Golden`."""
    return load_golden


@pytest.fixture(scope="session")
def chatml_backend() -> str:
    """A byte-level BPE tokenizer trained on a few sentences, serialised."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sentences = [
        "the user asks what the weather is like today",
        "the assistant answers that it is fine",
        "hello there",
    ]
    tokenizer.train_from_iterator(sentences * 4, trainer)
    return tokenizer.to_str()


@pytest.fixture
def chat_tokenizer(chatml_backend) -> PreTrainedTokenizerFast:
    """A ChatML tokenizer without `{% generation %}` tags; a fresh one for each test."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(chatml_backend), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """A Hub that the client in this process talks to, logged in as `user`, with an empty cache; waits between tries
    take no time."""
    with hub_server() as server:
        server.users = {TOKEN: "user", EXPIRED_TOKEN: None, READ_TOKEN: "another"}
        files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it keeps the Hub that it was made for
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub_cache")))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda seconds: None))
        monkeypatch.setattr("blockdraft.hub_cards.retries.WAITS", (0.0, 0.0))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        huggingface_hub.utils._http.close_session()


@pytest.fixture(scope="session")
def sound_drafts(tmp_path_factory) -> dict[str, Path]:
    """By kind, drafts of which the doctor has nothing to say; not to be written to."""
    from doctor_patients import write_sound_drafts  # which imports this module

    return write_sound_drafts(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def admit(sound_drafts, tmp_path) -> Callable:
    """Makes a `Patient` with a draft of a kind, to plant a fault in."""
    from doctor_patients import admit_patient

    return lambda kind: admit_patient(sound_drafts[kind], tmp_path / kind)


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory):
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def pytest_configure():
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


def pytest_collection_finish():
    """What is imported by now lives as long as the tests: each collection of garbage, of which every training makes
    one, would look through all of it."""
    gc.collect()
    gc.freeze()
