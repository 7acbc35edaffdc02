"""Published drafters in NumPy, by the names of their tensors: a reference.

Written from the published forward passes and on purpose without a line of
specdec. Every block is one decoder layer, so what a drafter with a KV cache
computes is the last output of a pass over the pairs (token, hidden state) that
it has seen.
"""

import math

import numpy as np

EPSILON, THETA = 1e-6, 10_000.0
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 4


def rms(x, weight, offset=0.0):
  x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON)
  return x * (offset + weight)


def silu(x):
  return x / (1 + np.exp(-x))


def rotate(x):
  """x [n, heads, dim] at positions 0 .. n - 1."""
  half = x.shape[-1] // 2
  angle = np.arange(len(x))[:, None] * THETA ** (-np.arange(half) / half)
  cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
  a, b = x[..., :half], x[..., half:]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(
  w, prefix, x, offset=0.0, *, context=None, window=None, causal=True
):
  """What x [n, in] takes from a context [T, in] before it, and from itself."""
  both = x if context is None else np.concatenate([context, x])
  first = len(both) - len(x)

  def heads(name, count):
    y = both @ w[f"{prefix}self_attn.{name}_proj.weight"].T
    y = y + w.get(f"{prefix}self_attn.{name}_proj.bias", 0.0)
    y = y.reshape(len(both), count, HEAD_DIM)
    norm = w.get(f"{prefix}self_attn.{name}_norm.weight")
    return y if norm is None else rms(y, norm, offset)

  query, key = rotate(heads("q", HEADS))[first:], rotate(heads("k", KV_HEADS))
  value = heads("v", KV_HEADS)
  key, value = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (key, value))
  scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(HEAD_DIM)
  there, here = np.arange(len(both))[None], first + np.arange(len(x))[:, None]
  visible = np.ones((len(x), len(both)), bool)
  if causal:
    visible &= there <= here
  if window:
    visible &= abs(here - there) < window
  scores = np.where(visible, scores, -np.inf)
  scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
  scores /= scores.sum(axis=-1, keepdims=True)
  y = np.einsum("hqk,khd->qhd", scores, value).reshape(len(x), -1)
  return y @ w[f"{prefix}self_attn.o_proj.weight"].T


def mlp(w, prefix, x):
  gate = silu(x @ w[f"{prefix}mlp.gate_proj.weight"].T)
  up = x @ w[f"{prefix}mlp.up_proj.weight"].T
  return (gate * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def rest(w, prefix, x, offset=0.0):
  """The MLP half of a layer."""
  y = rms(x, w[f"{prefix}post_attention_layernorm.weight"], offset)
  return x + mlp(w, prefix, y)


def layer(w, prefix, x, offset=0.0):
  y = rms(x, w[f"{prefix}input_layernorm.weight"], offset)
  return rest(w, prefix, x + attention(w, prefix, y, offset), offset)


class Eagle:
  def __init__(self, w, target):
    self.w, self.target, self.embed = w, target, w["embed_tokens.weight"]

  def encode(self, streams):
    return streams[-1]

  def step(self, embeds, hidden):
    x = np.concatenate([embeds, hidden], axis=-1)
    x = x @ self.w["fc.weight"].T + self.w["fc.bias"]
    x = x + attention(self.w, "layers.0.", x)  # no norm before it
    return rest(self.w, "layers.0.", x)

  def logits(self, hidden):
    return hidden @ self.target["head"].T


class Eagle3:
  def __init__(self, w, target, prefix, normed_residual=False, eagle31=False):
    self.w, self.prefix, self.normed_residual = w, prefix, normed_residual
    self.embed = w.get("embed_tokens.weight", target["embed"])
    self.eagle31 = eagle31

  def encode(self, streams):
    if self.eagle31:
      norms = [self.w[f"fc_norm.{i}.weight"] for i in range(3)]
      streams = [rms(x, norm) for x, norm in zip(streams, norms)]
    return np.concatenate(streams, axis=-1) @ self.w["fc.weight"].T

  def step(self, embeds, hidden):
    w, p = self.w, self.prefix
    normed = rms(hidden, w[f"{p}hidden_norm.weight"])
    x = np.concatenate(
      [rms(embeds, w[f"{p}input_layernorm.weight"]), normed], axis=-1
    )
    residual = normed if self.normed_residual else hidden
    x = rest(w, p, residual + attention(w, p, x))
    return rms(x, w["norm.weight"]) if self.eagle31 else x

  def logits(self, hidden):
    if not self.eagle31:
      hidden = rms(hidden, self.w["norm.weight"])
    return hidden @ self.w["lm_head.weight"].T


def peagle(w, target, mask, tokens, streams, root, levels, **options):
  """[levels, n] logits of what follows token `root`, all of one pass.

  Args:
    mask: token that stands for those that are not drawn yet.
    tokens: [T]; none after `root` is read.
    streams: the target's, each [T, d].
    options: of Eagle3, whose first layer it has; the others are ordinary ones.
  """
  behind = levels - 1
  hidden = np.concatenate(streams, axis=-1)[:root]
  masks = np.tile(w["mask_hidden"].reshape(1, -1), (behind, 1))
  hidden = np.concatenate([hidden, masks]) @ w["fc.weight"].T
  embed = w.get("embed_tokens.weight", target["embed"])
  embeds = embed[[*tokens[1 : root + 1], *[mask] * behind]]
  x = Eagle3(w, target, "layers.0.", **options).step(embeds, hidden)
  number = 1
  while f"layers.{number}.input_layernorm.weight" in w:
    x = layer(w, f"layers.{number}.", x)
    number += 1
  x = rms(x[root - 1 :], w["norm.weight"])
  return x @ w.get("lm_head.weight", target["head"]).T


class Mtp:
  """Args: prefix of the block, names (fuse, embedding, hidden, final)."""

  def __init__(self, w, target, prefix, names, **options):
    self.w, self.target, self.prefix, self.names = w, target, prefix, names
    self.offset = options.get("offset", 0.0)
    self.hidden_first = options.get("hidden_first", False)
    self.returns_normed = options.get("returns_normed", True)
    self.embed = w.get(options.get("embed"), target["embed"])
    self.head = w.get(options.get("head"), target["head"])

  def encode(self, streams):
    return streams[-1]

  def step(self, embeds, hidden):
    fuse, embed_norm, hidden_norm, final = (
      self.w[f"{name}.weight"] for name in self.names
    )
    parts = [
      rms(embeds, embed_norm, self.offset),
      rms(hidden, hidden_norm, self.offset),
    ]
    if self.hidden_first:
      parts.reverse()
    x = np.concatenate(parts, axis=-1) @ fuse.T
    x = layer(self.w, self.prefix, x, self.offset)
    return rms(x, final, self.offset) if self.returns_normed else x

  def logits(self, hidden):
    if not self.returns_normed:
      hidden = rms(hidden, self.w[f"{self.names[-1]}.weight"], self.offset)
    return hidden @ self.head.T


def drafted(drafter, tokens, streams, root, level):
  """Logits of what follows token root + level, drafted from `root` on.

  Args:
    tokens: [T].
    streams: the target's, each [T, d]; the last one is after its final norm.
  """
  hidden = list(drafter.encode(streams)[:root])
  seen = list(tokens[1 : root + 1])
  embeds = drafter.embed
  out = drafter.step(embeds[seen], np.stack(hidden))[-1]
  for token in tokens[root + 1 : root + 1 + level]:
    seen.append(token)
    hidden.append(out)
    out = drafter.step(embeds[seen], np.stack(hidden))[-1]
  return drafter.logits(out)


def medusa(w, hidden, head, blocks):
  for i in range(blocks):
    y = hidden @ w[f"{head}.{i}.linear.weight"].T + w[f"{head}.{i}.linear.bias"]
    hidden = hidden + silu(y)
  return hidden @ w[f"{head}.{blocks}.weight"].T


class MlpSpeculator:
  def __init__(self, w, tied, levels, width, scale_input=True):
    self.w, self.tied, self.scale_input = w, tied, scale_input
    state_weight = 0.5 ** (0.5 / levels)
    embed_weight = np.sqrt((1 - state_weight**2) * (width / 2))
    self.alpha = embed_weight / state_weight

  def logits(self, hidden, tokens):
    """Of what follows `tokens`, drafted one after the other from `hidden`."""
    state = rms(hidden, 1.0) / np.sqrt(2) if self.scale_input else hidden
    for i, token in enumerate(tokens):
      own = 0 if self.tied else i
      w = {
        x: self.w[f"speculator.{x}.{own}.weight"] for x in ("emb", "ln", "head")
      }
      project = self.w[
        f"speculator.proj.{min(i, 1) if self.tied else i}.weight"
      ]
      state = project @ state + self.alpha * w["emb"][token]
      state = rms(state, w["ln"]) + self.w[f"speculator.ln.{own}.bias"]
      erf = np.vectorize(math.erf)(state / np.sqrt(2))
      state = state * (1 + erf) / 2
    return w["head"] @ state


def redrafter(w, hidden, tokens, embed, blocks, rnn=True):
  """Logits of what follows `tokens`, drafted from `hidden`."""
  state = np.zeros_like(hidden)
  for token in tokens:
    if rnn:
      state = w["rnn_u.weight"] @ state + w["rnn_u.bias"]
      state = silu(state + w["rnn_w.weight"] @ embed[token])
    else:
      state = state + embed[token]
  x = np.concatenate([hidden, state])
  x = w["input_proj.weight"] @ x + w["input_proj.bias"]
  for i in range(blocks):
    y = w[f"lm_head.{i}.linear.weight"] @ x + w[f"lm_head.{i}.linear.bias"]
    x = x + silu(y)
  return w[f"lm_head.{blocks}.weight"] @ x
