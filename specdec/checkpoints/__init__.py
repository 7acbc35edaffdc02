"""Checkpoints: Hugging Face directories and GGUF files in, safetensors out."""

from specdec.checkpoints.huggingface import save_safetensors
from specdec.checkpoints.loading import (
  DTYPES,
  Checkpoint,
  inspect,
  load,
  load_tokenizer,
)
from specdec.checkpoints.tokenizer import (
  TextStream,
  Tokenizer,
  same_vocabulary,
)

__all__ = [
  "DTYPES",
  "Checkpoint",
  "TextStream",
  "Tokenizer",
  "inspect",
  "load",
  "load_tokenizer",
  "same_vocabulary",
  "save_safetensors",
]
