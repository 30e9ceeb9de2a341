"""Serve datasets and models from a local folder like the Hugging Face hub, read-only, so that tests run the
real `datasets` and `huggingface_hub` without a network."""
import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import re
import threading
import urllib.parse

# requests of load_dataset and snapshot_download: a repository's info, its file tree, the content of its files
ROUTE = re.compile(r"/(?:api/)?(?:datasets/|models/)?(\w[\w.-]*/\w[\w.-]*)"
                   r"(?:/(revision|tree|resolve)/(\w+)/?(.*))?")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        match = ROUTE.fullmatch(url.path)
        if not match:
            return self.reply(404)
        name, verb, revision, path = match.groups()
        path = urllib.parse.unquote(path or "")
        repo = self.server.root / name
        if not repo.is_dir():
            return self.reply(401, error="RepoNotFound")      # the hub's reply to a client without a token
        paths = [f for f in sorted(repo.rglob("*")) if f.is_file()]
        files = {f.relative_to(repo).as_posix(): f.read_bytes() for f in paths}
        commit = sha(repr(files).encode())      # changes with the content
        if revision not in (None, "main", commit):
            return self.reply(404, error="RevisionNotFound")
        if verb in (None, "revision"):
            siblings = [{"rfilename": f} for f in files]
            return self.reply(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())
        if verb == "resolve" and path in files:
            return self.reply(200, files[path], commit=commit)
        if verb == "tree" and (entries := tree(files, path, "recursive=true" in url.query.lower())):
            return self.reply(200, json.dumps(entries).encode())
        self.reply(404, error="EntryNotFound", commit=commit)

    do_HEAD = do_GET

    def reply(self, status, raw=b"", error=None, commit=None):
        headers = {"ETag": f'"{sha(raw)}"', "X-Repo-Commit": commit, "X-Error-Code": error}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(raw))}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(raw)

    def log_message(self, *args):
        pass              # keep stderr quiet


def tree(files, folder, deep):
    """Return the entries of a folder of the repository, with `deep` also those of its subfolders."""
    prefix = folder and folder + "/"
    folders = {str(parent) for f in files for parent in pathlib.PurePosixPath(f).parents} - {"."}
    entries = [{"type": "directory", "path": p, "size": 0, "oid": sha(p.encode())} for p in sorted(folders)]
    entries += [{"type": "file", "path": p, "size": len(raw), "oid": sha(raw)} for p, raw in files.items()]
    below = [e for e in entries if e["path"].startswith(prefix)]
    return [e for e in below if deep or "/" not in e["path"][len(prefix):]]


def sha(raw):
    return hashlib.sha1(raw).hexdigest()


@contextlib.contextmanager
def serve(root):
    """Serve ROOT/org/name/<files> on a free local port; yield the URL for HF_ENDPOINT."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.root = pathlib.Path(root)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def environment(url, home):
    """Return the environment of a process that uses only this hub, without the user's settings, tokens or
    caches."""
    theirs = re.compile(r"HF_|HUGGING|TRANSFORMERS_OFFLINE|\w+_PROXY$", re.IGNORECASE)
    kept = {key: value for key, value in os.environ.items() if not theirs.match(key)}
    return {**kept, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
