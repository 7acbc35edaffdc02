"""An object store in memory, with the two doors that programs take to gs://.

etils.epath goes through fsspec, whose file system for gs:// is replaced; the
TensorStore of Orbax speaks Google's JSON API, which a local server answers. As
in a real store there are no folders, and what is written is there once it is
whole.
"""

import contextlib
import http.server
import io
import json
import re
import sys
import threading
import types
import urllib.parse

from etils.epath import backend, gpath
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from specdec.utils import remote


class Files(AbstractFileSystem):
  """fsspec's file system of a dict: 'bucket/name' -> bytes.

  Attributes:
    writes: names in the order in which they were written or deleted.
    fail: called with a name before it is written.
  """

  protocol = ("gs", "gcs")
  cachable = False

  def __init__(self):
    super().__init__()
    self.objects: dict[str, bytes] = {}
    self.writes: list[str] = []
    self.fail = lambda name: None

  def put_object(self, name: str, content: bytes) -> None:
    self.fail(name)
    self.writes.append(name)
    self.objects[name] = content

  def info(self, path, **_):
    path = self._strip_protocol(path)
    if path in self.objects:
      size = len(self.objects[path])
      return {"name": path, "size": size, "type": "file"}
    below = any(name.startswith(f"{path}/") for name in self.objects)
    if below or "/" not in path:
      return {"name": path, "size": 0, "type": "directory"}
    raise FileNotFoundError(path)

  def ls(self, path, detail=True, **_):
    path = self._strip_protocol(path)
    if self.info(path)["type"] == "file":
      found = {path}
    else:
      start = len(path) + 1
      found = {
        name[:start] + name[start:].partition("/")[0]
        for name in self.objects
        if name.startswith(f"{path}/")
      }
    infos = [self.info(name) for name in sorted(found)]
    return infos if detail else [info["name"] for info in infos]

  def _open(self, path, mode="rb", **_):
    if mode == "rb":
      if path not in self.objects:
        raise FileNotFoundError(path)
      return io.BytesIO(self.objects[path])
    assert mode == "wb", "objects are replaced whole"
    return _Written(self, path)

  def rm_file(self, path):
    path = self._strip_protocol(path)
    if self.objects.pop(path, None) is not None:
      self.writes.append(f"-{path}")
    elif self.info(path)["type"] != "directory":
      raise FileNotFoundError(path)

  def rm(self, path, recursive=False, maxdepth=None):
    path = self._strip_protocol(path)
    self.info(path)
    below = [x for x in self.objects if recursive and x.startswith(f"{path}/")]
    for name in [*below, *([path] if path in self.objects else [])]:
      self.rm_file(name)

  def cp_file(self, path1, path2, **_):
    self.put_object(
      self._strip_protocol(path2), self.objects[self._strip_protocol(path1)]
    )

  def mkdir(self, path, create_parents=True, **_):
    pass

  def makedirs(self, path, exist_ok=False):
    pass


class _Written(AbstractBufferedFile):
  """An object that is there once it is closed, also after an exception."""

  def __init__(self, files: Files, path: str):
    super().__init__(files, path, mode="wb", block_size=2**16)
    self._parts: list[bytes] = []

  def _upload_chunk(self, final=False):
    self._parts.append(self.buffer.getvalue())
    if final:
      self.fs.put_object(self.path, b"".join(self._parts))


def _handler(files: Files):
  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
      pass

    def _answer(self, status, content=b"", **headers):
      if isinstance(content, dict):
        content = json.dumps(content).encode()
      self.send_response(status)
      for name, value in headers.items():
        self.send_header(name.replace("_", "-"), value)
      self.send_header("Content-Length", str(len(content)))
      self.end_headers()
      self.wfile.write(content)

    def _asked(self):
      url = urllib.parse.urlsplit(self.path)
      query = dict(urllib.parse.parse_qsl(url.query))
      match = re.fullmatch(
        r"(?:/upload)?/storage/v1/b/([^/]+)/o/?(.*)", url.path
      )
      return match[1], urllib.parse.unquote(match[2]), query

    def do_GET(self):
      bucket, name, query = self._asked()
      if not name:
        prefix = f"{bucket}/{query.get('prefix', '')}"
        items = [
          {"name": x.partition("/")[2], "size": str(len(files.objects[x]))}
          for x in sorted(files.objects)
          if x.startswith(prefix)
        ]
        self._answer(200, {"items": items})
        return
      content = files.objects.get(f"{bucket}/{name}")
      if content is None:
        self._answer(404)
        return
      headers = {"x_goog_generation": "1"}
      if asked := re.fullmatch(
        r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")
      ):
        first, last = int(asked[1]), int(asked[2] or len(content) - 1)
        last = min(last, len(content) - 1)
        headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
        self._answer(206, content[first : last + 1], **headers)
      else:
        self._answer(200, content, **headers)

    def do_POST(self):
      bucket, _, query = self._asked()
      content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
      is_there = f"{bucket}/{query['name']}" in files.objects
      if query.get("ifGenerationMatch") == "0" and is_there:
        self._answer(412)
        return
      files.put_object(f"{bucket}/{query['name']}", content)
      self._answer(200, {"name": query["name"], "generation": "1"})

    def do_DELETE(self):
      bucket, name, _ = self._asked()
      found = files.objects.pop(f"{bucket}/{name}", None) is not None
      self._answer(204 if found else 404)

  return Handler


@contextlib.contextmanager
def bucket(monkeypatch):
  """Puts the store under gs://, of any bucket; yields its Files."""
  files = Files()
  monkeypatch.setattr(remote, "_has_gcsfs", lambda: True)
  monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
  monkeypatch.setattr(
    type(backend.fsspec_backend), "_get_filesystem", lambda *_: files
  )
  # What Orbax asks of a bucket: whether it has folders after all.
  plain = types.SimpleNamespace(hierarchical_namespace_enabled=False)
  client = types.SimpleNamespace(get_bucket=lambda name: plain)
  storage = types.ModuleType("google.cloud.storage")
  storage.Client = lambda: client
  cloud = types.ModuleType("google.cloud")
  cloud.storage = storage
  monkeypatch.setitem(sys.modules, "google.cloud", cloud)
  monkeypatch.setitem(sys.modules, "google.cloud.storage", storage)
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(files))
  threading.Thread(target=server.serve_forever, daemon=True).start()
  url = f"http://127.0.0.1:{server.server_port}"
  monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
  monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
  try:
    yield files
  finally:
    remote.close()
    server.shutdown()
    server.server_close()
