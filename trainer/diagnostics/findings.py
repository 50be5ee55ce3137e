"""What the doctor says: findings, and how they read."""

from collections.abc import Sequence
from dataclasses import dataclass

OK, WARNING, FAULT, SKIPPED = "ok", "warning", "fault", "skipped"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: its name.
        status: `"fault"`: this lowers acceptance, or keeps the draft from working; `"warning"`: it may; `"ok"`;
            `"skipped"`: it could not be looked at.
        found: what there is, with numbers.
        mend: what to do about it; empty where there is nothing to do.
    """

    check: str
    status: str
    found: str
    mend: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, OK, found)


def warning(check: str, found: str, mend: str) -> Finding:
    return Finding(check, WARNING, found, mend)


def fault(check: str, found: str, mend: str) -> Finding:
    return Finding(check, FAULT, found, mend)


def skipped(check: str, found: str, mend: str = "") -> Finding:
    return Finding(check, SKIPPED, found, mend)


def findings_text(findings: Sequence[Finding]) -> str:
    """A line for each check, faults first, each followed by how to mend it; then the count."""
    lines = []
    width = max(len(finding.check) for finding in findings)
    for status in (FAULT, WARNING, SKIPPED, OK):
        for finding in findings:
            if finding.status == status:
                lines.append(f"{status:<8} {finding.check:<{width}}  {finding.found}")
                if finding.mend:
                    lines.append(f"{'':<8} {'':<{width}}  -> {finding.mend}")
    counts = [sum(finding.status == status for finding in findings) for status in (FAULT, WARNING, SKIPPED)]
    lines.append("{} faults, {} warnings, {} skipped, of {} checks.".format(*counts, len(findings)))
    return "\n".join(lines)
