"""A loopback Hub's endpoints, as the real clients use them and the real Hub answers them.

Read off `huggingface_hub` 1.0, 1.33 and 2.4: where a client could tell it from the Hub, this is wrong.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, urlencode

from penstock.testing.accounts import User, known, may_create, may_write, visible
from penstock.testing.repos import Blobs, Commit, Entry, Repo, Repos, Tree, entry_of, lfs_entry_of
from penstock.testing.wire import BUFFER, Answer, Refused, Request, file_answer, json_answer

Item = TypeVar("Item")
Change = tuple[str, str, Entry | None]  # what is done, to which path, the new entry

KINDS = {"model": "models", "dataset": "datasets", "space": "spaces"}
REGULAR_LIMIT = 10 << 20
EXPANDED_PAGE = 50  # with `expand` the Hub gives fewer at once
_ENDINGS = """
7z aac arrow avro bin bmp bz2 ckpt dcm dicom flac ftz gif glb gz h5 joblib jpeg jpg lz4 m4a mds mlmodel model mp3 mp4
msgpack nii npy npz ogg onnx opus ot parquet pb pcm pdf pickle pkl ply png pt pth rar raw safetensors sam stl tar tflite
tgz tif tiff wasm wav webm webp xz zip zst
"""
LFS_NAMES = tuple(f".{ending}" for ending in _ENDINGS.split())
ATTRIBUTES = "".join(f"*{name} filter=lfs diff=lfs merge=lfs -text\n" for name in LFS_NAMES).encode()


class HubApi:
    """Answers requests from what is in `blobs` and `repos`."""

    def __init__(self, blobs: Blobs, repos: Repos, *, multipart_over: int, part_size: int, page: int) -> None:
        self.blobs, self.repos = blobs, repos
        self.multipart_over, self.part_size, self.page = multipart_over, part_size, page
        self.url = ""  # known once the server listens

    def answer(self, request: Request, user: User | None) -> Answer:
        parts = request.parts
        match request.method, parts:
            case "GET", ["api", "whoami-v2"]:
                return self._whoami(known(user))
            case "POST", ["api", "validate-yaml"]:
                return json_answer({"errors": [], "warnings": []})
            case "POST", ["api", "repos", "create"]:
                return self._create(request, user)
            case "DELETE", ["api", "repos", "delete"]:
                return self._delete(request, user)
        kind, name, rest = _place(parts)
        repo = visible(self.repos, user, kind, name)
        match request.method, rest:
            case "GET", [] | ["revision", _]:
                return self._info(request, repo, rest[1] if rest else "main")
            case "POST", ["preupload", revision]:
                may_write(user, repo, pull=_wants_pull(request))
                return self._preupload(request, repo, revision)
            case "POST", ["info", "lfs", "objects", "batch"]:
                # A pull request sends no ref: whoever may open one may upload for it.
                data = request.json()
                may_write(user, repo, pull="ref" not in data)
                return self._batch(data)
            case "POST", ["commit", revision]:
                writer = may_write(user, repo, pull=_wants_pull(request))
                return self._commit(request, repo, revision, author=str(writer["name"]))
            case "GET", ["tree", revision, *path]:
                return self._tree(request, repo, revision, "/".join(path).strip("/"))
            case "POST", ["paths-info", revision]:
                return self._paths_info(request, repo, revision)
            case "POST" | "DELETE", ["branch" | "tag", _]:
                may_write(user, repo)
                return self._change_ref(request, repo, rest)
            case "GET", ["refs"]:
                return json_answer(_refs_of(repo))
            case "GET", ["commits", revision]:
                return self._commits(request, repo, revision)
            case "PUT", ["settings"]:
                may_write(user, repo)
                return self._settings(request, repo)
            case "GET" | "HEAD", ["resolve", revision, *path]:
                return self._resolve(request, repo, revision, "/".join(path))
            case "GET", ["xet-write-token" | "xet-read-token", _]:
                raise Refused(404, "Xet is not served here: set HF_HUB_DISABLE_XET=1 or upload from a file object")
        raise Refused(404, "Sorry, we can't find the page you are looking for.")

    # --- repositories

    def _whoami(self, user: User) -> Answer:
        orgs = [
            {"type": "org", "id": name, "name": name, "fullname": name, "roleInOrg": role, "isEnterprise": False}
            for name, role in user.get("orgs", {}).items()
        ]
        token = {"displayName": user["name"], "role": user["role"], "createdAt": "2026-01-01T00:00:00.000Z"}
        auth = {"type": "access_token", "accessToken": token}
        name = user["name"]
        about = {"type": "user", "id": name, "name": name, "fullname": name, "isPro": False, "orgs": orgs, "auth": auth}
        return json_answer(about)

    def _create(self, request: Request, user: User | None) -> Answer:
        data = request.json()
        user = known(user)
        kind = KINDS[data.get("type") or "model"]
        namespace = data.get("organization") or user["name"]
        name = f"{namespace}/{data['name']}"
        may_create(user, kind, name)
        with self.repos.lock:
            if self.repos.find(kind, name):
                what = {"error": f"You already created this {kind[:-1]} repo", "url": self._page(kind, name)}
                return json_answer(what, status=409, headers={"X-Error-Message": what["error"]})
            first = {".gitattributes": entry_of(ATTRIBUTES, self.blobs.put(ATTRIBUTES))}
            self.repos.create(kind, name, private=_is_private(data, False), author=str(user["name"]), tree=first)
        return json_answer({"url": self._page(kind, name), "name": name, "id": name})

    def _delete(self, request: Request, user: User | None) -> Answer:
        data = request.json()
        namespace = data.get("organization") or (user["name"] if user else "")
        repo = visible(self.repos, user, KINDS[data.get("type") or "model"], f"{namespace}/{data['name']}")
        may_write(user, repo)
        with self.repos.lock:
            self.repos.delete(repo)
        return Answer(200, b"OK")

    def _settings(self, request: Request, repo: Repo) -> Answer:
        with self.repos.lock:
            repo = self.repos.again(repo)
            repo.data["private"] = _is_private(request.json(), repo.private)
            repo.save()
        return json_answer({"private": repo.private})

    def _info(self, request: Request, repo: Repo, revision: str) -> Answer:
        commit = _commit_of(repo, revision)
        siblings: list[dict[str, Any]] = []
        for path, entry in commit.tree.items():
            detail: dict[str, Any] = {"size": entry["size"], "blobId": entry["oid"]}
            if entry["lfs"]:
                detail["lfs"] = {"sha256": entry["sha256"], "size": entry["size"], "pointerSize": entry["pointer"]}
            siblings.append({"rfilename": path} | (detail if "blobs" in request.query else {}))
        facts = {"id": repo.name, "_id": repo.name, "author": repo.name.split("/")[0], "sha": commit.oid}
        facts |= {"lastModified": commit.date, "createdAt": repo.data["created"]}
        fixed = {"gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        return json_answer(facts | fixed | {"private": repo.private, "siblings": siblings})

    def _change_ref(self, request: Request, repo: Repo, rest: list[str]) -> Answer:
        """Branches are named in the path; a new tag in the body, where the path says what it marks."""
        kind, name = rest
        data = request.json() or {}
        start = name if kind == "tag" else data.get("startingPoint", "main")
        name = data.get("tag", name)
        ref = f"refs/heads/{name}" if kind == "branch" else f"refs/tags/{name}"
        with self.repos.lock:
            repo = self.repos.again(repo)
            if request.method == "DELETE":
                if repo.refs.pop(ref, None) is None:
                    raise Refused(404, f"Invalid rev id: {name}", "RevisionNotFound")
            elif ref in repo.refs:
                raise Refused(409, f"Reference already exists: {ref}")
            else:
                repo.refs[ref] = _commit_of(repo, start).oid
            repo.save()
        return json_answer({"success": True})

    def _commits(self, request: Request, repo: Repo, revision: str) -> Answer:
        history = [
            {
                "id": one.oid,
                "title": one.title,
                "message": one.description,
                "date": one.date,
                "authors": [{"user": one.author}],
            }
            for one in repo.history(_commit_of(repo, revision).oid)
        ]
        shown, headers = self._page_of(request, history, self.page)
        return json_answer(shown, headers=headers)

    # --- uploads

    def _preupload(self, request: Request, repo: Repo, revision: str) -> Answer:
        data = request.json()
        tree = _commit_of(repo, revision).tree
        ignored = [line.strip() for line in data.get("gitIgnore", "").splitlines() if line.strip()]
        files = []
        for file in data["files"]:
            path, entry = file["path"], tree.get(file["path"])
            large = (
                file["size"] > REGULAR_LIMIT
                or path.lower().endswith(LFS_NAMES)
                or b"\0" in base64.b64decode(file.get("sample", ""))
            )
            skip = any(fnmatch.fnmatch(name, line) for line in ignored for name in (path, path.rpartition("/")[2]))
            there = {"oid": entry["sha256" if entry["lfs"] else "oid"]} if entry else {}
            files.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": skip} | there)
        return json_answer({"files": files})

    def _batch(self, data: Mapping[str, Any]) -> Answer:
        """Where each large file is to be sent. No actions: it is there."""
        answers: list[dict[str, Any]] = []
        parts = "multipart" in data.get("transfers", ("basic",))
        for wanted in data["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if self.blobs.size(oid) != size:
                upload: dict[str, Any] = {"href": f"{self.url}/_lfs/{oid}"}
                if parts and size > self.multipart_over:
                    started = self.blobs.start_parts()
                    upload["href"] += f"/{started}"
                    upload["header"] = {"chunk_size": str(self.part_size)}
                    for number in range(1, -(-size // self.part_size) + 1):
                        link = f"{upload['href']}/{number}?chunk={self.part_size}"
                        upload["header"][f"{number:05d}"] = link
                verify = {"href": f"{self.url}/_lfs/{oid}/verify"}
                answer |= {"authenticated": True, "actions": {"upload": upload, "verify": verify}}
            answers.append(answer)
        return json_answer({"transfer": "multipart" if parts else "basic", "objects": answers})

    def store(self, request: Request, parts: list[str]) -> Answer:
        match request.method, parts:
            case "PUT", [oid]:
                self.blobs.receive(request.body, oid)
                return Answer(200, b"", {"ETag": f'"{oid}"'})
            case "PUT", [_, upload, number]:
                tag = self.blobs.receive_part(request.body, upload, int(number), int(request.query["chunk"]))
                return Answer(200, b"", {"ETag": f'"{tag}"'})
            case "POST", [oid, "verify"]:
                if self.blobs.size(oid) != request.json()["size"]:
                    raise Refused(404, f"Object {oid} is not there, or of another size")
                return json_answer({"message": "OK"})
            case "POST", [oid, upload]:
                tags = {int(part["partNumber"]): str(part["etag"]) for part in request.json()["parts"]}
                self.blobs.finish_parts(upload, oid, tags)
                return json_answer({"message": "OK"})
        raise Refused(404, "Not Found")

    def _commit(self, request: Request, repo: Repo, revision: str, *, author: str) -> Answer:
        header: dict[str, Any] = {}
        changes: list[Change] = []
        for line in io.BufferedReader(request.body, BUFFER):
            item = json.loads(line)
            if item["key"] == "header":
                header = item["value"]
            else:
                changes.append(self._change(item["key"], item["value"]))
        if not header.get("summary"):
            raise Refused(400, "The commit has no header with a summary")
        with self.repos.lock:
            repo = self.repos.again(repo)
            head = _commit_of(repo, revision)
            if not head.oid.startswith(header.get("parentCommit") or ""):
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
            ref = repo.ref(revision)
            if _wants_pull(request):
                repo.data["pulls"] += 1
                ref = f"refs/pr/{repo.data['pulls']}"
            if ref is None:
                raise Refused(400, f"Cannot commit to {revision}: it is not a branch")
            tree = _changed(head.tree, changes)
            facts = {"title": header["summary"], "description": header.get("description") or "", "author": author}
            made = repo.add(ref, head.oid, tree, **facts)
        page = self._page(repo.kind, repo.name)
        answer = {"success": True, "commitOid": made.oid, "commitUrl": f"{page}/commit/{made.oid}", "hookOutput": ""}
        if _wants_pull(request):
            answer["pullRequestUrl"] = f"{page}/discussions/{repo.data['pulls']}"
        return json_answer(answer)

    def _change(self, key: str, value: Mapping[str, Any]) -> Change:
        path = str(value["path"])
        if path.startswith("/") or set(path.rstrip("/").split("/")) & {"", ".", "..", ".git"}:
            raise Refused(400, f"Invalid path: {path!r}")
        if key == "file":
            content = value["content"]
            data = base64.b64decode(content) if value.get("encoding") == "base64" else content.encode()
            return key, path, entry_of(data, self.blobs.put(data))
        if key == "lfsFile":
            size = self.blobs.size(value["oid"])
            if size is None or value.get("size", size) != size:
                what = "Your push was rejected because an LFS pointer pointed to a file that does not exist."
                raise Refused(400, f"{what} Offending file: {path} ({value['oid']})")
            return key, path, lfs_entry_of(size, value["oid"])
        if key in ("deletedFile", "deletedFolder"):
            return key, path.rstrip("/"), None
        raise Refused(400, f"Unknown operation: {key}")

    # --- reading

    def _tree(self, request: Request, repo: Repo, revision: str, folder: str) -> Answer:
        commit = _commit_of(repo, revision)
        under = f"{folder}/" if folder else ""
        found: dict[str, list[tuple[str, Entry]]] = {}
        for path, entry in commit.tree.items():
            if path.startswith(under):
                inner = path[len(under) :].split("/")
                for depth in range(1, len(inner) + 1):
                    found.setdefault(under + "/".join(inner[:depth]), []).append((path, entry))
                    if not _true(request.query.get("recursive")):
                        break
        if folder and not found:
            raise Refused(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        expand = _true(request.query.get("expand"))
        listed = [(path, found[path]) for path in sorted(found)]
        shown, headers = self._page_of(request, listed, min(self.page, EXPANDED_PAGE) if expand else self.page)
        return json_answer([_item(repo, path, inside, expand=expand) for path, inside in shown], headers=headers)

    def _paths_info(self, request: Request, repo: Repo, revision: str) -> Answer:
        commit = _commit_of(repo, revision)
        body = request.body.readall()
        if "json" in request.headers.get("Content-Type", ""):
            data = json.loads(body)
        else:
            form = parse_qs(body.decode())
            data = {"paths": form.get("paths", []), "expand": form.get("expand", [""])[0]}
        items = []
        for path in dict.fromkeys(name.strip("/") for name in data["paths"]):
            inside = [(path, commit.tree[path])] if path in commit.tree else []
            inside = inside or [(name, entry) for name, entry in commit.tree.items() if name.startswith(f"{path}/")]
            if inside:
                items.append(_item(repo, path, inside, expand=_true(data.get("expand"))))
        return json_answer(items)

    def _resolve(self, request: Request, repo: Repo, revision: str, path: str) -> Answer:
        commit = _commit_of(repo, revision)
        entry = commit.tree.get(path)
        if entry is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        tag = entry["sha256"] if entry["lfs"] else entry["oid"]
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit.oid}
        if entry["lfs"]:
            headers |= {"X-Linked-Size": str(entry["size"]), "X-Linked-Etag": f'"{tag}"'}
        return file_answer(self.blobs.path(entry["sha256"]), entry["size"], headers, request.headers.get("Range"))

    def _page_of(self, request: Request, items: Sequence[Item], most: int) -> tuple[Sequence[Item], dict[str, str]]:
        """One page of a listing, and the link to the next."""
        start = int(request.query.get("cursor", 0))
        end = start + min(most, int(request.query.get("limit", most)))
        if end >= len(items):
            return items[start:], {}
        link = f"{self.url}{request.path}?{urlencode({**request.query, 'cursor': end})}"
        return items[start:end], {"Link": f'<{link}>; rel="next"'}

    def _page(self, kind: str, name: str) -> str:
        """A repository's address for people."""
        return f"{self.url}/{quote(name)}" if kind == "models" else f"{self.url}/{kind}/{quote(name)}"


def _place(parts: list[str]) -> tuple[str, str, list[str]]:
    """Kind, name and the rest of "api/datasets/org/name/…", "datasets/org/name/…" and, for a model, "org/name/…"."""
    parts = parts[1:] if parts[0] == "api" else parts
    kind, parts = (parts[0], parts[1:]) if parts[0] in KINDS.values() else ("models", parts)
    if len(parts) < 2:
        raise Refused(404, "Repository not found", "RepoNotFound")
    return kind, f"{parts[0]}/{parts[1].removesuffix('.git')}", parts[2:]


def _commit_of(repo: Repo, revision: str) -> Commit:
    oid = repo.find(revision)
    if oid is None:
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return repo.commit(oid)


def _changed(tree: Tree, changes: Sequence[Change]) -> Tree:
    tree = dict(tree)
    for key, path, entry in changes:
        if entry:
            tree[path] = entry
            continue
        gone = [path] if key == "deletedFile" else [name for name in tree if name.startswith(f"{path}/")]
        if not gone or any(tree.pop(name, None) is None for name in gone):
            raise Refused(404, f"{path} does not exist: it cannot be deleted", "EntryNotFound")
    return tree


def _item(repo: Repo, path: str, inside: Sequence[tuple[str, Entry]], *, expand: bool) -> dict[str, Any]:
    """A file or folder as listings show it."""
    entry = inside[0][1]
    if inside[0][0] == path:
        item = {"type": "file", "oid": entry["oid"], "size": entry["size"], "path": path}
        if entry["lfs"]:
            item["lfs"] = {"oid": entry["sha256"], "size": entry["size"], "pointerSize": entry["pointer"]}
    else:
        digest = hashlib.sha1(json.dumps(inside).encode(), usedforsecurity=False).hexdigest()
        item = {"type": "directory", "oid": digest, "size": 0, "path": path}
    if expand:
        last = max((repo.commit(oid) for oid in {one["commit"] for _, one in inside}), key=lambda commit: commit.date)
        item["lastCommit"] = {"id": last.oid, "title": last.title, "date": last.date}
    return item


def _refs_of(repo: Repo) -> dict[str, Any]:
    found: dict[str, list[dict[str, str]]] = {"branches": [], "converts": [], "tags": [], "pullRequests": []}
    groups = {"refs/heads/": "branches", "refs/convert/": "converts", "refs/tags/": "tags", "refs/pr/": "pullRequests"}
    for ref, oid in repo.refs.items():
        start = next(start for start in groups if ref.startswith(start))
        name = ref if start == "refs/pr/" else ref.removeprefix(start)
        found[groups[start]].append({"name": name, "ref": ref, "targetCommit": oid})
    return found


def _is_private(data: Mapping[str, Any], otherwise: bool) -> bool:
    """Newer clients send `visibility`, older ones `private`."""
    if data.get("visibility"):
        return bool(data["visibility"] == "private")
    return otherwise if data.get("private") is None else bool(data["private"])


def _wants_pull(request: Request) -> bool:
    return _true(request.query.get("create_pr"))


def _true(value: object) -> bool:
    return str(value).lower() in ("1", "true")
