"""A small Hugging Face Hub on loopback: what `huggingface_hub`'s own client asks for, kept in memory, with faults."""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".png")  # as in the .gitattributes of a new repository
EXPIRED = "Invalid credentials in Authorization header"
TOKEN, EXPIRED_TOKEN, READ_TOKEN = "hf_tokenOfTheUser", "hf_tokenFromLastYear", "hf_tokenOfAnotherUser"


class HubError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class File:
    """A file at a commit; `oid` is the SHA-256 of a large file, the git hash of another."""

    content: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass(frozen=True)
class Commit:
    parent: str | None
    message: str
    tree: dict[str, File]

    @property
    def oid(self) -> str:
        tree = sorted((name, file.oid) for name, file in self.tree.items())
        return hashlib.sha1(json.dumps([self.parent, self.message, tree]).encode()).hexdigest()


@dataclass
class Repo:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branches and pull requests to commit ids
    pull_requests: int = 0

    def add(self, ref: str, commit: Commit) -> str:
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit.oid

    def resolve(self, revision: str) -> str:
        oid = self.refs.get(revision, revision)
        if oid not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid

    def tree(self, revision: str = "main") -> dict[str, File]:
        return self.commits[self.resolve(revision)].tree

    def history(self, revision: str = "main") -> list[str]:
        """Messages, the newest first."""
        oid, messages = self.resolve(revision), []
        while oid is not None:
            messages.append(self.commits[oid].message)
            oid = self.commits[oid].parent
        return messages


@dataclass
class Fault:
    """What happens to the next `times` requests whose "METHOD path" matches: a status, or a connection cut after half
    of the body ("cut") or after the request was served ("cut answer")."""

    pattern: str
    answer: int | str
    times: int = 1


class HubServer(ThreadingHTTPServer):
    """
    Attributes:
        users (`dict[str, str | None]`): token to its user; `None` for one that has expired.
        faults (`list[Fault]`): what goes wrong.
        requests (`list[str]`): "METHOD path" of every request.
        before_commit (`Callable`): called at the start of each commit request.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.users: dict[str, str | None] = {}
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.before_commit: Callable[[], None] = lambda: None
        self.lock = threading.Lock()

    def handle_error(self, request, client_address):
        pass  # a client that gives up is no news

    def fault(self, request: str) -> int | str | None:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault.answer
        return None


@contextmanager
def hub_server():
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._serve()

    do_GET = do_POST = do_PUT = do_HEAD

    def _serve(self):
        self.path, self.query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        fault = self.server.fault(f"{self.command} {self.path}")
        length = int(self.headers.get("Content-Length") or 0)
        if fault == "cut":
            self.rfile.read(length // 2)
            return self._cut()
        self.body = self._read_chunks() if self.headers.get("Transfer-Encoding") else self.rfile.read(length)
        try:
            if isinstance(fault, int):
                raise HubError(fault, {401: EXPIRED, 403: "Forbidden"}.get(fault, "Internal Error"))
            for pattern, handle in ROUTES:
                if found := re.fullmatch(pattern, f"{self.command} {self.path}"):
                    status, headers, content = handle(self, *map(unquote, found.groups()))
                    break
            else:
                raise HubError(404, f"No route for {self.command} {self.path}", "EntryNotFound")
        except HubError as error:
            status, content = error.status, json.dumps({"error": str(error)}).encode()
            headers = {"X-Error-Message": str(error)} | ({"X-Error-Code": error.code} if error.code else {})
        if fault == "cut answer":
            return self._cut()
        self.send_response(status)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(content))} | headers
        ).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _cut(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _json(self) -> dict:
        return json.loads(self.body)

    # ---- who may do what ----------------------------------------------------------------------------------------

    def _user(self) -> str | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        user = self.server.users.get(header.removeprefix("Bearer "))
        if user is None:
            raise HubError(401, EXPIRED)
        return user

    def _repo(self, repo_id: str) -> Repo:
        repo = self.server.repos.get(repo_id)
        user = self._user()
        if repo is None or (repo.private and user != repo_id.split("/")[0]):
            raise HubError(404 if user else 401, "Repository not found", "RepoNotFound")
        return repo

    def _own_repo(self, repo_id: str) -> Repo:
        if self._user() is None:
            raise HubError(401, "Invalid username or password.")
        repo = self._repo(repo_id)
        if self._user() != repo_id.split("/")[0]:
            raise HubError(403, f"Forbidden: you must have write access to {repo_id}")
        return repo

    # ---- requests: status, headers, content ---------------------------------------------------------------------

    def create(self):
        user = self._user()
        if user is None:
            raise HubError(401, "Invalid username or password.")
        asked = self._json()
        owner = asked.get("organization") or user
        repo_id = f"{owner}/{asked['name']}"
        answer = {"url": f"{self.server.url}/{repo_id}", "name": repo_id}
        if owner != user:
            raise HubError(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        with self.server.lock:
            if repo_id in self.server.repos:
                return 409, {}, json.dumps(answer | {"error": "You already created this model repo"}).encode()
            repo = self.server.repos[repo_id] = Repo(private=asked.get("visibility") == "private")
            repo.add("main", Commit(None, "initial commit", {".gitattributes": File(b"*.safetensors lfs\n", False)}))
        return 200, {}, json.dumps(answer).encode()

    def info(self, repo_id: str, revision: str = "main"):
        repo = self._repo(repo_id)
        tree = repo.tree(revision)
        return self._answer(
            {
                "_id": repo_id,
                "id": repo_id,
                "modelId": repo_id,
                "sha": repo.resolve(revision),
                "private": repo.private,
                "siblings": [{"rfilename": name} for name in sorted(tree)],
            }
        )

    def tree(self, repo_id: str, revision: str, folder: str = ""):
        prefix = f"{folder}/" if folder else ""
        files = {name: file for name, file in self._repo(repo_id).tree(revision).items() if name.startswith(prefix)}
        if folder and not files:
            raise HubError(404, f"{folder} does not exist", "EntryNotFound")
        recursive = self.query.get("recursive", ["False"])[0].lower() in ("true", "1")
        entries = {}
        for name, file in files.items():
            *folders, _ = name.removeprefix(prefix).split("/")
            for depth in range(1, len(folders) + 1):
                path = prefix + "/".join(folders[:depth])
                entries[path] = {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
            if recursive or not folders:
                entries[name] = {"type": "file", "path": name, "size": len(file.content), "oid": file.oid}
                if file.lfs:
                    entries[name]["lfs"] = {"oid": file.oid, "size": len(file.content), "pointerSize": 130}
        return self._answer([entry for _, entry in sorted(entries.items())])

    def auth_check(self, repo_id: str):
        self._own_repo(repo_id)
        return self._answer({})

    def refs(self, repo_id: str):
        named = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid}
                 for name, oid in self._repo(repo_id).refs.items() if not name.startswith("refs/")]  # fmt: skip
        return self._answer({"branches": named, "converts": [], "tags": []})

    def branch(self, repo_id: str, branch: str):
        repo = self._own_repo(repo_id)
        with self.server.lock:
            if branch in repo.refs:
                raise HubError(409, "Reference already exists")
            repo.refs[branch] = repo.resolve(self._json().get("startingPoint", "main"))
        return self._answer({})

    def validate_card(self):
        metadata = self._json()["content"].split("---")[1]
        try:
            yaml.safe_load(metadata)
        except yaml.YAMLError:
            return 400, {}, json.dumps({"errors": [{"message": "not valid YAML"}], "warnings": []}).encode()
        return self._answer({"errors": [], "warnings": []})

    def preupload(self, repo_id: str, revision: str):
        repo = self._repo(repo_id) if "create_pr" in self.query else self._own_repo(repo_id)
        tree = repo.tree(revision)
        files = [
            {
                "path": asked["path"],
                "uploadMode": "lfs" if asked["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": tree[asked["path"]].oid if asked["path"] in tree else None,
            }
            for asked in self._json()["files"]
        ]
        return self._answer({"files": files})

    def lfs_batch(self, repo_id: str):
        self._repo(repo_id)
        objects = []
        for asked in self._json()["objects"]:
            entry = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.server.objects:
                upload = {"href": f"{self.server.url}/objects/{asked['oid']}"}
                verify = {"href": f"{self.server.url}/api/{repo_id}/verify"}
                entry["actions"] = {"upload": upload, "verify": verify}
            objects.append(entry)
        return self._answer({"transfer": "basic", "objects": objects})

    def put_object(self, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "The content has another hash")
        self.server.objects[oid] = self.body
        return self._answer({})

    def get_object(self, oid: str):
        return self._content(self.server.objects[oid], {"ETag": f'"{oid}"'})

    def verify(self, repo_id: str):
        asked = self._json()
        if len(self.server.objects.get(asked["oid"], b"")) != asked["size"]:
            raise HubError(404, "The object is not here")
        return self._answer({})

    def commit(self, repo_id: str, revision: str):
        pull_request = "create_pr" in self.query
        repo = self._repo(repo_id) if pull_request else self._own_repo(repo_id)
        self.server.before_commit()
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        with self.server.lock:
            head = repo.resolve(revision)
            if header["value"].get("parentCommit", head) != head:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            tree = dict(repo.commits[head].tree)
            for operation in operations:
                self._apply(operation["key"], operation["value"], tree)
            if pull_request:
                repo.pull_requests += 1
                revision = f"refs/pr/{repo.pull_requests}"
            oid = repo.add(revision, Commit(head, header["value"]["summary"], tree))
        discussion = f"{self.server.url}/{repo_id}/discussions/{repo.pull_requests}" if pull_request else None
        url = f"{self.server.url}/{repo_id}/commit/{oid}"
        return self._answer({"commitUrl": url, "commitOid": oid, "pullRequestUrl": discussion})

    def _apply(self, kind: str, value: dict, tree: dict[str, File]) -> None:
        if kind == "file":
            tree[value["path"]] = File(base64.b64decode(value["content"]), False)
        elif kind == "lfsFile":
            if value["oid"] not in self.server.objects:
                raise HubError(400, f"{value['path']} was not uploaded")
            tree[value["path"]] = File(self.server.objects[value["oid"]], True)
        elif kind == "deletedFile":
            if tree.pop(value["path"], None) is None:
                raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
        else:
            raise HubError(400, f"Unknown operation {kind}")

    def resolve(self, repo_id: str, revision: str, name: str):
        repo = self._repo(repo_id)
        commit = {"X-Repo-Commit": repo.resolve(revision)}
        file = repo.tree(revision).get(name)
        if file is None:
            content = json.dumps({"error": "Entry not found"}).encode()
            return 404, commit | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, content
        if not file.lfs:
            return self._content(file.content, commit | {"ETag": f'"{file.oid}"'})
        linked = {"X-Linked-Etag": f'"{file.oid}"', "X-Linked-Size": str(len(file.content))}
        # To another host, as the Hub does: the client follows redirects within one to the end and loses these headers.
        location = f"http://localhost:{self.server.server_port}/objects/{file.oid}"
        return 302, commit | linked | {"Location": location}, b""

    def _content(self, content: bytes, headers: dict):
        headers = headers | {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(found[1]), int(found[2] or len(content) - 1)
            part = content[first : last + 1]
            return 206, headers | {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"}, part
        return 200, headers | {"Content-Length": str(len(content))}, content

    def _answer(self, value):
        return 200, {}, json.dumps(value).encode()


MODEL = r"/api/models/([^/]+/[^/]+)"
ROUTES = [
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate_card),
    (rf"GET {MODEL}", Handler.info),
    (rf"GET {MODEL}/revision/([^/]+)", Handler.info),
    (rf"GET {MODEL}/tree/([^/]+)", Handler.tree),
    (rf"GET {MODEL}/tree/([^/]+)/(.+)", Handler.tree),
    (rf"GET {MODEL}/refs", Handler.refs),
    (rf"GET {MODEL}/auth-check/write", Handler.auth_check),
    (rf"POST {MODEL}/branch/([^/]+)", Handler.branch),
    (rf"POST {MODEL}/preupload/([^/]+)", Handler.preupload),
    (rf"POST {MODEL}/commit/([^/]+)", Handler.commit),
    (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"PUT /objects/(\w+)", Handler.put_object),
    (r"GET /objects/(\w+)", Handler.get_object),
    (r"HEAD /objects/(\w+)", Handler.get_object),
    (r"POST /api/([^/]+/[^/]+)/verify", Handler.verify),
    (r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)", Handler.resolve),
]
