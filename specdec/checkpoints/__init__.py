"""Reads Hugging Face, GGUF and Orbax checkpoints; writes safetensors, Orbax."""

from specdec.checkpoints.huggingface import save_safetensors
from specdec.checkpoints.loading import (
  DTYPES,
  Checkpoint,
  inspect,
  load,
  load_tokenizer,
  random_checkpoint,
)
from specdec.checkpoints.orbax_layout import save as save_orbax
from specdec.checkpoints.tokenizer import (
  TextStream,
  Tokenizer,
  check_vocabulary,
  same_vocabulary,
)

__all__ = [
  "DTYPES",
  "Checkpoint",
  "TextStream",
  "Tokenizer",
  "check_vocabulary",
  "inspect",
  "load",
  "load_tokenizer",
  "random_checkpoint",
  "same_vocabulary",
  "save_orbax",
  "save_safetensors",
]
