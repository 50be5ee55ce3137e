"""What the doctor says, and the runner of its tables of checks."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

OK, WARNING, FAULT, SKIPPED = "ok", "warning", "fault", "skipped"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        status: `"fault"`: this lowers acceptance, or keeps the draft from working; `"warning"`: it may; `"ok"`;
            `"skipped"`: it could not be looked at.
        found: what there is, with numbers.
        fix: what to do about it; empty where there is nothing to do.
        stops: whether nothing can be measured like this.
        check: name of the check.
    """

    status: str
    found: str
    fix: str = ""
    stops: bool = False
    check: str = ""

    def of(self, check: str, fix: str = "") -> "Finding":
        """With the name of its check and, if it is a fault or a warning without a fix of its own, with this one."""
        lacks_fix = self.status in (FAULT, WARNING) and not self.fix
        return replace(self, check=check, fix=fix if lacks_fix else self.fix)

    def to_dict(self) -> dict[str, str]:
        """As `--output` has it; `mend` holds the fix."""
        return {"check": self.check, "status": self.status, "found": self.found, "mend": self.fix}


ok, warning, fault, skipped = (partial(Finding, status) for status in (OK, WARNING, FAULT, SKIPPED))


class Check(NamedTuple):
    """A row of a table of checks: a name, a function that returns what it found in the parts that its parameters name,
    and what to do about a fault or a warning that does not say so itself."""

    name: str
    find: Callable[..., Finding]
    fix: str = ""


def run_checks(checks: Iterable[Check], parts: Mapping[str, object]) -> list[Finding]:
    """The findings of a table, in its order. A check of something that is not there (`None`) is left out."""
    given = [(check, [parts[name] for name in inspect.signature(check.find).parameters]) for check in checks]
    there = [(check, values) for check, values in given if all(value is not None for value in values)]
    return [check.find(*values).of(check.name, check.fix) for check, values in there]


def findings_text(findings: Sequence[Finding]) -> str:
    """A line for each check, faults first, each followed by what to do about it; then the count."""
    width, lines = max(len(finding.check) for finding in findings), []
    for finding in sorted(findings, key=lambda finding: (FAULT, WARNING, SKIPPED, OK).index(finding.status)):
        lines.append(f"{finding.status:<8} {finding.check:<{width}}  {finding.found}")
        lines += [f"{'':<8} {'':<{width}}  -> {finding.fix}"] if finding.fix else []
    counts = [sum(finding.status == status for finding in findings) for status in (FAULT, WARNING, SKIPPED)]
    return "\n".join([*lines, "{} faults, {} warnings, {} skipped, of {} checks.".format(*counts, len(findings))])
