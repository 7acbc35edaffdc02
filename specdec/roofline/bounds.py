"""What a forward pass must move and compute, by the shape of the model alone.

Lower bounds: what any implementation reads at least, so that bytes divided by a
bandwidth is a time that nothing can beat.
"""

from specdec.models.config import TransformerConfig


def _active(config: TransformerConfig) -> int:
  """Weights that one token goes through: of a mixture its own experts, of an
  embedding none of the rows unless it is the projection as well."""
  weights = config.num_parameters
  if config.num_experts:
    idle = config.num_experts - config.experts_per_token
    weights -= config.num_layers * idle * 3 * config.width * config.mlp_width
  if not config.tied:
    weights -= config.vocab_size * config.width
  return weights


def _seen(config: TransformerConfig, context: int) -> int:
  """Cached positions that a token sees, summed over layers."""
  windows = config.windows or (None,) * config.num_layers
  return sum(
    context if window is None else min(context, window - 1)
    for window in windows
  )


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
    embedding that is not also the projection only the rows looked up), KV of
    the context as far as windows reach, KV of the tokens.
  """
  size = 4 if config.dtype == "float32" else 2
  weights = _active(config)
  if not config.tied:
    # All tokens may be the same one.
    weights += config.width
  position = 2 * config.num_kv_heads * config.head_dim  # of one layer
  kv = _seen(config, context) + config.num_layers * tokens
  return size * (weights + batch * position * kv)


def pass_flops(
  config: TransformerConfig, batch: int, tokens: int, context: int
) -> int:
  """Multiplications and additions of one pass's products; as `pass_bytes`.

  Attention counts the committed context, not what tokens of the pass see of
  one another.
  """
  attention = 2 * config.num_heads * config.head_dim * _seen(config, context)
  return 2 * batch * tokens * (_active(config) + attention)
