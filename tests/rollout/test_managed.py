"""Starting and waiting, with a small program in the server's place; the real one is in test_server.py."""

import multiprocessing
import signal
import socket
import sys
import time
from contextlib import contextmanager

import pytest

from megatron_gspo.config.schema import ServerConfig
from megatron_gspo.rollout import server as server_module
from megatron_gspo.rollout.server import ManagedServer, ServerFailed, check_port


@pytest.fixture
def start(monkeypatch, tmp_path):
    def start(program: str, timeout_s: float = 60.0) -> ManagedServer:
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(server_module, "launch_command", lambda *args, **options: (command, {}))
        config = ServerConfig(start_timeout_s=timeout_s)
        log = tmp_path / "logs" / "server.log"
        (tmp_path / "config.json").write_text("{}")
        server = ManagedServer(tmp_path, config, log_path=log, on_cpu=False, context_length=64)
        server.start()
        return server

    return start


@contextmanager
def closing_server(server: ManagedServer):
    try:
        yield server
    finally:
        server.stop()


def test_a_server_that_dies_is_reported_at_once_with_its_last_words(start):
    server = start("for i in range(99): print('line', i, flush=True)\nraise SystemExit('out of memory')")
    with pytest.raises(ServerFailed) as error:
        server.wait_healthy()
    text = str(error.value)
    assert "ended with exit code 1" in text
    assert "server.log:" in text and "line 98\n" in text and "out of memory" in text
    assert "line 60\n" not in text


def test_a_server_has_last_words_once_it_has_ended(start):
    server = start("import sys; print('out of memory', flush=True); sys.stdin.read(); raise SystemExit(3)")
    server._process.wait(30)
    assert "ended with exit code 3 after " in server.last_words() and "out of memory" in server.last_words()
    with closing_server(start("import time; time.sleep(60)")) as running:
        assert running.last_words() == ""


def test_a_server_that_never_gets_healthy_is_reported_with_the_key_to_raise(start):
    server = start("import time; print('loading'); time.sleep(60)", timeout_s=0.5)
    with closing_server(server), pytest.raises(ServerFailed, match=r"(?s)start_timeout_s=0.5 s.*server.log"):
        server.wait_healthy()
    assert server.poll() is not None


def test_waiting_ends_when_the_one_who_asked_is_gone(start):
    server = start("import time; time.sleep(60)")
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with closing_server(server), pytest.raises(EOFError):
        server.wait_healthy(watch=ours)


def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config, log = ServerConfig(port=port), tmp_path / "server.log"
        server = ManagedServer(tmp_path, config, log_path=log, on_cpu=False, context_length=64)
        with pytest.raises(ValueError) as caught:
            server.start()
    assert str(caught.value) == f"rollout.server.port = {port}: in use; 0 picks a free one"
    assert not log.exists()


def test_a_port_whose_connections_were_just_closed_is_free():
    """They stay in TIME_WAIT for a minute, in which a run could not be repeated."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the port
        client.close()
    check_port(port)


def test_a_port_that_needs_privileges_says_so(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ValueError, match=r"server.port = 80: cannot be listened on: Permission denied; 0 picks"):
        check_port(80)


def test_stopping_twice_is_harmless(start):
    server = start("import time; time.sleep(60)")
    server.stop()
    server.stop()
    assert server.poll() is not None


def test_a_directory_without_a_model_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match=r"policy.hf=.*nowhere: no config.json"):
        ManagedServer(tmp_path / "nowhere", ServerConfig(), log_path=tmp_path / "log", on_cpu=True, context_length=64)


def test_stopping_at_once_ends_even_where_sigterm_is_ignored(start, monkeypatch):
    """A supervisor that inherits an ignored SIGTERM, and is stopped before it listens, once was waited for for ever."""
    monkeypatch.setattr(server_module, "STOP_GRACE_S", {"cuda": 0.0, "cpu": 0.0})
    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 1.0)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        server = start("import time; time.sleep(600)")
        started = time.monotonic()
        server.stop()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert server.poll() is not None
    assert time.monotonic() - started < 30
