"""A tree of processes that ignores SIGTERM, as a crashed server's may, under the supervisor."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

# Writes its own and its child's pid, then neither ends by itself.
STUBBORN = textwrap.dedent(
    """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child:
        print(os.getpid(), child, flush=True)
        if sys.argv[1:] == ["crash"]:
            os._exit(3)
    time.sleep(600)
    """
)
# Stands for the trainer: starts the supervisor with itself as the parent to watch.
TRAINER = textwrap.dedent(
    """
    import os, subprocess, sys
    subprocess.run([sys.executable, "-m", "megatron_gspo.rollout.supervise", str(os.getpid()), "60", *sys.argv[1:]])
    """
)


def start(command: list[str]) -> tuple[subprocess.Popen, list[psutil.Process]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


def supervised(grace_s: float, *arguments: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
    supervisor = [sys.executable, "-m", "megatron_gspo.rollout.supervise", str(os.getpid()), str(grace_s)]
    return start([*supervisor, sys.executable, "-c", STUBBORN, *arguments])


def gone(processes: list[psutil.Process], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            return True
        time.sleep(0.05)
    return False


def test_sigterm_ends_the_whole_tree_after_the_grace_period():
    supervisor, tree = supervised(0.5)
    begin = time.monotonic()
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(5) == 128 + signal.SIGKILL
    assert time.monotonic() - begin > 0.5
    assert gone(tree)


def test_a_crash_takes_the_orphans_along_and_keeps_the_exit_code():
    supervisor, tree = supervised(60.0, "crash")
    assert supervisor.wait(5) == 3
    assert gone(tree)


def test_nothing_outlives_a_parent_killed_by_sigkill():
    trainer, tree = start([sys.executable, "-c", TRAINER, sys.executable, "-c", STUBBORN])
    assert len(tree) == 2
    trainer.kill()
    trainer.wait()
    assert gone(tree)


def test_a_supervisor_killed_by_sigkill_takes_the_command_along():
    """Nothing else would end it: it has a session of its own."""
    supervisor, (root, child) = supervised(60.0)
    supervisor.kill()
    supervisor.wait()
    assert gone([root])
    child.kill()  # this one, unlike SGLang's, does not end with its parent


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_signals_meant_for_the_trainer_do_not_end_the_server(number):
    supervisor, tree = supervised(0.0)
    supervisor.send_signal(number)
    tree[0].send_signal(number)
    assert not gone(tree, within_s=0.5)
    supervisor.terminate()
    assert gone(tree)
    supervisor.wait(5)
