"""Control calls to SGLang servers: blocking, small, and an error says which server answered what.

Requests and replies: `sglang/srt/entrypoints/http_server.py` and `managers/io_struct.py` of sglang 0.5.23.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

# Clusters set http_proxy, and no proxy can reach a server on a compute node.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SHOWN = 2000  # characters of an answer that a message shows


class ServerError(RuntimeError):
    """A server refused a request or did not answer; the message names the server, the request and its answer."""


def call(url: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> Any:
    """POST `body` as JSON (GET without one) and return the decoded reply, text where it is no JSON. Raises
    ServerError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    started = time.monotonic()
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            text = response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        answer = error.read().decode(errors="replace")[:SHOWN]
        raise ServerError(f"{url}{path} answered {error.code}: {answer}") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            raise ServerError(f"{url}{path} did not answer within {timeout_s:g} s") from error
        after_s = time.monotonic() - started
        raise ServerError(f"{url}{path} failed after {after_s:.1f} s: {cause or repr(cause)}") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def field(reply: Any, *path: str | int, where: str) -> Any:
    """`reply[path[0]][path[1]]...`. Raises ServerError, naming `where` the reply is from, for one that has no such
    field: another program listens there, or another version of SGLang."""
    value = reply
    for name in path:
        inside = isinstance(value, Mapping) if isinstance(name, str) else isinstance(value, list)
        if not inside or (name not in value if isinstance(name, str) else name >= len(value)):
            raise ServerError(
                f"{where}: expected the reply of an SGLang server, with {'.'.join(map(str, path))}, got "
                f"{_shown(reply)}; does another program listen there?"
            )
        value = value[name]
    return value


class Servers:
    """Several servers that are always told the same, at once. Every method raises ServerError as soon as one fails."""

    def __init__(self, urls: Sequence[str], timeout_s: float):
        if not urls:
            raise ValueError("no server URLs: give rollout.urls, or rollout.engine=managed to start a server")
        self.urls = tuple(urls)
        self.timeout_s = timeout_s

    def pause(self) -> None:
        """Stop generating; requests in flight go back to the queue and their cache is recomputed after `resume`."""
        self._post("/pause_generation", {"mode": "retract"}, done=("status", "ok"))

    def resume(self) -> None:
        """Generate again."""
        self._post("/continue_generation", {}, done=("status", "ok"))

    def flush_cache(self) -> None:
        """Drop all cached prefixes. Fails while requests run."""
        self._each(lambda _, url: self._call(url, "/flush_cache", {}))  # its 200 comes with plain text

    def begin_update(self) -> None:
        """Open the session in which weights may be loaded."""
        self._post("/begin_weight_update", {})

    def end_update(self) -> None:
        """Close the session: the servers process the loaded weights."""
        self._post("/end_weight_update", {})

    def load_from_disk(self, directory: str, version: int) -> None:
        """Load an HF checkpoint that every server can read. No session around it; not while one is open."""
        body = {"model_path": directory, "weight_version": str(version), "flush_cache": False}
        self._post("/update_weights_from_disk", body)

    def init_group(self, bodies: Sequence[dict[str, Any]]) -> None:
        """Join the process group that each server's own body describes. Blocks until all members have joined."""
        path = "/init_weights_update_group"
        self._each(lambda i, url: _check_done(self._call(url, path, bodies[i]), f"{url}{path}"))

    def destroy_group(self, name: str) -> None:
        """Leave a process group."""
        self._post("/destroy_weights_update_group", {"group_name": name})

    def receive_bucket(self, body: dict[str, Any]) -> None:
        """Receive one broadcast of `body["group_name"]` and load its tensors."""
        self._post("/update_weights_from_distributed", body)

    def versions(self) -> list[int]:
        """The weight version of every server."""
        return [int(version) for version in self._get("/model_info", "weight_version")]

    def tensor_parallel_sizes(self) -> list[int]:
        """The tensor-parallel size of every server."""
        return [int(size) for size in self._get("/server_info", "tp_size")]

    def checksums(self) -> list[dict[str, str]]:
        """Per server: parameter name, as SGLang fuses it, to a digest of its bytes (tensor-parallel rank 0)."""
        path, names = "/weights_checker", ("ranks", 0, "checksums")
        body = {"action": "checksum"}
        return self._each(lambda _, url: field(self._call(url, path, body), *names, where=url + path))

    def _get(self, path: str, name: str) -> list[Any]:
        return self._each(lambda _, url: field(self._call(url, path, None), name, where=url + path))

    def _post(self, path: str, body: dict[str, Any], done: tuple[str, Any] = ("success", True)) -> None:
        self._each(lambda _, url: _check_done(self._call(url, path, body), url + path, done))

    def _call(self, url: str, path: str, body: dict[str, Any] | None) -> Any:
        return call(url, path, body, timeout_s=self.timeout_s)

    def _each[T](self, ask: Callable[[int, str], T]) -> list[T]:
        # A server that fails is told at once; another may be waiting for it until its own time limit.
        pool = ThreadPoolExecutor(len(self.urls))
        asked = [pool.submit(ask, number, url) for number, url in enumerate(self.urls)]
        pool.shutdown(wait=False)
        for future in wait(asked, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in asked]


def _check_done(reply: Any, where: str, done: tuple[str, Any] = ("success", True)) -> None:
    name, wanted = done
    if field(reply, name, where=where) != wanted:
        raise ServerError(f"{where} answered {_shown(reply)}, expected {name}: {json.dumps(wanted)}")


def _shown(reply: Any) -> str:
    text = reply if isinstance(reply, str) else json.dumps(reply)
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}... ({len(text)} characters)"
