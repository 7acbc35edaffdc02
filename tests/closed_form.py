"""The closed form of a pass's bytes and FLOPs, an oracle for the cost model.

Lower bounds from a config alone, computed apart from specdec.roofline.cost.
"""

from specdec.models.config import TransformerConfig


def _active(config: TransformerConfig) -> int:
  """Returns the weights that a token uses: its experts, no untied embedding."""
  weights = config.num_parameters
  if config.num_experts:
    unused = config.num_experts - config.experts_per_token
    mixtures = config.num_layers - len(config.dense_layers)
    weights -= mixtures * unused * 3 * config.width * config.mlp_width
  if not config.tied:
    weights -= config.vocab_size * config.width
  weights -= config.relative_buckets * config.num_heads
  if config.encoder_layers:
    inner = config.num_heads * config.head_dim
    layer = 4 * config.width * inner + 2 * config.width
    layer += (3 if config.gated else 2) * config.width * config.mlp_width
    weights -= config.encoder_layers * layer + config.width
    weights -= config.relative_buckets * config.num_heads
    # Cross-attention's keys and values are projected once a source.
    weights -= config.num_layers * 2 * config.width * inner
  return weights


def _seen(config: TransformerConfig, context: int) -> int:
  """Returns the cached positions that a token attends to, over all layers."""
  windows = config.windows or (None,) * config.num_layers
  if config.chunked:
    return sum(context % x if x else context for x in windows)
  return sum(min(context, x - 1) if x else context for x in windows)


def pass_bytes(
  config: TransformerConfig, batch: int, tokens: int, context: int
) -> int:
  """Returns the least bytes of a pass of batch x tokens tokens."""
  size = 4 if config.dtype == "float32" else 2
  weights = _active(config)
  if not config.tied:
    weights += config.width  # one row, if all tokens are equal
  position = 2 * config.num_kv_heads * config.head_dim  # of one layer
  if latent := config.latent:
    position = latent.rank + latent.rotary_dims
  kv = _seen(config, context) + config.num_layers * tokens
  return size * (weights + batch * position * kv)


def pass_flops(
  config: TransformerConfig, batch: int, tokens: int, context: int
) -> int:
  """Returns the FLOPs of a pass's products and of attention to the context."""
  of_head = 2 * config.head_dim  # scores, and sums of values
  if latent := config.latent:
    of_head = 2 * latent.rank + latent.rotary_dims
  attention = config.num_heads * of_head * _seen(config, context)
  return 2 * batch * tokens * (_active(config) + attention)
