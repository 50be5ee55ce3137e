"""Tables of checks and the text of what they find."""

from blockdraft.trainer.diagnostics.findings import Check, fault, findings_text, ok, run_checks, skipped, warning

TABLE = (
    Check("width", lambda config, target: ok(f"{config} and {target}"), "Not for what is ok."),
    Check("rows", lambda rows: skipped("not reached")),
    Check("depth", lambda target: fault(f"{target} layers"), "Load another."),
    Check("dtype", lambda config: warning("float16", "Load it in float32."), "Not for what says more itself."),
)


def test_each_row_gives_a_finding_with_what_to_do():
    found = run_checks(TABLE, {"config": 1, "target": 2, "rows": None})
    assert [(finding.check, finding.status, finding.found, finding.fix) for finding in found] == [
        ("width", "ok", "1 and 2", ""),
        ("depth", "fault", "2 layers", "Load another."),
        ("dtype", "warning", "float16", "Load it in float32."),
    ]
    assert found[1].to_dict() == {"check": "depth", "status": "fault", "found": "2 layers", "mend": "Load another."}


def test_faults_come_first_and_are_counted():
    *lines, count = findings_text(run_checks(TABLE, {"config": 1, "target": 2, "rows": None})).splitlines()
    assert [line.split()[0] for line in lines] == ["fault", "->", "warning", "->", "ok"]
    assert count == "1 faults, 1 warnings, 0 skipped, of 3 checks."
