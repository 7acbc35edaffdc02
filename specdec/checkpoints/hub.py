"""Resolves paths and hub names to checkpoint files on the local disk.

Invariant: only safetensors, JSON and chat templates are downloaded.
"""

import fnmatch
import re
import sys
from pathlib import Path

from specdec import multihost
from specdec.checkpoints import huggingface, orbax_layout
from specdec.utils import files, remote, terminal
from specdec.utils.spelling import join_names

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CONFIG_FILES = ("*.json",)
_WORTH_SAYING = 1e6  # bytes
ALL_FILES = ("*.safetensors", "*.json", "*.jinja")


def is_hub_name(source: str) -> bool:
  """Whether `source` has the form 'owner/name' of a model on the hub."""
  return bool(_HUB_NAME.fullmatch(source)) and source[0] not in "./"


def resolve(source: str | Path, patterns: tuple[str, ...] = ALL_FILES) -> Path:
  """Returns the checkpoint directory or the GGUF file of a path or hub name.

  Raises:
    FileNotFoundError: nothing of that name exists locally or on the hub.
    ValueError: its weights are in no supported format.
  """
  remote.check_local("", source)
  path = Path(source).expanduser()
  if not path.exists():
    if not is_hub_name(str(source)):
      raise FileNotFoundError(
        f"{source} does not exist; accepted: a directory with config.json and "
        "safetensors, a .gguf file, or a hub name like owner/name"
      )
    path = snapshot(str(source), patterns)
    if ALL_FILES[0] not in patterns:  # without weights
      return path
  if path.is_file():
    if path.suffix != ".gguf":
      raise ValueError(
        f"{path} is neither a .gguf file nor a directory with config.json and "
        "safetensors"
      )
    return path
  if huggingface.has_weights(path) or orbax_layout.has_weights(path):
    return path
  files = sorted(path.glob("*.gguf"))
  if len(files) == 1:
    return files[0]
  if files:
    raise ValueError(
      f"{path} holds {len(files)} GGUF files; name one of "
      f"{join_names(file.name for file in files)}"
    )
  pickled = [f.name for pattern in _PICKLED for f in path.glob(pattern)]
  if pickled:
    raise ValueError(
      f"{path} has only pickled weights ({join_names(sorted(pickled))}), which "
      "can run code when loaded; accepted: model.safetensors or one .gguf file"
    )
  if patterns == CONFIG_FILES and (path / "config.json").is_file():
    return path  # a shape alone, for random weights
  raise FileNotFoundError(
    f"{source} holds neither {huggingface.SINGLE}, {huggingface.INDEX}, "
    f"{orbax_layout.FOLDER}/ nor a .gguf file"
  )


def snapshot(name: str, patterns: tuple[str, ...] = ALL_FILES) -> Path:
  """Downloads a model from the Hugging Face hub, or reuses the hub's cache.

  Says first how many bytes are missing. Files that are there whole are kept: a
  download that was cut goes on with the rest of them.

  Raises:
    FileNotFoundError: huggingface_hub is not installed, the hub cannot be
      reached, it has no such model, or gives it to members only.
    NotWritten: the disk has too little space.
  """
  try:
    import huggingface_hub
  except ImportError as error:
    raise FileNotFoundError(
      f"{name} is not a local path, and huggingface_hub is not installed; "
      "`pip install specdec-jax[hub]` allows downloads from the hub"
    ) from error
  _check_space(huggingface_hub, name, patterns)
  try:
    path = huggingface_hub.snapshot_download(
      name, allow_patterns=list(patterns), ignore_patterns=["*/*"]
    )
    return Path(path)
  # The client and its transport raise many unrelated types.
  except Exception as error:
    raise FileNotFoundError(_explanation(name, error)) from error


def _check_space(client, name: str, patterns: tuple[str, ...]) -> None:
  """Says what will be downloaded; raises NotWritten where it does not fit."""
  try:
    from huggingface_hub import constants

    info = client.HfApi().model_info(name, files_metadata=True, timeout=10)
    missing = [
      file.size or 0
      for file in info.siblings
      if "/" not in file.rfilename
      and any(fnmatch.fnmatch(file.rfilename, x) for x in patterns)
      # The cache has a path, and a sentinel for what the hub does not have.
      and not isinstance(
        client.try_to_load_from_cache(name, file.rfilename, revision=info.sha),
        str,
      )
    ]
  except Exception:  # the hub's cache may have it: the download will say
    return
  folder = Path(constants.HF_HUB_CACHE)
  files.check_space(folder, sum(missing), name)
  if sum(missing) > _WORTH_SAYING and multihost.is_first():
    terminal.report(
      f"{name}: downloading {len(missing)} files of {sum(missing) / 1e6:,.0f} "
      f"MB to {folder}",
      file=sys.stderr,
    )


def _explanation(name: str, error: Exception) -> str:
  """Says in one sentence why a download failed, and what to do about it."""
  # The first line may be just "401"; the explanation follows it.
  reason = " ".join(str(error).split()) or type(error).__name__
  causes = [error, error.__cause__, error.__context__]
  # By name: where the classes lie depends on the client's version.
  kinds = {base.__name__ for x in causes if x for base in type(x).__mro__}
  page = f"https://huggingface.co/{name}"
  login = "log in with `hf auth login` or set HF_TOKEN"
  # Of gated repositories, too, the client says that they were not found; of
  # others its words are that they may be gated.
  is_absent = "RepositoryNotFoundError" in kinds
  says_gated = not is_absent and re.search("gated|restricted", reason)
  if "GatedRepoError" in kinds or says_gated:
    what = "is gated on the Hugging Face hub"
    todo = f"ask for access on {page}, then {login}"
  elif is_absent or re.search(r"\b40[134]\b", reason):
    what = "is neither a local path nor a model that the Hugging Face hub shows"
    todo = f"check the name on {page}; if the model is private, {login}"
  elif {"LocalEntryNotFoundError", "OfflineModeIsEnabled"} & kinds:
    what = "is not a local path, not complete in the Hugging Face hub's cache"
    what += ", and could not be downloaded"
    todo = "a download needs the network, and HF_HUB_OFFLINE not to be set"
  else:
    return (
      f"{name} is not a local path and could not be downloaded from the "
      f"Hugging Face hub: {reason}"
    )
  return f"{name} {what}: {reason} ({todo})"
