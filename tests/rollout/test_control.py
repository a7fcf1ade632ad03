"""What an error of a control call says, against small servers that answer as no SGLang server does."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch.distributed as dist

from megatron_gspo.rollout import update_group
from megatron_gspo.rollout.control import ServerError, Servers, call
from megatron_gspo.rollout.probe import server_logprobs
from megatron_gspo.rollout.update_group import UpdateGroup
from tests.ranks import run_ranks


@contextmanager
def answering(answers: dict[str, object], asked: list[tuple[str, object]] | None = None):
    """A server on which each path answers (status, text or JSON) after so many seconds; yields its URL. What it is
    asked, path and JSON body, is added to `asked`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if asked is not None:
                asked.append((self.path, json.loads(text or "null")))
            status, body, delay_s = answers.get(self.path, (404, "no such page", 0.0))
            time.sleep(delay_s)
            self.send_response(status)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def refused(action, *arguments, **options) -> str:
    with pytest.raises(ServerError) as caught:
        action(*arguments, **options)
    return str(caught.value)


def test_a_refused_connection_is_told_as_such_and_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert refused(call, url, "/ready", timeout_s=600) == (
            f"{url}/ready failed after 0.0 s: [Errno 111] Connection refused"
        )


def test_no_answer_names_the_time_that_was_waited():
    with answering({"/ready": (200, "", 3.0)}) as url:
        assert refused(call, url, "/ready", timeout_s=0.3) == f"{url}/ready did not answer within 0.3 s"


def test_a_refusal_carries_the_servers_words():
    with answering({"/begin_weight_update": (400, {"message": "one is open"}, 0.0)}) as url:
        message = refused(Servers([url], 5.0).begin_update)
        assert message == f'{url}/begin_weight_update answered 400: {{"message": "one is open"}}'


HTML = "<html>Sign in</html>"
ASKED = {
    "/pause_generation": ("status", lambda servers: servers.pause()),
    "/continue_generation": ("status", lambda servers: servers.resume()),
    "/begin_weight_update": ("success", lambda servers: servers.begin_update()),
    "/update_weights_from_disk": ("success", lambda servers: servers.load_from_disk("/x", 1)),
    "/model_info": ("weight_version", lambda servers: servers.versions()),
    "/server_info": ("tp_size", lambda servers: servers.tensor_parallel_sizes()),
    "/weights_checker": ("ranks.0.checksums", lambda servers: servers.checksums()),
    "/generate": (
        "meta_info.input_token_logprobs",
        lambda servers: server_logprobs(servers.urls[0], [1, 2], timeout_s=5.0),
    ),
}


@pytest.mark.parametrize("body", [HTML, {"detail": "ok"}, [], None, {"ranks": []}, {"meta_info": 3}])
@pytest.mark.parametrize("path", ASKED)
def test_a_reply_of_another_program_names_the_url_and_what_was_expected(path, body):
    expected, ask = ASKED[path]
    with answering({path: (200, body, 0.0)}) as url:
        message = refused(ask, Servers([url], 5.0))
    assert message.startswith(f"{url}{path}: expected the reply of an SGLang server, with {expected}, got ")
    assert message.endswith("does another program listen there?")


def test_a_200_that_says_no_is_no_success():
    with answering({"/pause_generation": (200, {"status": "busy"}, 0.0)}) as url:
        message = refused(Servers([url], 5.0).pause)
    assert message == f"""{url}/pause_generation answered '{{"status": "busy"}}', expected status: "ok\""""


def test_of_several_servers_one_that_refuses_is_told_while_another_still_waits():
    slow = {"/begin_weight_update": (200, {"success": True}, 5.0)}
    with answering({}) as refusing, answering(slow) as waiting:
        begin = time.monotonic()
        message = refused(Servers([waiting, refusing], 10.0).begin_update)
        assert time.monotonic() - begin < 3
    assert message.startswith(f"{refusing}/begin_weight_update answered 404")


def _join_refused() -> float:
    answers = {"/server_info": (200, {"tp_size": 1}, 0.0), "/init_weights_update_group": (400, "no", 0.0)}
    with answering(answers) as url:
        begin = time.monotonic()
        with pytest.raises(ServerError, match="init_weights_update_group answered 400: no"):
            UpdateGroup(Servers([url], timeout_s=20.0), name="refused", backend="gloo")
        return time.monotonic() - begin


def _join(answers_of: list[dict[str, object]], leave: bool) -> list[tuple[str, dict[str, object]]]:
    """Build an update group with servers of no ranks, which nobody has to join, and leave it; what each was asked."""
    asked: list[tuple[str, dict[str, object]]] = []
    with ExitStack() as stack:
        urls = [stack.enter_context(answering(answers, asked)) for answers in answers_of]
        # The first server is on this machine, the second reached by another interface.
        update_group._own_address = dict(zip(urls, ["127.0.0.1", "10.0.0.7"], strict=True)).__getitem__
        group = UpdateGroup(Servers(urls, timeout_s=20.0), name="mine", backend="gloo")
        held = len(dist.distributed_c10d._world.pg_map)
        if leave:
            group.close()
            assert len(dist.distributed_c10d._world.pg_map) == held - 1
    return [(path, body) for path, body in asked if path != "/server_info"]


DONE = (200, {"success": True}, 0.0)
WILLING = {
    "/server_info": (200, {"tp_size": 0}, 0.0),
    "/init_weights_update_group": DONE,
    "/destroy_weights_update_group": DONE,
}


def test_every_server_is_given_the_address_that_it_can_reach():
    """That of the first server's interface once went to all: 127.0.0.1, where one of them was on this machine."""
    (asked,) = run_ranks(1, _join, [WILLING, WILLING], False)
    assert sorted(body["master_address"] for _, body in asked) == ["10.0.0.7", "127.0.0.1"]


def test_the_update_group_is_left_on_both_sides():
    (asked,) = run_ranks(1, _join, [WILLING, WILLING], True)
    left = [body for path, body in asked if path == "/destroy_weights_update_group"]
    assert left == [{"group_name": "mine"}] * 2


def test_a_server_whose_name_means_nothing_is_named():
    message = refused(update_group._own_address, "http://no-such-node.invalid:30000")
    assert message.startswith("http://no-such-node.invalid:30000 cannot be reached from here: ")


def test_a_server_that_refuses_to_join_the_update_group_is_not_waited_for():
    assert run_ranks(1, _join_refused)[0] < 5
