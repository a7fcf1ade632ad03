"""Control calls to SGLang servers: blocking, small, and an error says which server answered what.

Requests and replies: `sglang/srt/entrypoints/http_server.py` and `managers/io_struct.py` of sglang 0.5.23.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Clusters set http_proxy, and no proxy can reach a server on a compute node.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """A server refused a request or did not answer; the message names the server, the request and its answer."""


def call(url: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> Any:
    """POST `body` as JSON (GET without one) and return the decoded reply, text where it is no JSON. Raises
    ServerError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        answer = error.read().decode(errors="replace")[:2000]
        raise ServerError(f"{url}{path} answered {error.code}: {answer}") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise ServerError(f"{url}{path} did not answer within {timeout_s:g} s: {error}") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class Servers:
    """Several servers that are always told the same, at once. Every method raises ServerError if one of them fails."""

    def __init__(self, urls: Sequence[str], timeout_s: float):
        if not urls:
            raise ValueError("no server URLs: give rollout.urls, or rollout.engine=managed to start a server")
        self.urls = tuple(urls)
        self.timeout_s = timeout_s

    def pause(self) -> None:
        """Stop generating; requests in flight go back to the queue and their cache is recomputed after `resume`."""
        self._post("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """Generate again."""
        self._post("/continue_generation", {})

    def flush_cache(self) -> None:
        """Drop all cached prefixes. Fails while requests run."""
        self._post("/flush_cache", {})

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
        self._each(lambda i, url: self._call(url, "/init_weights_update_group", bodies[i]))

    def destroy_group(self, name: str) -> None:
        """Leave a process group."""
        self._post("/destroy_weights_update_group", {"group_name": name})

    def receive_bucket(self, body: dict[str, Any]) -> None:
        """Receive one broadcast of `body["group_name"]` and load its tensors."""
        self._post("/update_weights_from_distributed", body)

    def versions(self) -> list[int]:
        """The weight version of every server."""
        return [int(reply["weight_version"]) for reply in self._get("/model_info")]

    def tensor_parallel_sizes(self) -> list[int]:
        """The tensor-parallel size of every server."""
        return [int(reply["tp_size"]) for reply in self._get("/server_info")]

    def checksums(self) -> list[dict[str, str]]:
        """Per server: parameter name, as SGLang fuses it, to a digest of its bytes (tensor-parallel rank 0)."""
        replies = self._each(lambda _, url: self._call(url, "/weights_checker", {"action": "checksum"}))
        return [reply["ranks"][0]["checksums"] for reply in replies]

    def _get(self, path: str) -> list[Any]:
        return self._each(lambda _, url: self._call(url, path, None))

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self._each(lambda _, url: self._call(url, path, body))

    def _call(self, url: str, path: str, body: dict[str, Any] | None) -> Any:
        return call(url, path, body, timeout_s=self.timeout_s)

    def _each(self, ask: Callable[[int, str], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.urls)) as pool:
            return list(pool.map(ask, range(len(self.urls)), self.urls))
