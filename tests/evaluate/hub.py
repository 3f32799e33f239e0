"""A stand-in of the Hub's HTTP API on loopback: what huggingface_hub 2.x calls to create, commit, tag and collect. It is not the Hub.

Repositories, commits and large files live in memory; large files go by the plain LFS protocol (hf_xet is switched off in the tests).
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "hf_" + "standin" * 4


class StandIn:
    """The state, and what was asked. ``before`` may answer a request first: (method, path) -> (status, body) or None."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.large: dict[str, bytes] = {}
        self.collections: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.before: Callable[[str, str], tuple[int, Any] | None] = lambda method, path: None
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def answer(self) -> None:
                if self.headers.get("Transfer-Encoding", "") == "chunked":
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                stand_in.asked.append((self.command, self.path))
                status, value = stand_in.before(self.command, self.path) or stand_in.reply(self.command, self.path, body, self.headers)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, name: str, *, private: bool = True, files: dict[str, bytes] | None = None) -> None:
        self.repos[name] = {"private": private, "commits": [], "tags": {}, "requests": []}
        self._commit(self.repos[name], {**(files or {})})

    def _commit(self, repo: dict[str, Any], files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(json.dumps([len(repo["commits"]), len(repo["requests"]), sorted(files)]).encode()).hexdigest()
        repo["commits"].append((oid, files))
        return oid

    def head(self, name: str) -> tuple[str, dict[str, bytes]]:
        return self.repos[name]["commits"][-1]

    def reply(self, method: str, path: str, body: bytes, headers: Any) -> tuple[int, Any]:
        parts = urlsplit(path)
        words = parts.path.strip("/").split("/")
        if not path.startswith("/large/") and headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if words[:3] == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            known = name in self.repos
            if not known:
                self.add(name, private=asked.get("visibility") == "private")
            return (
                (409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"})
                if known
                else (200, {"url": f"{self.url}/{name}"})
            )
        if words[:2] == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}
        if words[:2] == ["api", "collections"]:
            return self._collection(words[2:], json.loads(body))
        if words[0] == "large":
            self.large[words[1]] = body
            return 200, {}
        if words[-4:] == ["info", "lfs", "objects", "batch"]:
            wanted = json.loads(body)["objects"]
            url = lambda o: {"upload": {"href": f"{self.url}/large/{o['oid']}"}}  # noqa: E731
            return 200, {"objects": [{**o, **({} if o["oid"] in self.large else {"actions": url(o)})} for o in wanted]}
        name, rest = "/".join(words[2:4]), words[4:]
        if name not in self.repos:
            return 404, {"error": "Repository not found"}
        return self._model(name, rest, body, parse_qs(parts.query))

    def _collection(self, rest: list[str], asked: dict[str, Any]) -> tuple[int, Any]:
        if rest:
            found = self.collections["/".join(rest[:2])]
            found["items"].append(asked["item"])
        else:
            slug = f"{asked['namespace']}/{asked['title'].lower().replace(' ', '-')}-0123456789ab"
            found = self.collections.setdefault(slug, {"slug": slug, "title": asked["title"], "private": asked["private"], "items": []})
        items = [{"_id": str(n), "id": i["id"], "type": i["type"], "position": n} for n, i in enumerate(found["items"])]
        return 200, {
            **found,
            "items": items,
            "owner": "jo",
            "lastUpdated": "2026-11-01T00:00:00.000Z",
            "position": 0,
            "theme": "blue",
            "upvotes": 0,
        }

    def _model(self, name: str, rest: list[str], body: bytes, query: dict[str, list[str]]) -> tuple[int, Any]:
        repo = self.repos[name]
        oid, files = self.head(name)
        if not rest or rest[0] == "revision":
            return 200, {"id": name, "sha": oid, "private": repo["private"], "siblings": [{"rfilename": f} for f in files]}
        if rest[0] == "tree":
            return 200, [{"type": "file", "path": f, "size": len(v), "oid": _blob(v)} for f, v in files.items()]
        if rest[0] == "preupload":
            mode = lambda path: "lfs" if path.endswith((".safetensors", ".gguf")) else "regular"  # noqa: E731
            return 200, {"files": [{"path": f["path"], "shouldIgnore": False, "uploadMode": mode(f["path"]),
                                    "oid": self._remote(f["path"], files)} for f in json.loads(body)["files"]]}  # fmt: skip
        if rest[0] == "tag":
            tag = json.loads(body)["tag"]
            if tag in repo["tags"]:
                return 409, {"error": "Tag reference exists already"}
            repo["tags"][tag] = rest[1]
            return 200, {}
        if rest[0] == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            if (parent := lines[0]["value"].get("parentCommit")) and parent != oid:
                return 412, {"error": "A commit has happened since. Please refresh and try again."}
            new = dict(files)
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    new[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    new[value["path"]] = self.large[value["oid"]]
                else:
                    del new[value["path"]]
            if query.get("create_pr") == ["1"]:
                repo["requests"].append(new)
                return 200, {
                    "commitUrl": f"{self.url}/{name}/commit/x",
                    "commitOid": "f" * 40,
                    "pullRequestUrl": f"{self.url}/{name}/discussions/1",
                }
            oid = self._commit(repo, new)
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid}
        return 404, {"error": f"the stand-in does not know {rest}"}

    def _remote(self, path: str, files: dict[str, bytes]) -> str | None:
        if path not in files:
            return None
        return hashlib.sha256(files[path]).hexdigest() if path.endswith((".safetensors", ".gguf")) else _blob(files[path])


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
