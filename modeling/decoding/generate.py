"""`generate` of a draft's repository, for use without any package of ours:

```python
target.generate(**inputs, custom_generate="user/draft", draft="user/draft", trust_remote_code=True)
```
"""

import os
import weakref
from pathlib import Path

import torch
from transformers import AutoModel, PreTrainedModel

from .block_decoding import block_decode
from .generate_call import BatchDecodeOutput, BlockDecodeOutput, call_generate
from .plain_decoding import device_of

# Where repositories are read from. They come for the code; a draft given by name is read in the same way.
LOADING_SETTINGS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")

# The draft that was last loaded by name for a target, and what it was loaded from.
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple, PreTrainedModel]] = weakref.WeakKeyDictionary()


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    draft: PreTrainedModel | str | os.PathLike | None = None,
    draft_revision: str | None = None,
    revision: str | None = None,
    assistant_model: PreTrainedModel | None = None,
    **kwargs,
) -> BlockDecodeOutput | BatchDecodeOutput | torch.LongTensor:
    """Decodes with a block-parallel draft, see [`block_decode`]; the tokens are those of the target alone.

    Args:
        model: the target.
        inputs: `[batch, prompt]` int64, padded on the left; as in `generate` they may be called `input_ids` too.
        draft: the draft for this target, loaded, or the name of its repository or directory. By name it runs the code
            of that repository, is put beside the target's head, and is kept for further calls with the same target.
        draft_revision: commit, branch or tag of a draft given by name; default is `revision`, so that pinning the code
            of a repository pins its draft, whose code runs too. A draft of another repository has its own.
        revision: that of the repository with this code, from where `generate` loaded this function.
        assistant_model: must be `None`; transformers' own assisted decoding has this name for its draft.
        kwargs: all that `generate` takes, `streamer`, `tokenizer` and `confidence_schedule` included.

    Raises:
        ValueError: without a draft, with one under another name, or as [`block_decode`].
    """
    if assistant_model is not None:
        raise ValueError("This `custom_generate` takes its draft as `draft`: leave out `assistant_model`.")
    if draft is None:
        raise ValueError("This `custom_generate` needs `draft`: a loaded draft, or the name of its repository.")
    settings = {name: kwargs.pop(name) for name in LOADING_SETTINGS if name in kwargs}
    if isinstance(draft, (str, os.PathLike)):
        draft = _load(model, str(draft), draft_revision or revision, settings)
    elif draft_revision is not None:
        raise ValueError("`draft_revision` is for a `draft` given by name; this one is loaded already.")
    return call_generate(block_decode, model, inputs, draft=draft, **kwargs)


def _load(model: PreTrainedModel, name: str, revision: str | None, settings: dict) -> PreTrainedModel:
    device = device_of(model.get_output_embeddings(), torch.device("cpu"))
    config_file = Path(name, "config.json")
    # A directory may have been saved to anew; `config.json` is what a save writes last.
    saved = config_file.stat().st_mtime_ns if config_file.is_file() else None
    source = (name, revision, saved, device)
    known_source, draft = _loaded.get(model, (None, None))
    if known_source != source:
        draft = AutoModel.from_pretrained(name, revision=revision, trust_remote_code=True, **settings)
        draft = draft.to(device).eval()
        _loaded[model] = source, draft
    return draft
