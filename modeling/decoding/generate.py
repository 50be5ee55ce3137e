"""Decoding without our package: `target.generate(..., custom_generate="user/draft", draft="user/draft")`.

Transformers copies this file alone, from the folder `custom_generate` of a repository: the loop comes with the draft.
"""

import importlib
import os
import weakref
from pathlib import Path

from transformers import AutoModel

# Where repositories are read from. They come for the code; a draft given by name is read in the same way.
LOADING_SETTINGS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
# The draft that was last loaded by name for a target, and what it was loaded from.
_loaded = weakref.WeakKeyDictionary()


def generate(model, inputs=None, draft=None, draft_revision=None, revision=None, **kwargs):
    """Decodes with a block-parallel draft, see its `block_decode`; the tokens are those of the target alone.

    Args:
        model, inputs: the target and the prompts `[batch, prompt]`, which may be called `input_ids` too.
        draft: the draft for this target, loaded, or the name of its repository or directory. By name it runs the code
            of that repository, is put beside the target's head, and is kept for further calls with the same target.
        draft_revision: commit, branch or tag of a draft given by name. Default is `revision`, that of the repository
            with this code: pinning it pins its draft, whose code runs too. A draft of another repository has its own.
        kwargs: all that `generate` takes, `streamer`, `tokenizer` and `confidence_schedule` included.
    """
    if draft is None:
        raise ValueError(
            "This `custom_generate` needs `draft`: a loaded draft, or the name of its repository. It takes no other: "
            "leave out `assistant_model`."
        )
    settings = {name: kwargs.pop(name) for name in LOADING_SETTINGS if name in kwargs}
    if isinstance(draft, (str, os.PathLike)):
        draft = _load(model, str(draft), draft_revision or revision, settings)
    elif draft_revision is not None:
        raise ValueError("`draft_revision` is for a `draft` given by name; this one is loaded already.")
    inputs = kwargs.pop("input_ids", None) if inputs is None else inputs
    if hasattr(draft, "block_decode"):
        return draft.block_decode(model, inputs, **kwargs)
    # It runs the code of blockdraft 0.1.0, where the loop is a function beside the draft's class.
    loop = importlib.import_module(".block_decoding", type(draft).__module__.rpartition(".")[0])
    return loop.block_decode(model, inputs, draft=draft, **kwargs)


def _load(model, name: str, revision: str | None, settings: dict):
    # A quantised head may keep all it has in buffers, and an offloaded one has nothing at hand.
    head = model.get_output_embeddings()
    devices = [tensor.device for tensor in (*head.parameters(), *head.buffers()) if tensor.device.type != "meta"]
    device = devices[0] if devices else "cpu"
    config_file = Path(name, "config.json")
    # A directory may have been saved to anew; `config.json` is what a save writes last.
    saved = config_file.stat().st_mtime_ns if config_file.is_file() else None
    source = (name, revision, saved, device)
    if _loaded.get(model, (None,))[0] != source:
        draft = AutoModel.from_pretrained(name, revision=revision, trust_remote_code=True, **settings)
        _loaded[model] = source, draft.to(device).eval()
    return _loaded[model][1]
