"""What a forward pass must move, by the shape of the model alone.

Lower bounds: what any implementation reads at least, so that bytes divided by a
bandwidth is a time that nothing can beat.
"""

from specdec.models.config import TransformerConfig


def pass_bytes(
  config: TransformerConfig, batch: int, tokens: int, context: int
) -> int:
  """Bytes that one pass reads and writes at least.

  Args:
    batch: rows.
    tokens: of each row.
    context: committed positions of each row.

  Returns:
    Weights once (of a mixture's experts as many as one token needs, of an
    embedding that is not also the projection only the rows looked up), K/V of
    the context as far as windows reach, K/V of the tokens.
  """
  size = 4 if config.dtype == "float32" else 2
  weights = config.num_parameters
  if config.num_experts:
    idle = config.num_experts - config.experts_per_token
    weights -= config.num_layers * idle * 3 * config.width * config.mlp_width
  if not config.tied:
    weights -= config.vocab_size * config.width
    weights += min(batch * tokens, config.vocab_size) * config.width
  position = 2 * config.num_kv_heads * config.head_dim  # of one layer
  windows = config.windows or (None,) * config.num_layers
  seen = sum(
    context if window is None else min(context, window - 1)
    for window in windows
  )
  kv = batch * position * (seen + config.num_layers * tokens)
  return size * (weights + kv)
