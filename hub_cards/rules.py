"""What the Hub's validation of a card's metadata accepts, checked without the Hub.

The rules are those of https://huggingface.co/docs/hub/model-cards and of the Hub's `validate-yaml`, which
`huggingface_hub` asks at an upload: a wrong card fails there, after the training. Stricter are: no null, NaN or empty
value, no local path, `license: other` with a name and a link.
"""

import difflib
import math
import re
from collections.abc import Iterator

import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id

# https://huggingface.co/docs/hub/repositories-licenses
LICENSES = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
    other
    """.split()
)
RELATIONS = ("adapter", "merge", "quantized", "finetune")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual")
DATA_FILE = re.compile(r".*\.(jsonl?|parquet|csv|tsv|txt|arrow|gz|zst|zip)")
LICENSE_FILE = re.compile(r"LICENSE(\.md|\.txt)?|https?://\S+")


def is_repo_id(name) -> bool:
    """Whether `name` has the form of a Hub repository's: `owner/name`, or `name` for a few old ones."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return isinstance(name, str)


def is_hub_id(name) -> bool:
    """Whether `name` has the form `owner/name` of a Hub repository."""
    return is_repo_id(name) and name.count("/") == 1


def check_license(license: str) -> None:
    """Raises a `ValueError` unless the Hub knows the licence by this name and the name says all."""
    if license in LICENSES - {"other"}:
        return
    near = difflib.get_close_matches(str(license).lower(), LICENSES - {"other"}, n=1)
    hint = f" ({near[0]}?)" if near else ""
    raise ValueError(
        f"`license` is {license!r}, which is not how the Hub calls a licence{hint}: take a name of "
        "https://huggingface.co/docs/hub/repositories-licenses, or leave it out and the card points to the target."
    )


def check_datasets(datasets: list[str]) -> None:
    """Raises a `ValueError` unless each is the id of a Hub dataset."""
    for name in [datasets] if isinstance(datasets, str) else datasets:
        if not is_hub_id(name) or DATA_FILE.fullmatch(name):
            raise ValueError(
                f"`datasets` has {name!r}, which is no Hub dataset (`owner/name`): a card links to what it names. "
                "Leave files and folders out."
            )


def validate_card(text: str) -> dict:
    """Checks the metadata of a model card as the Hub would.

    Args:
        text: the whole `README.md`.

    Returns:
        The metadata.

    Raises:
        ValueError: for the first thing that is wrong: where it is, what it is, what it must be.
    """
    block = REGEX_YAML_BLOCK.search(text)
    if block is None:
        raise ValueError("The card has no metadata: a README.md begins with a YAML block between two lines of `---`.")
    try:
        data = yaml.load(block[2], _UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(f"The card's metadata is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict) or not data:
        raise ValueError("The card's metadata must be `key: value` lines.")
    for where, value in _leaves(data):
        empty = value is None or value == "" or value == [] or value == {}
        _check(not empty, where, value, "leave it out")
        _check(not isinstance(value, float) or math.isfinite(value), where, value, "it must be finite, or left out")
    _check_license_fields(data)
    _check_base_model(data)
    for key in ("datasets", "metrics", "tags", "language"):
        for name in _strings(data, key):
            _check(key != "datasets" or is_repo_id(name), key, name, "it must be the id of a Hub dataset")
            _check(key != "language" or LANGUAGE.fullmatch(name), key, name, "it must be an ISO 639 code, such as en")
            _check("\n" not in name, key, name, "it must be one line")
    for key in ("library_name", "pipeline_tag"):
        _check(re.fullmatch(r"[\w.+-]+", str(data.get(key, "-"))), key, data.get(key), "it must be one word")
    if "model-index" in data:
        _check_model_index(data["model-index"])
    return data


class _UniqueKeys(yaml.SafeLoader):
    """Like the Hub's parser, this one does not take a key twice."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"`{twice[0]}` is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _check(holds, where: str, value, must: str) -> None:
    if not holds:
        raise ValueError(f"The card's `{where}` is {value!r}: {must}.")


def _leaves(value, where: str = "") -> Iterator[tuple[str, object]]:
    """Every value that is no list or mapping with something in it, and where it is."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from _leaves(item, f"{where}[{i}]")
    else:
        yield where, value


def _strings(data: dict, key: str) -> list[str]:
    """A setting that is a string or a list of them."""
    values = data.get(key, [])
    values = values if isinstance(values, list) else [values]
    for value in values:
        _check(isinstance(value, str), key, value, "it must be text")
    return values


def _check_license_fields(data: dict) -> None:
    licenses = _strings(data, "license")
    for license in licenses:
        _check(
            license in LICENSES, "license", license, "the Hub does not know it; take `other` with a name and a link"
        )
    if "other" in licenses:
        for key in ("license_name", "license_link"):
            _check(isinstance(data.get(key), str), key, data.get(key), "`license: other` needs it")
    if "license_link" in data:
        link = data["license_link"]
        _check(LICENSE_FILE.fullmatch(str(link)), "license_link", link, "it must be LICENSE, LICENSE.md or a URL")


def _check_base_model(data: dict) -> None:
    for key in ("base_model", "new_version"):
        for name in _strings(data, key):
            _check(is_repo_id(name), key, name, "it must be the id of a Hub model, not a path")
    if "base_model_relation" in data:
        relation = data["base_model_relation"]
        _check(relation in RELATIONS, "base_model_relation", relation, f"it must be one of {', '.join(RELATIONS)}")
        _check("base_model" in data, "base_model_relation", relation, "it says nothing without a `base_model`")


def _check_model_index(models) -> None:
    for i, model in enumerate(_items(models, "model-index")):
        where = f"model-index[{i}]"
        _check_text(model, ("name",), where)
        for j, result in enumerate(_items(model.get("results"), f"{where}.results")):
            here = f"{where}.results[{j}]"
            for part, required, optional in (
                ("task", ("type",), ("name",)),
                ("dataset", ("type", "name"), ("config", "split", "revision")),
            ):
                _check(isinstance(result.get(part), dict), f"{here}.{part}", result.get(part), "it must be a mapping")
                _check_text(result[part], required, f"{here}.{part}", optional)
            for k, metric in enumerate(_items(result.get("metrics"), f"{here}.metrics")):
                place = f"{here}.metrics[{k}]"
                _check_text(metric, ("type",), place, ("name", "config"))
                value = metric.get("value")
                numeric = isinstance(value, (int, float, str)) and not isinstance(value, bool)
                _check(numeric, f"{place}.value", value, "it must be a number")


def _items(value, where: str) -> list[dict]:
    is_list = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    _check(is_list, where, value, "it must be a list of mappings")
    return value


def _check_text(mapping: dict, required: tuple[str, ...], where: str, optional: tuple[str, ...] = ()) -> None:
    for key in required:
        _check(isinstance(mapping.get(key), str), f"{where}.{key}", mapping.get(key), "it must be text")
    for key in optional:
        _check(isinstance(mapping.get(key, ""), str), f"{where}.{key}", mapping.get(key), "it must be text")
