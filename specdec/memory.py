"""What a generation needs in memory, said before anything is loaded.

Bytes are per device; the plan counts what scales with the request and leaves
compiled programs and the runtime to a stated margin.
"""

from specdec.analysis import hardware
from specdec.models.config import TransformerConfig

_MARGIN = 1.1  # activations, programs and allocator rounding


def weight_bytes(config: TransformerConfig) -> int:
  """Bytes of a model's parameters in its own dtype."""
  return config.num_parameters * (4 if config.dtype == "float32" else 2)


def cache_bytes(config: TransformerConfig, batch: int, slots: int) -> int:
  """Bytes of a K/V cache."""
  return config.cache_bytes_per_token * batch * slots


def available() -> int | None:
  """Free bytes of the default device, None where nobody says."""
  return hardware.device_memory()[1]


def check(
  target: TransformerConfig,
  draft: TransformerConfig | None,
  *,
  batch: int,
  max_length: int,
  num_nodes: int,
) -> None:
  """Refuses a generation that cannot fit.

  Args:
    max_length: prompt and output of a row.
    num_nodes: of a draft; logits and laws are [batch, num_nodes, V].

  Raises:
    MemoryError: what is needed, what there is, and what to make smaller.
  """
  free = available()
  if free is None:
    return
  models = [m for m in (target, draft) if m is not None]
  slots = max_length + num_nodes
  weights = sum(weight_bytes(m) for m in models)
  caches = sum(cache_bytes(m, batch, slots) for m in models)
  laws = 4 * 4 * batch * num_nodes * target.vocab_size
  needed = int(_MARGIN * (weights + caches + laws))
  if needed > free:
    gib = 2**30
    raise MemoryError(
      f"batch {batch} at {max_length} tokens needs {needed / gib:.2f} GiB "
      f"(weights {weights / gib:.2f}, K/V caches {caches / gib:.2f}, logits "
      f"{laws / gib:.2f}) and {free / gib:.2f} GiB are free; take a smaller "
      "batch, fewer tokens, or bfloat16"
    )
