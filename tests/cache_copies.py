"""Whole generations compiled for a cache that dwarfs everything else, and the
search for copies of it in the loops of the optimised HLO (rule 9).

Run as a program, this file does so for a TPU that need not be there (libtpu
does) and prints its findings as JSON.
"""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp

import learned_kinds
from hlo import in_loops
from specdec import (
  acceptance,
  beam,
  decode,
  draft_length,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
  slots,
)
from specdec.compiled import hlo as parsed
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.inputs import Inputs
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.types import Params, Skip, Sparse

MAX_LENGTH = 2040
PROMPT = 8  # short: a prefill chunk's scores are [B, heads, chunk, slots]
K = 4
TARGET = TransformerConfig(
  vocab_size=64,
  num_layers=2,
  width=64,
  mlp_width=96,
  num_heads=2,
  num_kv_heads=2,
  head_dim=32,
)
DRAFT = TransformerConfig(
  vocab_size=64,
  num_layers=1,
  width=32,
  mlp_width=48,
  num_heads=2,
  num_kv_heads=2,
  head_dim=16,
)
SKIP = Skip((0,), (1,))
# Operations that make a second buffer of what they are given.
COPYING = ("copy", "copy-start", "transpose", "concatenate", "pad", "reverse")
COPYING += ("gather", "convert")


def pairs(target=TARGET, draft=DRAFT):
  """Name -> drafter and rule; widths (1,), (1, k + 1), (k + 1,) and more."""
  small, large = transformer.model(draft), transformer.model(target)
  chains = draft_shape.static(draft_tree.parallel(2, 3), "iid")
  dynamic = draft_shape.dynamic(2, 3, 6)
  adaptive = draft_length.adaptive(3)
  rejection, kseq = acceptance.rejection(), acceptance.kseq()
  threshold = drafters.Threshold()
  named = {
    "baseline": (decode.NO_DRAFTER, decode.NO_DRAFT_RULE),
    "lookup": (drafters.lookup(K), rejection),
    "layer skip, threshold": (
      drafters.layer_skip(large, SKIP, K, threshold),
      rejection,
    ),
    "lookup | sparse": (
      drafters.fallback(
        drafters.lookup(K), drafters.sparse(large, Sparse(window=64), 2)
      ),
      rejection,
    ),
  }
  for name, drafter in {
    "model": functools.partial(drafters.model, small),
    "early exit": functools.partial(drafters.early_exit, large, 1),
    "layer skip": functools.partial(drafters.layer_skip, large, SKIP),
  }.items():
    named[name] = drafter(k=K), rejection
    named[f"{name}, chains"] = drafter(shape=chains), kseq
    named[f"{name}, adaptive"] = drafter(shape=adaptive), rejection
    if name != "layer skip":
      named[f"{name}, dynamic"] = drafter(shape=dynamic), rejection
  return named


def arguments(pair, batch, target=TARGET, draft=DRAFT, sharding=None):
  """Shapes for `decode.start`: nothing is allocated."""
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = [
    jax.eval_shape(lambda k, c=c: transformer.init_params(c, k), key)
    for c in (target, draft)
  ]
  prompt = jax.ShapeDtypeStruct((batch, PROMPT), jnp.int32)
  length = jax.ShapeDtypeStruct((batch,), jnp.int32)
  settings = jax.eval_shape(lambda: sampling.settings(batch, temperature=1.0))
  traced = (Params(*params), prompt, length, key, settings)
  traced = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), traced
  )
  return (transformer.model(target), *pair), traced


def lower(
  pair,
  batch,
  target=TARGET,
  draft=DRAFT,
  sharding=None,
  max_length=MAX_LENGTH,
):
  """`generate`, lowered, and the shapes of its caches' buffers."""
  static, traced = arguments(pair, batch, target, draft, sharding)

  def generate(*args):
    *args, settings = args
    return decode.generate(
      *static, *args, max_length=max_length, sampling=settings, eos_ids=(1,)
    )

  lowered = jax.jit(generate).lower(*traced)
  return lowered, cache_buffers(lowered.out_info)


def lower_refill(
  pair,
  batch,
  count,
  target=TARGET,
  draft=DRAFT,
  sharding=None,
  max_length=MAX_LENGTH,
):
  """`slots.refill` of `count` rows, lowered, and its caches' buffers."""
  static, traced = arguments(pair, batch, target, draft, sharding)

  def begin(params, *inputs):
    inputs = Inputs(*inputs)._asdict()
    return decode.start(*static, params, **inputs, max_length=max_length)

  def of_rows(x):
    shape = (count, *x.shape[1:])
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

  state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    jax.eval_shape(begin, *traced),
  )
  params, prompt, length, key, settings = traced
  prompt, rows, settings = jax.tree.map(of_rows, (prompt, length, settings))
  inputs = Inputs(prompt, rows, key, settings, rows, rows)
  lowered = slots.refill.lower(*static, params, state, rows, inputs)
  return lowered, cache_buffers(state)


def beam_drafters():
  """Name -> drafter and the draft's weights, as shapes."""
  weights = jax.eval_shape(
    functools.partial(transformer.init_params, DRAFT), jax.random.key(0)
  )
  named = {name: (pair[0], weights) for name, pair in pairs().items()}
  # Its cache is no block of the target's: sizes are what is compared.
  head = learned_kinds.draft_head(
    "eagle", full=True, config=TARGET, head_dim=16
  )
  shape = draft_shape.dynamic(2, 3, 6)
  drafter = serve.drafter(head, transformer.model(TARGET), shape)

  def of_head(key):
    target = transformer.init_params(TARGET, key)
    return draft_heads.weights_of(head, head.init(key), target)

  return named | {
    "eagle": (drafter, jax.eval_shape(of_head, jax.random.key(0)))
  }


def lower_beams(drafter, weights, search, batch):
  """`beam.run`, lowered; its caches' buffers, and those of texts."""
  args = arguments((drafter, search), batch)
  static, (params, prompt, length, key, settings) = args
  params = params._replace(draft=weights)
  inputs = Inputs(prompt, length, key, settings, length, None, None)
  start = functools.partial(beam.start, *static, max_length=MAX_LENGTH)
  beams = jax.eval_shape(start, params, inputs)
  eos_ids = jax.ShapeDtypeStruct((1,), jnp.int32)
  state = beams.state
  texts = state.tokens, state.log_probs, beams.finished.tokens
  lowered = beam.run.lower(*static, params, beams, eos_ids)
  return lowered, cache_buffers(state), texts


def cache_buffers(state):
  """K and V of the target, and of the drafter where it has a cache."""
  drafter = jax.tree.leaves(state.draft_state)
  drafter = [x for x in drafter if len(x.shape) == 4]
  return jax.tree.leaves(state.target_cache.layers), drafter


def copies(hlo, buffers):
  """Lines of loop bodies that make another buffer of a cache's size.

  A bitcast changes the shape of a buffer and not its number of elements, so
  that number is what is compared.
  """
  sizes = {math.prod(buffer.shape) for buffer in buffers}
  lines = []
  for line in in_loops(hlo):
    kind, name = re.match(r".*? = (.*?) ([a-z][\w-]*)\(", line).groups()
    shapes = re.findall(r"\w+\[([\d,]*)\]", kind)
    counts = {math.prod(map(int, s.split(","))) for s in shapes if s}
    if name in COPYING and counts & sizes:
      lines.append(line)
  return lines


def copies_anywhere(hlo, buffers):
  """Lines, in loops or not, that make another buffer of a cache's size."""
  sizes = {math.prod(buffer.shape) for buffer in buffers}
  return [
    one.line.strip()
    for part in parsed.Program(hlo).computations.values()
    for one in part.values()
    if one.op in COPYING and sizes & {math.prod(b.shape) for b in one.buffers}
  ]


def check_in_place(lowered, buffers, drafter_buffers):
  """Asserts that a program copies no cache in a loop; few temporaries.

  The most that lives next to the caches is the scores of one prefill chunk:
  heads * chunk * slots floats, an eighth of the target's cache here.
  """
  compiled = lowered.compile()
  hlo = compiled.as_text()
  # The search did see the loops: their bodies carry the caches.
  for buffer in {x.shape for x in (*buffers, *drafter_buffers)}:
    shape = ",".join(map(str, buffer))
    assert any(f"[{shape}]" in line for line in in_loops(hlo)), shape
  assert copies(hlo, (*buffers, *drafter_buffers)) == []
  temporary = compiled.memory_analysis().temp_size_in_bytes
  assert temporary < nbytes(buffers) / 4, temporary / nbytes(buffers)


def nbytes(buffers):
  return sum(math.prod(b.shape) * b.dtype.itemsize for b in buffers)


def tpu_findings(topology="v5e:2x2"):
  """What these programs look like on one chip of a TPU."""
  from jax.experimental import topologies

  chip = topologies.get_topology_desc(topology, platform="tpu").devices[:1]
  mesh = jax.sharding.Mesh(chip, ("one",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  # A head of 128 fills the lanes of a tile, so nothing is padded. A buffer has
  # more than the 128 MiB of on-chip memory: smaller ones the compiler may keep
  # there, and then it moves them in and out.
  sizes = {"width": 256, "head_dim": 128, "dtype": "bfloat16"}
  target = TransformerConfig(**(vars(TARGET) | sizes))
  draft = TransformerConfig(**(vars(DRAFT) | sizes))
  findings = {}
  for name, pair in pairs(target, draft).items():
    for batch in (1, 4):
      lowered, (cache, drafter_cache) = lower(
        pair, batch, target, draft, sharding, max_length=2**18 + 58
      )
      compiled = lowered.compile()
      findings[f"{name}, batch {batch}"] = {
        "copies": copies(compiled.as_text(), cache + drafter_cache),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "cache": nbytes(cache),
      }
  lowered, (cache, drafter_cache) = lower_refill(
    pairs(target, draft)["model"], 4, 1, target, draft, sharding, 2**16 + 58
  )
  compiled = lowered.compile()
  findings["refill"] = {
    "copies": copies_anywhere(compiled.as_text(), cache + drafter_cache),
    "temporary": compiled.memory_analysis().temp_size_in_bytes,
    "cache": nbytes(cache + drafter_cache),
  }
  return findings


if __name__ == "__main__":
  print(json.dumps(tpu_findings()))
