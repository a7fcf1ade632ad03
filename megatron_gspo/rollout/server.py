"""A managed SGLang server: started, watched, stopped, and gone when whoever started it is gone."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections import deque
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType

from megatron_gspo.config.schema import ServerConfig
from megatron_gspo.rollout.command import launch_command
from megatron_gspo.rollout.control import ServerError, call
from megatron_gspo.rollout.cpu.plugin import check_version

TAIL_LINES = 30
POLL_S = 0.1
# On a GPU the server releases its resources in order, in about 5 s; on a CPU there is nothing worth waiting for.
STOP_GRACE_S = {"cuda": 20.0, "cpu": 0.0}
STOP_TIMEOUT_S = 10.0  # beyond the grace


class ServerFailed(RuntimeError):
    """The server died or did not become healthy in time; the message ends with its last words."""


class ManagedServer:
    """One `sglang.launch_server` on this machine. `start()`, then `wait_healthy()`; as a context manager it is stopped.

    `context_length` is the longest prompt plus response in tokens. Output goes to `log_path`. On CPU (`on_cpu`),
    SGLang runs in float32 with the stand-in for its CPU kernels.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: ServerConfig,
        *,
        log_path: Path,
        on_cpu: bool,
        context_length: int,
        host: str = "127.0.0.1",
    ):
        if not (Path(model_path) / "config.json").is_file():
            raise ValueError(f"policy.hf={model_path}: no config.json there; give the directory of an HF checkpoint")
        port = config.port or _free_port(host)
        self._host, self._port = host, port
        self.url = f"http://{host}:{port}"
        self.log_path = log_path
        self._on_cpu = on_cpu
        self._grace_s = STOP_GRACE_S["cpu" if on_cpu else "cuda"]
        self._timeout_s = config.start_timeout_s
        self._command, self._environment = launch_command(
            model_path,
            config,
            host=host,
            port=port,
            on_cpu=on_cpu,
            context_length=context_length,
            environment=os.environ,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    def start(self) -> None:
        """Start the server and return at once. Raises ValueError for a port that is taken and, on CPU, RuntimeError for
        an SGLang that the plugin does not know."""
        assert self._process is None, f"the server at {self.url} was started before"
        check_port(self._port, self._host)
        if self._on_cpu:
            check_version()
        self._started_at = time.monotonic()
        supervisor = [sys.executable, "-m", "megatron_gspo.rollout.supervise", str(os.getpid()), str(self._grace_s)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*supervisor, *self._command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_healthy(self, watch: Connection | None = None) -> float:
        """Block until the server has answered its own warm-up request; returns the seconds since `start()`.

        Raises ServerFailed when it died or `start_timeout_s` passed, and EOFError when something happens on `watch`,
        a pipe on which nothing is sent meanwhile: its other end was closed.
        """
        while not self._is_ready():
            if ended := self.last_words():
                raise ServerFailed(ended)
            waited_s = time.monotonic() - self._started_at
            if waited_s > self._timeout_s:
                raise ServerFailed(
                    f"the SGLang server at {self.url} is not healthy after rollout.server.start_timeout_s="
                    f"{self._timeout_s:g} s; raise it if the model only loads slowly{self._tail()}"
                )
            if watch is None:
                time.sleep(POLL_S)
            elif wait([watch], POLL_S):
                raise EOFError("whoever waited for the server is gone")
        return time.monotonic() - self._started_at

    def poll(self) -> int | None:
        """Exit code of the server, None while it runs."""
        assert self._process is not None, "start() first"
        return self._process.poll()

    def last_words(self) -> str:
        """How the server ended, with the end of its log; nothing while it runs."""
        code = self.poll()
        if code is None:
            return ""
        lived_s = time.monotonic() - self._started_at
        return f"the SGLang server ended with exit code {code} after {lived_s:.0f} s{self._tail()}"

    def stop(self) -> None:
        """End the server and all its processes, and wait for that. Harmless when it has ended or never started."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(self._grace_s + STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # SIGTERM came before the supervisor listened; the server sees it die
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ManagedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        try:
            call(self.url, "/ready", timeout_s=5.0)
        except ServerError:  # not listening yet, or 503: still warming up
            return False
        return True

    def _tail(self) -> str:
        with self.log_path.open(errors="replace") as log:
            last = "".join(deque(log, TAIL_LINES))
        return f"; the end of {self.log_path}:\n{last}"


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Raise ValueError unless `port` (`rollout.server.port`; 0 is any) can be listened on. SGLang would say so only
    after it has loaded the model."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the server: connections just closed do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
            raise ValueError(f"rollout.server.port = {port}: {reason}; 0 picks a free one") from None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
