"""What the launcher says of ranks that fail, with small programs in their place."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from megatron_gspo.loop import workers
from megatron_gspo.loop.stop_signals import STOP_SIGNALS


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Watches one rank that runs a program, its log holding `log`; the launcher's handlers are put back."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.setattr(workers, "ECHO_S", 0.1)

    def watch(program: str, log: bytes = b"") -> int:
        path = tmp_path / "logs" / "rank_0.log"
        path.parent.mkdir()
        path.write_bytes(log)
        return workers._watch([subprocess.Popen([sys.executable, "-c", program])], [path])

    yield watch
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_log_that_is_no_text_is_shown_all_the_same(watch, capsys):
    """It once ended the launcher itself, and what the rank had said was not seen."""
    assert watch("raise SystemExit(3)", b"first\n" * 40 + b"\xff\xfe broken\nthe cause\n") == 3
    output = capsys.readouterr().out
    assert "rank 0 failed with exit code 3; see " in output
    assert "broken\nthe cause\n" in output and output.count("first") == workers.LAST_WORDS - 2


def test_a_rank_that_the_system_kills_is_said_to_be(watch, capsys):
    assert watch("import os; os.kill(os.getpid(), 9)") == 1
    assert "rank 0 was killed by SIGKILL (by the system, where memory ran out: see `dmesg`)" in capsys.readouterr().out


def test_a_crash_is_told_by_its_signal(watch, capsys):
    assert watch("import os; os.abort()") == 1
    assert "rank 0 was killed by SIGABRT; see" in capsys.readouterr().out


def test_signals_that_a_process_was_started_to_ignore_stay_ignored():
    program = """
import os, signal
from megatron_gspo.loop.stop_signals import listen
heard = []
listen(lambda number, frame: heard.append(number))
for number in (signal.SIGHUP, signal.SIGUSR1):
    os.kill(os.getpid(), number)
print(heard == [signal.SIGUSR1])
"""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    done = subprocess.run([sys.executable, "-c", program], preexec_fn=ignore, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
