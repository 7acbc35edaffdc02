"""A drafter under examination: batches of one shape, and runs on them."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import acceptance, decode, sampling, step
from specdec import cache as kv
from specdec.inputs import Inputs
from specdec.types import AcceptanceRule, DecodeState, Draft, Drafter, Source

ROWS = 32  # of every batch
LENGTH = 28  # prompt and output
PROMPT = 9  # tokens of the longest prompt
NEVER = -1  # no token has this id
TINY = 5  # vocabulary whose texts are enumerated
REJECTION = acceptance.rejection()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _propose(target, drafter, params, state: DecodeState, noise):
  """The draft of a state under given noise [B, A, V], its tree in place."""

  def of_node(depth, node):
    del depth
    return jnp.take(noise, jnp.minimum(node, noise.shape[1] - 1), axis=1)

  context = step.context_of(state, target.vocab_size, acceptance.coupled())
  context = context._replace(noise=of_node)
  draft, _ = drafter.propose(params, state.draft_state, context)
  return drafter.spec.with_tree(draft)._replace(resume=None)


@functools.partial(jax.jit, static_argnums=0)
def _log_probs_after(target, params, tokens, length, settings, source):
  """[B, V] warped log-probabilities of the token that follows each text."""
  cache = kv.empty(target, params, *tokens.shape, source)
  output, _ = target.apply(params, tokens, cache)
  logits = output.logits[jnp.arange(len(tokens)), length - 1]
  return sampling.warp(logits, settings)


class Trial:
  """A drafter with its target, and batches of one shape to run them on."""

  def __init__(self, make, target, params, rules, prompts, draws, tolerance):
    drafter = make if isinstance(make, Drafter) else make()
    self.traces = 0

    def propose(*args):
      self.traces += 1
      return drafter.propose(*args)

    self.make, self.drafter = make, drafter._replace(propose=propose)
    self.spec, self.target = drafter.spec, target
    self.sampled = self.spec.siblings != "deterministic"
    if rules is None:
      kind, chain = self.spec.siblings, self.spec.chain
      chains = self.spec.num_chains if kind == "iid" else 1
      rules = [
        rule
        for rule in _every_rule()
        if kind in rule.siblings
        and (chain or not rule.chains_only)
        and (not rule.most_chains or 1 <= chains <= rule.most_chains)
      ]
    self.rules = rules
    self.draws, self.tolerance = draws, tolerance
    self.params = jax.tree.map(jnp.asarray, params)
    self.rng = np.random.default_rng(0)
    vocab_size = target.vocab_size
    if prompts is None:
      prompts = self.rng.integers(0, vocab_size, (ROWS, PROMPT))
      prompts[:, 4:] = prompts[:, :5]  # something to look up
    self.prompt = np.zeros((ROWS, LENGTH), np.int32)
    self.prompt[:, :PROMPT] = prompts
    row = np.arange(ROWS)
    self.inputs = {
      "prompt": self.prompt,
      "prompt_length": np.array([1, PROMPT, 5, 2, 8, 3])[row % 6],
      "temperature": np.array([1.0, 0.0, 0.7, 1.0])[row % 4],
      "top_k": np.where(row % 4 == 3, min(3, vocab_size), vocab_size),
      "top_p": np.where(row % 4 == 2, 0.9, 1.0),
      "limit": np.full(ROWS, LENGTH),
      "index": row,
    }
    self.inputs |= self.sources()
    # Of distributions: one setting for all rows, few tokens are possible.
    self.settings = {
      "temperature": np.full(ROWS, 1.0),
      "top_k": np.full(ROWS, vocab_size if vocab_size <= TINY else 3),
      "top_p": np.full(ROWS, 1.0),
    }

    first = {name: x[:1].repeat(ROWS, 0) for name, x in self.sources().items()}
    self.alike = self.settings | first

  def sources(self) -> dict[str, np.ndarray]:
    """Random ragged sources for an encoder, if the target has one."""
    if self.target.encode is None:
      return {}
    shape = ROWS, PROMPT
    return {
      "source": self.rng.integers(0, self.target.vocab_size, shape),
      "source_length": self.rng.integers(1, PROMPT + 1, ROWS),
    }

  def given(self, rows=slice(None), **changes) -> Inputs:
    """What some rows begin with; `changes` of self.inputs."""
    inputs = {
      n: np.asarray(x)[rows] for n, x in (self.inputs | changes).items()
    }
    warp = {name: inputs.pop(name) for name in self.settings}
    inputs = {name: jnp.asarray(x, jnp.int32) for name, x in inputs.items()}
    if "source" in inputs:
      length = inputs.pop("source_length")
      inputs["source"] = Source(inputs["source"], length)
    settings = sampling.settings(len(inputs["prompt"]), **warp)
    return Inputs(key=jax.random.key(0), sampling=settings, **inputs)

  def start(self, drafter=None, **changes) -> DecodeState:
    """The state after prefill; `changes` of self.inputs."""
    return decode.start(
      self.target,
      drafter or self.drafter,
      decode.NO_DRAFT_RULE if drafter else acceptance.coupled(),
      self.params,
      max_length=LENGTH,
      **self.given(**changes)._asdict(),
    )

  def go_on(self, rule, state, eos=NEVER, rounds=decode.MAX_ROUNDS, run=None):
    """Runs rounds; `state` is donated. `run`: in decode.run's place."""
    return (run or decode.run)(
      self.target,
      decode.NO_DRAFTER if rule is decode.NO_DRAFT_RULE else self.drafter,
      rule,
      self.params,
      state,
      jnp.array([eos], jnp.int32),
      jnp.int32(rounds),
    )

  def run(
    self, rule=REJECTION, *, eos=NEVER, rounds=decode.MAX_ROUNDS, **changes
  ):
    """A state after rounds of the drafter."""
    return self.go_on(rule, self.start(**changes), eos, rounds)

  @functools.cached_property
  def baseline(self) -> DecodeState:
    """Autoregressive decoding of the same inputs."""
    return self.go_on(decode.NO_DRAFT_RULE, self.start(decode.NO_DRAFTER))

  @functools.cached_property
  def coupled(self) -> DecodeState:
    """Speculative decoding of them under the coupled rule."""
    return self.run(acceptance.coupled())

  def noise(self) -> np.ndarray:
    """Gumbel noise [ROWS, A, V] of all addresses of a draft."""
    shape = (ROWS, 2 * self.spec.max_nodes, self.target.vocab_size)
    return self.rng.gumbel(size=shape).astype(np.float32)

  def propose(self, state, noise) -> Draft:
    """A draft on the host; parents are [ROWS, N]."""
    draft = _propose(
      self.target, self.drafter, self.params, state, jnp.asarray(noise)
    )
    draft = jax.tree.map(np.asarray, draft)
    parents = np.broadcast_to(draft.parents, draft.tokens.shape)
    return draft._replace(parents=parents)

  def after(self, texts: Sequence[tuple[int, ...]]) -> np.ndarray:
    """[len(texts), V] the target's probabilities of what follows each."""
    probs, source = [], None
    if self.target.encode is not None:
      tokens, length = self.alike["source"], self.alike["source_length"]
      source = Source(jnp.asarray(tokens), jnp.asarray(length))
    for first in range(0, len(texts), ROWS):
      tokens = np.zeros((ROWS, LENGTH + self.spec.max_depth), np.int32)
      length = np.ones(ROWS, np.int32)
      for row, text in enumerate(texts[first : first + ROWS]):
        tokens[row, : len(text)], length[row] = text, len(text)
      log_probs = _log_probs_after(
        self.target,
        self.params.target,
        tokens,
        length,
        sampling.settings(ROWS, **self.settings),
        source,
      )
      probs.append(np.exp(np.asarray(log_probs, float)))
    probs = np.concatenate(probs)[: len(texts)]
    return probs / probs.sum(-1, keepdims=True)


def _every_rule() -> list[AcceptanceRule]:
  """Rules of specdec.acceptance by which greedy rows are greedy text."""
  return [
    acceptance.rejection(),
    acceptance.block(),
    acceptance.kseq(),
    acceptance.multipath(),
    acceptance.traversal(),
    acceptance.naive(),
    acceptance.greedy(),
    acceptance.lenience(0.5),
    acceptance.fly(window=1),
    acceptance.typical(),
    acceptance.relaxed(2, 0.5),
  ]


def texts_of(state) -> list[tuple[int, ...]]:
  """Committed tokens of every row."""
  rows = zip(np.asarray(state.tokens).tolist(), np.asarray(state.length))
  return [tuple(row[:length]) for row, length in rows]
