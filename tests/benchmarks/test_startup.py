"""CPU time of fresh processes."""

import subprocess
import sys

import pytest

from benchmarks import startup


def test_cpu_time_is_that_of_the_command():
    idle = startup.cpu_seconds([sys.executable, "-c", "import time; time.sleep(0.3)"], runs=2)
    busy = startup.cpu_seconds([sys.executable, "-c", "for _ in range(10_000_000): pass"], runs=2)
    assert 0 < idle < busy
    with pytest.raises(subprocess.CalledProcessError):
        startup.cpu_seconds([sys.executable, "-c", "raise SystemExit(3)"], runs=1)


def test_the_table_has_a_row_each(monkeypatch, capsys):
    monkeypatch.setattr(startup, "cpu_seconds", lambda command, runs: 2.0 if "-m" in command else 4.0)
    startup.main(runs=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(startup.IMPORTS) + len(startup.COMMANDS)
    assert lines[-1] == "| `blockdraft train --help_all` | 2.00 | 0.50 |"
