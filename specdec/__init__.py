"""Speculative decoding of language models on JAX, losslessly."""

import importlib

from specdec import acceptance, drafters
from specdec.decode import autoregress, generate, stream
from specdec.sampling import settings
from specdec.types import Params

__version__ = "0.1.0"

# Imported when first asked for: they bring tokenizers and file formats along.
_LATER = {
  "Decoder": "decoder",
  "Setup": "setup",
  "compare": "runs",
  "load": "setup",
}

__all__ = [
  "Params",
  "acceptance",
  "autoregress",
  "drafters",
  "generate",
  "settings",
  "stream",
  *_LATER,
]


def __getattr__(name: str):
  if name not in _LATER:
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")
  module = importlib.import_module(f"specdec.benchmark.{_LATER[name]}")
  return getattr(module, name)
