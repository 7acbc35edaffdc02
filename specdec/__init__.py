"""Speculative decoding of language models on JAX, losslessly."""

from specdec import acceptance, drafters
from specdec.decode import autoregress, generate, stream
from specdec.sampling import settings
from specdec.types import Params

__version__ = "0.1.0"

__all__ = [
  "Params",
  "acceptance",
  "autoregress",
  "drafters",
  "generate",
  "settings",
  "stream",
]
