"""An HTTP endpoint of a model whose replies the test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""Status, and the body: JSON, or text as it is."""


@dataclass
class ModelEndpoint:
    """`requests` holds (path, body) of every request, in the order of arrival.

    clients: The address of each connection.
    """

    url: str
    requests: list[tuple[str, Any]] = field(default_factory=list)
    clients: set[Any] = field(default_factory=set)


def chat(content: str, tokens: int | None = 10, finish_reason: str = "stop") -> Reply:
    """Return a reply of Chat Completions. tokens: None: it does not report them."""
    message = {"role": "assistant", "content": content}
    usage = {} if tokens is None else {"usage": {"total_tokens": tokens}}
    return 200, {"choices": [{"message": message, "finish_reason": finish_reason}], **usage}


@contextmanager
def model_endpoint(answer: Callable[[Any], Reply]) -> Iterator[ModelEndpoint]:
    """Serve what `answer` returns for a body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.requests.append((self.path, body))
            served.clients.add(self.client_address)
            status, reply = answer(body)
            packed = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
            self.send_response(status)
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(packed)))
            self.end_headers()
            self.wfile.write(packed)

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = ModelEndpoint(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
