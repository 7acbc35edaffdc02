"""Multi-head latent attention of DeepSeek-V3 (MLA, arXiv:2405.04434)."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.models.attention import View, attend, write_kv
from specdec.models.config import TransformerConfig
from specdec.models.experts import weight
from specdec.models.layouts import unpack
from specdec.models.linear import Linear, RMSNorm, linear
from specdec.models.rotary import rotate

_EPSILON = 1e-6  # of the norms of low ranks, whatever norm_epsilon is


class HeadMaps(nn.Module):
  """Holds `kernel`, a map from latent vectors of every head: [heads, D, rank].

  It is stored as [heads * D, rank], or packed.
  """

  num_heads: int
  dim: int
  rank: int

  @nn.compact
  def __call__(self, dtype) -> jax.Array:
    shape = self.num_heads * self.dim, self.rank
    kernel = unpack(weight(self, shape, dtype, "kernel"))
    return kernel.reshape(self.num_heads, self.dim, self.rank)


class LatentAttention(nn.Module):
  """Attention over the latent vectors in a cache, after writing this call's.

  No head's keys and values are formed: the map to keys is applied to queries,
  the map to values to what attention yields. So all heads share one key, a
  rotated part and the latent vector, which is the value as well.

  Call arguments: x [B, T, M]; layer of the cache, rotated keys [B, 1, S, R] and
  latent vectors [B, 1, S, rank], or None; angles from `rope_angles`; view, what
  the tokens attend to.
  """

  config: TransformerConfig
  place: sharding.Placement = sharding.anywhere

  @nn.compact
  def __call__(self, x, layer, angles, view: View):
    c, dims = self.config, self.config.latent
    norm = functools.partial(RMSNorm, _EPSILON)
    down = Linear(dims.cached, name="kv_down")
    to_heads = Linear(c.num_heads * c.head_dim, name="q")
    if dims.query_rank is None:
      query, kept = linear(x, to_heads, down)
    else:
      low, kept = linear(x, Linear(dims.query_rank, name="q_down"), down)
      query = to_heads(norm(name="q_norm")(low))

    def to_values(name, dim):
      return HeadMaps(c.num_heads, dim, dims.rank, name=name)(x.dtype)

    query = query.reshape(*query.shape[:2], c.num_heads, c.head_dim)
    query = self.place(query, "rows", None, "query", None)
    query, turned = jnp.split(query, [dims.key_dim], axis=-1)
    latent, key = jnp.split(kept, [dims.rank], axis=-1)
    latent = norm(name="kv_norm")(latent)
    key = key[:, :, None]
    if angles is not None:
      turned, key = (
        rotate(y, *angles, c.rope_interleaved) for y in (turned, key)
      )
    keys, values = key.swapaxes(1, 2), latent[:, None]
    keys, values, view = write_kv(layer, keys, values, view, self.place)
    y = attend(
      turned,
      keys,
      values,
      view,
      scale=c.head_dim**-0.5 * getattr(c.rope_scaling, "score_factor", 1.0),
      value_query=jnp.einsum(
        "bthd,hdr->bthr", query, to_values("k_up", dims.key_dim)
      ),
      on_mesh=self.place is not sharding.anywhere,
    )
    y = y.reshape(*y.shape[:2], c.num_heads, dims.rank)
    y = jnp.einsum("bthr,hdr->bthd", y, to_values("v_up", dims.value_dim))
    y = self.place(y.reshape(*y.shape[:2], -1), "rows", None, "query")
    return Linear(c.width, name="o")(y), (keys, values)
