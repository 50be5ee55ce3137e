"""What a card may name: repositories, data sets, licences. The Hub validates the rest before a push sends any file."""

import difflib
import re

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

logger = logging.get_logger(__name__)

LICENSES_PAGE = "https://huggingface.co/docs/hub/repositories-licenses"
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
    """.split()
)
OTHER = "other"
IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.+-]*")
# Of a file in the repository, or a link that can stand in Markdown.
LICENSE_LINK = re.compile(r"LICENSE(\.md|\.txt)?|https?://[^\s()<>\"]+")
DATA_FILE = re.compile(r".*\.(jsonl?|parquet|csv|tsv|txt|arrow|gz|zst|zip)")


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


def check_license(license: str | None, license_name: str | None = None, license_link: str | None = None) -> None:
    """Checks how the licence of a draft's weights is stated.

    Args:
        license: The Hub's identifier, such as `apache-2.0`, or `other` for a licence that has none.
        license_name, license_link: For `other`: what the licence is called, and where it can be read, a URL or
            `LICENSE` in the repository.

    Raises:
        ValueError: if `license` is no identifier (a path, several words), if name or link are missing beside `other`
            or given beside anything else, or if the link is neither a URL nor a licence file.

    Warns:
        of an identifier that is not in the Hub's list: the Hub decides when the card is pushed.
    """
    for setting, value in (("license_name", license_name), ("license_link", license_link)):
        if license == OTHER and not (value or "").strip():
            raise ValueError(f"`{setting}` is missing: `license` other is stated by a name and a link.")
        if license != OTHER and value is not None:
            raise ValueError(f"`{setting}` belongs to `license` other, and `license` is {license!r}: set that.")
    if license == OTHER:
        if not LICENSE_LINK.fullmatch(license_link):
            raise ValueError(
                f"`license_link` is {license_link!r}: give a URL (https://...), or LICENSE, LICENSE.md or LICENSE.txt "
                "for a file in the repository."
            )
        return
    if license is None or license in LICENSES:
        return
    if not IDENTIFIER.fullmatch(license):
        raise ValueError(
            f"`license` is {license!r}: give an identifier from {LICENSES_PAGE}, or `other` with `license_name` and "
            "`license_link`; leave it out and the card points to the target's terms."
        )
    near = difflib.get_close_matches(license.lower(), LICENSES, n=1)
    logger.warning_once(
        f"`license` is {license!r}, which is not in the Hub's list{f' (did you mean {near[0]}?)' if near else ''}. "
        f"The Hub may refuse the card: see {LICENSES_PAGE}, or set `license` to other, with `license_name` and "
        "`license_link`."
    )


def check_datasets(datasets: list[str]) -> None:
    """Raises a `ValueError` unless each is the id of a Hub dataset."""
    for name in [datasets] if isinstance(datasets, str) else datasets:
        if not is_hub_id(name) or DATA_FILE.fullmatch(name):
            raise ValueError(
                f"`datasets` has {name!r}, which is no Hub dataset (`owner/name`): a card links to what it names. "
                "Leave files and folders out."
            )
