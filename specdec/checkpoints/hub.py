"""Resolves paths and hub names to checkpoint files on the local disk.

Invariant: only safetensors, JSON and chat templates are downloaded.
"""

import re
from pathlib import Path

from specdec.checkpoints import huggingface, orbax_layout
from specdec.utils.spelling import join_names

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CONFIG_FILES = ("*.json",)
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
  path = Path(source).expanduser()
  if not path.exists():
    if not is_hub_name(str(source)):
      raise FileNotFoundError(
        f"{source} does not exist; accepted: a directory with config.json and "
        "safetensors, a .gguf file, or a hub name like owner/name"
      )
    return snapshot(str(source), patterns)
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
  raise FileNotFoundError(
    f"{path} holds neither {huggingface.SINGLE}, {huggingface.INDEX}, "
    f"{orbax_layout.FOLDER}/ nor a .gguf file"
  )


def snapshot(name: str, patterns: tuple[str, ...] = ALL_FILES) -> Path:
  """Downloads a model from the Hugging Face hub, or reuses the hub's cache.

  Raises FileNotFoundError where huggingface_hub is not installed, the hub
  cannot be reached, or it has no such model.
  """
  try:
    import huggingface_hub
  except ImportError as error:
    raise FileNotFoundError(
      f"{name} is not a local path, and huggingface_hub is not installed; "
      "`pip install specdec-jax[hub]` allows downloads from the hub"
    ) from error
  try:
    path = huggingface_hub.snapshot_download(
      name, allow_patterns=list(patterns), ignore_patterns=["*/*"]
    )
    return Path(path)
  # The client and its transport raise many unrelated types.
  except Exception as error:
    # The first line may be just "401"; the explanation follows it.
    reason = " ".join(str(error).split()) or type(error).__name__
    if re.search(r"\b40[13]\b|gated", reason, re.IGNORECASE):
      reason += (
        f" (ask for access on https://huggingface.co/{name}, then log in with "
        "`hf auth login` or set HF_TOKEN)"
      )
    raise FileNotFoundError(
      f"{name} is not a local path and could not be downloaded from the "
      f"Hugging Face hub: {reason}"
    ) from error
