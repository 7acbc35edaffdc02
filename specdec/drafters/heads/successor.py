"""What a slot's logits gain from the draft tokens before it.

The slots of a block know nothing of each other's tokens. A successor adds what
follows from the tokens that were drawn, so that a draft's distribution is a
chain of conditionals: small steps after one large pass. `step` is called once
for each draft token; a state, [B, T, size] or (), goes along.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec import sampling
from specdec.drafters.heads.draft_head import Embed
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.models.experts import Weight
from specdec.models.layouts import look_up
from specdec.models.linear import Linear
from specdec.types import Array, PyTree


class Successor(nn.Module):
  """Base of the kinds below.

  Methods:
    begin(batch, num_tokens): the state before the anchor.
    offer(logits [..., n]): what `step` reads of a slot's logits, whatever the
      tokens are; arrays [..., any].
    step(target_weights, state, tokens [B, T], hidden [B, T, W], offered
        [B, T, any], depth):
      the state after the tokens, and the logits [B, T, n] of what follows
      them. `hidden` and `offered` are of the slot that is drawn next, `depth`
      (from 0) the number of draft tokens up to `tokens`.
    term(the same without offered): the state, and what is added to the logits.
    memory(tokens): [B, T, any] what the confidence head reads of them.
  """

  head_config: HeadConfig
  target: TransformerConfig
  num_tokens: int
  embed_table: Embed  # the block's

  def begin(self, batch: int, num_tokens: int) -> PyTree:
    return ()

  def memory(self, tokens: Array) -> Array:
    return jnp.zeros((*tokens.shape, 0))

  def offer(self, logits: Array) -> PyTree:
    return logits

  def step(self, target_weights, state, tokens, hidden, offered, depth):
    state, term = self.term(target_weights, state, tokens, hidden, depth)
    return state, offered + term.astype(offered.dtype)


class NoSuccessor(Successor):
  """Slots that know nothing of the draft tokens before them."""

  def step(self, target_weights, state, tokens, hidden, offered, depth):
    return state, offered


class Markov(Successor):
  """DSpark's low-rank matrix of transitions: W2 W1[token]."""

  def setup(self):
    rank = self.head_config.block.rank
    self.first = Weight((self.target.vocab_size, rank))
    self.second = Linear(self.num_tokens)

  @property
  def _has_bias(self) -> bool:
    """Whether what mixes W1[token] with other things has one, as published."""
    return self.head_config.is_published

  def memory(self, tokens: Array) -> Array:
    return look_up(self.first(jnp.float32), tokens)

  def term(self, target_weights, state, tokens, hidden, depth):
    return state, self.second(self.memory(tokens))


class GatedMarkov(Markov):
  """The same, W1[token] gated by the slot's hidden state and itself."""

  def setup(self):
    super().setup()
    self.gate = Linear(self.head_config.block.rank, self._has_bias)

  def term(self, target_weights, state, tokens, hidden, depth):
    memory = self.memory(tokens)
    gate = self.gate(jnp.concatenate([hidden, memory], axis=-1))
    return state, self.second(jax.nn.sigmoid(gate) * memory)


class RnnMarkov(Markov):
  """The same with a gated recurrent state over the tokens of the block."""

  def setup(self):
    super().setup()
    self.joint = Linear(3 * self.head_config.block.rank, self._has_bias)

  def begin(self, batch, num_tokens):
    return jnp.zeros((batch, num_tokens, self.head_config.block.rank))

  def term(self, target_weights, state, tokens, hidden, depth):
    x = jnp.concatenate([state, self.memory(tokens), hidden], axis=-1)
    gate, candidate, output = jnp.split(self.joint(x), 3, axis=-1)
    gate = jax.nn.sigmoid(gate)
    state = gate * state + (1 - gate) * jnp.tanh(candidate)
    return state, self.second(jnp.tanh(output))


class Gru(Successor):
  """Domino's GRU over the block's embeddings of the tokens, and two layers over
  the slot's hidden state and the GRU's."""

  def setup(self):
    self.size = self.head_config.block.state or self.head_config.width
    self.inputs = Linear(3 * self.size)
    self.recurrent = Linear(3 * self.size)
    self.narrow = Linear(self.head_config.block.rank)
    self.wide = Linear(self.num_tokens)

  def begin(self, batch, num_tokens):
    return jnp.zeros((batch, num_tokens, self.size))

  def term(self, target_weights, state, tokens, hidden, depth):
    x = self.embed_table(target_weights, tokens).astype(state.dtype)
    reset, update, new = jnp.split(self.inputs(x), 3, axis=-1)
    past = jnp.split(self.recurrent(state), 3, axis=-1)
    reset = jax.nn.sigmoid(reset + past[0])
    update = jax.nn.sigmoid(update + past[1])
    new = jnp.tanh(new + reset * past[2])
    state = (1 - update) * new + update * state
    both = jnp.concatenate([hidden, state], axis=-1)
    term = self.wide(jax.nn.silu(self.narrow(both)))
    return state, jnp.where(depth > 0, term, 0.0)


class Selector(Successor):
  """DFlash2's choice among a slot's likeliest tokens.

  Candidate c scores its logit and <W1[token] * (H hidden), W2[c]>; no other
  token has a probability.
  """

  memory = Markov.memory

  def setup(self):
    block = self.head_config.block
    self.count = min(block.candidates, self.num_tokens)
    self.first = Weight((self.target.vocab_size, block.rank))
    self.second = Weight((self.num_tokens, block.rank))
    self.narrow = Linear(block.rank)

  def _scores(self, hidden, tokens, logits, ids: Array) -> Array:
    """[B, T, C] of tokens ids [B, T, C] that it can draft, with logits that the
    slot gives them."""
    read = self.memory(tokens) * self.narrow(hidden)
    rows = look_up(self.second(jnp.float32), ids)
    term = jnp.sum(read[:, :, None] * rows, axis=-1)
    return logits + term.astype(logits.dtype)

  def offer(self, logits: Array) -> tuple[Array, Array]:
    """Returns the candidates, and their logits."""
    ids = sampling.top(jax.lax.stop_gradient(logits), self.count)[0]
    return ids, jnp.take_along_axis(logits, ids, axis=-1)

  def step(self, target_weights, state, tokens, hidden, offered, depth):
    ids, logits = offered
    scores = self._scores(hidden, tokens, logits, ids)
    none = jnp.full((*ids.shape[:-1], self.num_tokens), -jnp.inf, logits.dtype)
    return state, jnp.put_along_axis(none, ids, scores, -1, inplace=False)

  def selection(
    self,
    hidden: Array,
    tokens: Array,
    logits: Array,
    offered: tuple[Array, Array],
    labels: Array,
  ) -> tuple[Array, Array]:
    """Returns the cross-entropy [B, T] of labels among the candidates, and
    whether they are candidates; one that is not takes the last one's place.

    Args:
      hidden, tokens: as of `step`.
      logits: [B, T, n] of the slots.
      offered: `offer` of them.
      labels: [B, T] among the tokens that it can draft.
    """
    ids, _ = offered
    listed = jnp.any(ids == labels[..., None], axis=-1)
    last = jnp.where(listed, ids[..., -1], labels)
    ids = jnp.concatenate([ids[..., :-1], last[..., None]], axis=-1)
    logits = jnp.take_along_axis(logits, ids, axis=-1)
    log_probs = jax.nn.log_softmax(self._scores(hidden, tokens, logits, ids))
    right = ids == labels[..., None]
    return -jnp.sum(jnp.where(right, log_probs, 0.0), axis=-1), listed


KINDS = {
  "none": NoSuccessor,
  "markov": Markov,
  "gated_markov": GatedMarkov,
  "rnn_markov": RnnMarkov,
  "gru": Gru,
  "selector": Selector,
}
