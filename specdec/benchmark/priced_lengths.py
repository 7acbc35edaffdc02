"""Prices ways of choosing a draft's length, by the rounds of table models.

The loop is the real one. Target and draft are tables (specdec/testing) that
agree as often as is said, and what their rounds cost is a roofline's: of every
round it is recorded what the loop did, and that is priced as if models of some
size had done it on some chip. So acceptance is known and costs are exact, and
all seconds are predictions.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import acceptance, decode, draft_length, draft_shape, drafters
from specdec import sampling as filters
from specdec.benchmark import metrics
from specdec.benchmark.auto import pilot_rounds
from specdec.draft_shape import DraftShape
from specdec.roofline import planning, prediction
from specdec.roofline.round_cost import PIECE, TargetDraftPair
from specdec.testing import table_model
from specdec.types import Outcomes, Params, Stats

VOCABULARY = 32
TOKENS = 128  # new ones a row, at most
FIXED = (1, 2, 4, 8)
UNEQUAL = (0.95, 0.2)
_EIGHTH = TOKENS // 8
_OTHER_NOISE = 10**6
_MODEL = table_model.model(VOCABULARY)
_RULE = acceptance.rejection()


class Load(NamedTuple):
  """What a batch has to do.

  Attributes:
    name: for tables.
    agreements: how often rows accept a draft token, in turns from row to row.
    steady: only rounds count in which all rows have room for a whole draft, as
      if rows that are done were replaced; else all, until the last row is done.
    least: tokens that a row asks for, up to TOKENS, drawn evenly.
  """

  name: str
  agreements: tuple[float, float]
  steady: bool = True
  least: int = TOKENS


def loads(alpha: float) -> list[Load]:
  """Returns the loads that are compared; equal rows accept alpha."""
  good, bad = UNEQUAL
  uneven = f"{good:g} and {bad:g} in turns"
  return [
    Load(f"{alpha:g} of all rows, steady", (alpha, alpha)),
    Load(f"{uneven}, steady", UNEQUAL),
    Load(f"{uneven}, until all rows are done", UNEQUAL, steady=False),
    Load(
      f"{alpha:g} of all rows, which ask for {_EIGHTH} to {TOKENS} tokens, "
      "until all are done",
      (alpha, alpha),
      steady=False,
      least=_EIGHTH,
    ),
  ]


class Rounds(NamedTuple):
  """What the loop did in every round: arrays [R]."""

  steps: np.ndarray  # draft steps, of a token a row
  nodes: np.ndarray  # nodes of a row that were verified, used or not
  caught_up: np.ndarray  # tokens of a row that the draft model read before
  emitted: np.ndarray  # tokens of all rows
  steady: np.ndarray  # bool: all rows had room for a whole draft


class Way(NamedTuple):
  """A way of choosing a draft's length."""

  shape: DraftShape
  looks: bool = False  # it runs the step after whose distribution it stops


@functools.partial(jax.jit, static_argnames="way")
def _decoded(way, params, prompt, limit, key, max_rounds):
  """Decodes; returns Rounds, how many of them are used, and (Stats,
  Outcomes or None)."""
  drafter = drafters.model(_MODEL, shape=way.shape)
  parts = _MODEL, drafter, _RULE
  batch, size = len(prompt), 1 + TOKENS
  widths, depth = jnp.array(drafter.spec.widths), drafter.spec.max_depth
  state = decode.start(
    *parts,
    params,
    prompt,
    jnp.ones((batch,), jnp.int32),
    key,
    max_length=size,
    sampling=filters.settings(batch, 1.0),
    limit=limit,
  )

  def unfinished(carry):
    number, state, _ = carry
    return (number < max_rounds) & ~jnp.all(state.done)

  def turn(carry):
    number, before, rounds = carry
    after = decode.run(*parts, params, before, jnp.array([-1]), 1)
    old, new = before.stats, after.stats
    steps = jnp.max(new.nodes - old.nodes)
    if way.looks:
      steps = jnp.minimum(steps + 1, depth)
    # It begins a round with the last two tokens, and reads the others before.
    behind = jnp.max(before.length - 2 - before.draft_state.cache.length)
    pieces = jnp.where(steps > 0, -(-jnp.maximum(behind, 0) // PIECE), 0)
    this = Rounds(
      steps,
      jnp.dot(new.widths - old.widths, widths),
      PIECE * pieces,
      jnp.sum(new.emitted - old.emitted),
      jnp.all(before.limit - before.length > depth),
    )
    put = jax.tree.map(lambda all_, one: all_.at[number].set(one), rounds, this)
    return number + 1, after, put

  counts = jnp.zeros((TOKENS,), jnp.int32)
  carry = jnp.int32(0), state, Rounds(*[counts] * 4, counts > 0)
  used, state, rounds = jax.lax.while_loop(unfinished, turn, carry)
  return rounds, used, (state.stats, state.outcomes)


class Draw(NamedTuple):
  """What is decoded: tables of two regions, and rows of these."""

  params: Params  # of `table_model.agreeing_params`
  regions: Sequence[int]  # [B], by a row's first token
  tokens: Sequence[int]  # [B] new ones that a row asks for, up to TOKENS
  seed: int  # of the noise

  @classmethod
  def of(cls, load: Load, batch: int, seed: int) -> "Draw":
    """Returns one of this load; all that is random is by the seed."""
    rng = np.random.default_rng(seed)
    return cls(
      _tables(seed, load.agreements),
      (np.arange(batch) + seed) % 2,
      rng.integers(load.least, TOKENS + 1, batch),
      seed,
    )


@functools.lru_cache(maxsize=64)
def _tables(seed: int, agreements: tuple[float, float]) -> Params:
  return table_model.agreeing_params(seed, VOCABULARY, agreements)


def decoded(
  way: Way, draw: Draw, max_rounds: int = TOKENS
) -> tuple[Rounds, tuple[Stats, Outcomes | None]]:
  """Decodes rows; returns what was done in every round, counts and outcomes."""
  size = VOCABULARY // 2
  first = np.arange(len(draw.regions)) % size
  prompt = (size * np.asarray(draw.regions) + first)[:, None]
  rounds, used, counts = jax.device_get(
    _decoded(
      way,
      draw.params,
      jnp.asarray(prompt, jnp.int32),
      1 + jnp.asarray(draw.tokens, jnp.int32),
      jax.random.key(draw.seed),
      max_rounds,
    )
  )
  return jax.tree.map(lambda x: x[:used], rounds), counts


def seconds(
  pair: TargetDraftPair, batch: int, context: int, rounds: Rounds
) -> np.ndarray:
  """Returns what each round takes [R], by a roofline."""
  done = list(zip(rounds.steps.tolist(), rounds.nodes.tolist()))
  costs = {
    one: planning.chain_seconds(pair, batch, context, *one) for one in {*done}
  }
  reading = pair.catch_up(batch, context)
  return np.array([costs[one] for one in done]) + reading * rounds.caught_up


def ways(
  pair: TargetDraftPair,
  batch: int,
  context: int,
  most: int,
  rates: draft_length.Rates | None = None,
) -> dict[str, Way]:
  """Returns fixed and decided lengths of at most `most` tokens, by name.

  `adaptive` decides by the very costs that its rounds are priced with, and
  expects `rates` before it has outcomes.
  """
  named = {f"k = {k}": Way(draft_shape.chain(k)) for k in FIXED if k <= most}
  widths = draft_shape.step_widths(most)
  costs = planning.step_costs(pair, batch, context, widths)
  catch_up = pair.catch_up(batch, context)
  known = rates or (None, None)
  adaptive = draft_length.adaptive(most, costs, catch_up, *known)
  entropy = draft_length.entropy(most)
  return named | {"adaptive": Way(adaptive), "entropy": Way(entropy, True)}


def first_rounds(
  shape: DraftShape, draw: Draw
) -> tuple[Stats, Outcomes | None]:
  """Returns what first rounds accept, whose noise is their own
  (benchmark.auto); their time does not count."""
  pilot = draw._replace(seed=_OTHER_NOISE + draw.seed)
  return decoded(Way(shape), pilot, pilot_rounds(len(draw.regions)))[1]


def auto(pair: TargetDraftPair, context: int, most: int, draw: Draw) -> Way:
  """Returns the k in 0 .. most that `--k=auto` would decode these rows with."""
  stats, _ = first_rounds(draft_shape.chain(most), draw)
  rates = prediction.observed([[stats]]).prefix_acceptance
  best = planning.best_k(pair, len(draw.regions), context, rates, most)
  return Way(draft_shape.chain(best.k))


def compare(
  pair: TargetDraftPair,
  batches: Sequence[int],
  context: int,
  alpha: float,
  most: int,
  repeats: int,
) -> Iterator[dict]:
  """Yields what every way gains under every load, batch by batch.

  Each repeat has tables and noise of its own; what `adaptive` expects is
  learnt from the first one's alone. Rows that are equal accept alpha, and the
  largest k is `most`.
  """
  for batch in batches:
    always = draft_length.adaptive(most, (1.0,) * (most + 1))
    for load in loads(alpha):
      draws = [Draw.of(load, batch, seed) for seed in range(repeats)]
      _, outcomes = first_rounds(always, draws[0])
      rates = draft_length.rates_of(outcomes)
      named = ways(pair, batch, context, most, rates)
      each = {name: [way] * repeats for name, way in named.items()}
      each["auto"] = [auto(pair, context, most, draw) for draw in draws]
      for name, some in each.items():
        all_rounds = [decoded(*one)[0] for one in zip(some, draws)]
        entry = {"load": load.name, "batch": batch, "way": name}
        entry["k"] = [way.shape.spec.max_depth for way in some]
        yield entry | summed(pair, context, load, draws, all_rounds)


def summed(
  pair: TargetDraftPair,
  context: int,
  load: Load,
  draws: Sequence[Draw],
  all_rounds: Sequence[Rounds],
) -> dict:
  """Sums up the repeats of a way, which are the unit of errors."""
  batch = len(draws[0].regions)
  baseline = pair.round(batch, 0, context).seconds
  tokens, plain, ours, steps = [], [], [], []
  for draw, rounds in zip(draws, all_rounds):
    counted = rounds.steady | (not load.steady)
    tokens.append(rounds.emitted[counted].sum())
    alone = tokens[-1] / batch if load.steady else max(draw.tokens)
    plain.append(baseline * alone)
    ours.append(seconds(pair, batch, context, rounds)[counted].sum())
    steps.append(rounds.steps[counted].mean())
  speed = {
    "speedup": dataclasses.asdict(metrics.ratio(plain, ours)),
    "baseline_tokens_per_second": float(sum(tokens) / sum(plain)),
    "tokens_per_second": float(sum(tokens) / sum(ours)),
  }
  return {"steps": float(np.mean(steps)), "speed": speed}
