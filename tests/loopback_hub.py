"""A Hub on the loopback interface: create, upload (plain and LFS), branch, list and download, with tokens and refusals.

Only what `huggingface_hub` asks for when a model is pushed and loaded again; anything else is answered 404 and listed
in `Hub.unknown`, so that a test notices.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_aSecretThatMustNeverBeWritten"
LFS_SUFFIXES = (".safetensors", ".png")


@dataclass
class Repository:
    private: bool = False
    gated: bool = False
    revisions: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})

    def sha(self, revision: str) -> str:
        names = sorted(self.revisions[revision])
        return hashlib.sha1("".join([revision, *names]).encode()).hexdigest()

    def files(self, revision: str) -> dict[str, bytes] | None:
        by_sha = {self.sha(name): files for name, files in self.revisions.items()}
        return self.revisions.get(revision, by_sha.get(revision))


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None

    def clear(self) -> None:
        """As a new one: nothing on it, and nothing asked."""
        for kept in (self.repositories, self.large, self.datasets, self.unknown):
            kept.clear()

    def start(self, port: int = 0) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", port), type("BoundHandler", (Handler,), {"hub": self}))
        # A team of processes that is forked from here would keep the port open, and answer nothing, after `stop`.
        os.register_at_fork(after_in_child=self.server.socket.close)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()  # returns when the thread's loop has ended
        self.server.server_close()

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """Nobody answers at its address for the body of the `with`."""
        port = self.server.server_address[1]
        self.stop()
        try:
            yield
        finally:
            self.start(port)

    def named(self, kind: str, name: str) -> Repository | None:
        return (self.datasets if kind == "datasets" else self.repositories).get(name)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args) -> None:
        pass

    def answer(self, code: int, content=None, headers=None, kind="application/json") -> None:
        data = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        received = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            received += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return received

    def handle_any(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.body()
        if (
            self.command == "POST"
            and path.startswith("/api/")
            and self.headers.get("Authorization") != f"Bearer {TOKEN}"
        ):
            return self.answer(401, {"error": "Invalid credentials"})
        for pattern, method in ROUTES:
            if found := re.fullmatch(pattern, path):
                return method(self, body, *found.groups())
        self.hub.unknown.append(f"{self.command} {path}")
        return self.answer(404, {"error": "unknown"})

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = handle_any  # noqa: N815 - names the base class looks for

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if not name.startswith("me/"):
            return self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        answer = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
        if name in self.hub.repositories:
            return self.answer(409, {"error": "You already created this model repo", **answer})
        self.hub.repositories[name] = Repository(private=asked.get("visibility") == "private")
        return self.answer(200, answer)

    def branch(self, _body: bytes, name: str, branch: str) -> None:
        revisions = self.hub.repositories[name].revisions
        revisions.setdefault(branch, dict(revisions["main"]))
        self.answer(200)

    def validate_card(self, body: bytes) -> None:
        fine = json.loads(body)["content"].startswith("---")
        self.answer(200 if fine else 400, {"errors": [] if fine else [{"message": "no metadata"}], "warnings": []})

    def preupload(self, body: bytes, _name: str, _revision: str) -> None:
        files = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
            }
            for f in json.loads(body)["files"]
        ]
        self.answer(200, {"files": files})

    def lfs_batch(self, body: bytes, _name: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}
            missing = {} if asked["oid"] in self.hub.large else {"actions": actions}
            objects.append({"oid": asked["oid"], "size": asked["size"], **missing})
        self.answer(200, {"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")

    def lfs_upload(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(422, {"error": "the content is not what its name says"})
        self.hub.large[oid] = body
        return self.answer(200)

    def commit(self, body: bytes, name: str, revision: str) -> None:
        files = self.hub.repositories[name].revisions[revision]
        for line in filter(bytes.strip, body.splitlines()):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.hub.repositories[name].sha(revision)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        answer = {"commitUrl": url, "commitOid": sha, "success": True}
        if "create_pr=1" in urlsplit(self.path).query:
            answer["pullRequestUrl"] = f"{self.hub.url}/{name}/discussions/1"
        self.answer(200, answer)

    def information(self, _body: bytes, kind: str, name: str, revision: str | None) -> None:
        repository = self.hub.named(kind, name)
        if repository is None:
            return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if repository.files(revision or "main") is None:
            return self.answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": path} for path in repository.files(revision or "main")]
        sha = repository.sha(revision if revision in repository.revisions else "main")
        answer = {"_id": "0", "id": name, "sha": sha, "private": repository.private, "siblings": siblings}
        return self.answer(200, {**answer, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, _body: bytes, kind: str, name: str, revision: str, folder: str | None) -> None:
        prefix = f"{folder}/" if folder else ""
        files = self.hub.named(kind, name).files(revision) or {}
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        folders = {path.rsplit("/", 1)[0] for path in inside if "/" in path[len(prefix) :]}
        entries = [{"type": "directory", "path": path, "oid": "0", "size": 0} for path in folders]
        self.answer(200, entries + [listed(path, content) for path, content in inside.items()])

    def paths(self, body: bytes, kind: str, name: str, revision: str) -> None:
        files = self.hub.named(kind, name).files(revision) or {}
        asked = parse_qs(body.decode()).get("paths") or json.loads(body or b"{}").get("paths", [])
        self.answer(200, [listed(path, files[path]) for path in asked if path in files])

    def download(self, _body: bytes, kind: str | None, name: str, revision: str, path: str) -> None:
        repository = self.hub.named(kind or "models", name)
        if repository is None:
            return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if repository.gated:
            return self.answer(403, {"error": "Access to this model is restricted"}, {"X-Error-Code": "GatedRepo"})
        content = (repository.files(revision) or {}).get(path)
        sha = repository.sha(revision if revision in repository.revisions else "main")
        if content is None:
            return self.answer(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        tag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        return self.answer(200, content, tag, "application/octet-stream")

    def may_write(self, _body: bytes, name: str) -> None:
        if name.startswith("me/"):
            return self.answer(200)
        return self.answer(403, {"error": "You don't have the rights to write to this repository"})

    def optional(self, _body: bytes) -> None:
        """The client asks and does without."""
        self.answer(404, {"error": "not here"})


def listed(path: str, content: bytes) -> dict:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


NAME = r"([^/]+/[^/]+)"
KIND = r"(models|datasets)"
ROUTES = (
    (r"/api/agent-harnesses", Handler.optional),
    (r"/api/repos/create", Handler.create),
    (r"/api/validate-yaml", Handler.validate_card),
    (rf"/api/models/{NAME}/auth-check/write", Handler.may_write),
    (rf"/api/models/{NAME}/branch/(.+)", Handler.branch),
    (rf"/api/models/{NAME}/preupload/(.+)", Handler.preupload),
    (rf"/{NAME}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"/lfs/(\w+)", Handler.lfs_upload),
    (rf"/api/models/{NAME}/commit/(.+)", Handler.commit),
    (rf"/api/{KIND}/{NAME}/tree/([^/]+)(?:/(.*))?", Handler.tree),
    (rf"/api/{KIND}/{NAME}/paths-info/(.+)", Handler.paths),
    (rf"/api/{KIND}/{NAME}(?:/revision/(.+))?", Handler.information),
    (rf"/(?:(datasets)/)?{NAME}/resolve/([^/]+)/(.+)", Handler.download),
)


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()
