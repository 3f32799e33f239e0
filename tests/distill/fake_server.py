"""An HTTP server on loopback that answers as it is told to: shared by the tests of the client, of served responses and of served laws."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None
"""Status, JSON value or text, headers; None: the connection is dropped."""
OWNER = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "openai": "acme"}


@dataclass
class Fake:
    """A running server: its address and what it was asked."""

    url: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0

    def asked(self, path: str) -> list[Any]:
        """Bodies of the requests to one path."""
        return [body for at, body in self.calls if at == path]


@contextlib.contextmanager
def fake(answer: Callable[[str, Any], Reply], kind: str = "vllm", **about: Any) -> Iterator[Fake]:
    """A server of a kind; ``answer`` is asked first, and says ``(0, None)`` where the kind's own pages are to answer."""
    state, lock, now = Fake(), threading.Lock(), [0]
    pages: dict[str, Any] = {
        "/health": "", "/v1/models": {"data": [{"id": "m", "owned_by": OWNER[kind], "max_model_len": about.get("context", 512)}]},
        "/version": {"version": "0.33.0"}, "/metrics": about.get("metrics", ""),
        "/get_server_info": {"version": "0.5.23", "speculative_algorithm": about.get("speculative")},
        "/props": {"build_info": "b1", "default_generation_settings": {
            "n_ctx": about.get("context", 512), "params": {"speculative.types": "none"}}},
        "/slots": [{"id": 0, "speculative": bool(about.get("speculative"))}],
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def _go(self, body: Any) -> None:
            with lock:
                state.calls.append((self.path, body))
                state.headers.append(dict(self.headers))
                now[0] += 1
                state.most_at_once = max(state.most_at_once, now[0])
            try:
                reply = answer(self.path, body)
            finally:
                with lock:
                    now[0] -= 1
            if reply is not None and reply[0] == 0:
                reply = (200, pages[self.path]) if self.path in pages else (404, {"error": {"message": "no such page"}})
            if reply is None:
                self.close_connection = True
                self.connection.close()
                return
            data = (reply[1] if isinstance(reply[1], str) else json.dumps(reply[1])).encode()
            self.send_response(reply[0])
            for name, value in (reply[2] if len(reply) > 2 else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may have gone
                self.wfile.write(data)

        def do_GET(self) -> None:
            self._go(None)

        def do_POST(self) -> None:
            self._go(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
