"""As much of W&B's server as a run needs to begin and to send its rows, until it goes."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import Self


class Server:
    """A server of its own on this host, for the time of a ``with``.

    Attributes:
        url: of it, ``WANDB_BASE_URL``.
        asked: what it was asked for so far: names of GraphQL operations, and paths.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._silent, self._left = False, threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Nobody answers any more: connections are refused."""
        self._left.set()
        self._http.shutdown()
        self._http.server_close()

    def fall_silent(self) -> None:
        """Connections are taken, and never answered."""
        self._silent = True

    def wait_for(self, what: str, seconds: float) -> None:
        """Until it was asked for."""
        end = time.monotonic() + seconds
        while not any(what in each for each in self.asked):
            assert time.monotonic() < end, self.asked
            time.sleep(0.05)

    def _answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        user = {"id": "user", "name": "user"}
        if operation == "Viewer":
            return {"viewer": {**user, "entity": "user", "username": "user", "flags": "{}", "teams": {"edges": []}}}
        if operation == "UpsertBucket":
            project = {"id": "project", "name": given.get("project") or "project", "entity": user}
            bucket = {"id": "run", "name": given.get("name") or "run", "displayName": "run", "description": ""}
            bucket |= {"config": "{}", "sweepName": None, "historyLineCount": 0, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": each, "uploadUrl": f"{self.url}/upload/{each}"} for each in given["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        return {"model": None, "entity": None}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                answer: dict[str, Any] = {}
                if self.path.endswith("/graphql"):
                    asked = json.loads(body)
                    operation = str(asked.get("operationName") or asked["query"].split("(")[0].split()[1])
                    answer = {"data": server._answer(operation, asked.get("variables") or {})}
                    server.asked.append(operation)
                else:
                    server.asked.append(self.path)
                if server._silent:
                    server._left.wait()
                    return
                said = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_PUT = do_POST = handle_any  # noqa: N815  # by these names the base class finds them

        return Handler
