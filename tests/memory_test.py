"""No cache is copied inside a loop (rule 9), read off the programs.

The real generation is compiled for a cache that dwarfs everything else, and
the optimised HLO is searched. Run as a program, this file does the same for a
TPU that need not be there (libtpu does) and prints its findings as JSON.
"""

import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from hlo import in_loops
from specdec import (
  acceptance,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec import cache as kv
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.types import Params, Skip

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
SHAPES = ("chains", "dynamic")
# Operations that make a second buffer of what they are given.
COPYING = ("copy", "copy-start", "transpose", "concatenate", "pad", "reverse")


def pairs(target, draft):
  """Name -> drafter and rule; widths (1,), (1, k + 1), (k + 1,) and more."""
  small, large = transformer.model(draft), transformer.model(target)
  chains = draft_shape.static(draft_tree.parallel(2, 3), "iid")
  dynamic = draft_shape.dynamic(2, 3, 6)
  return {
    "model, chains": (drafters.model(small, shape=chains), acceptance.kseq()),
    "model, dynamic": (
      drafters.model(small, shape=dynamic),
      acceptance.rejection(),
    ),
    "early exit, chains": (
      drafters.early_exit(large, 1, shape=chains),
      acceptance.kseq(),
    ),
    "early exit, dynamic": (
      drafters.early_exit(large, 1, shape=dynamic),
      acceptance.rejection(),
    ),
    "layer skip": (
      drafters.layer_skip(large, SKIP, K),
      acceptance.rejection(),
    ),
    "layer skip, threshold": (
      drafters.layer_skip(large, SKIP, K, drafters.Threshold()),
      acceptance.rejection(),
    ),
    "layer skip, chains": (
      drafters.layer_skip(large, SKIP, shape=chains),
      acceptance.kseq(),
    ),
    "baseline": (decode.NO_DRAFTER, decode.NO_DRAFT_RULE),
    "lookup": (drafters.lookup(K), acceptance.rejection()),
    "model": (drafters.model(small, K), acceptance.rejection()),
    "early exit": (
      drafters.early_exit(large, 1, K),
      acceptance.rejection(),
    ),
  }


def arguments(pair, batch, target, draft, sharding=None):
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


def cache_buffers(state):
  """K and V of the target, and of the drafter where it has a cache."""
  own = [x for x in jax.tree.leaves(state.draft_state) if len(x.shape) == 4]
  return jax.tree.leaves(state.target_cache.layers), own


def copies(hlo, buffers):
  """Lines of loop bodies that make another buffer of a cache's size.

  A bitcast changes the shape of a buffer and not its number of elements, so
  that number is what is compared.
  """
  sizes = {math.prod(buffer.shape) for buffer in buffers}
  found = []
  for line in in_loops(hlo):
    kind, name = re.match(r".*? = (.*?) ([a-z][\w-]*)\(", line).groups()
    shapes = re.findall(r"\w+\[([\d,]*)\]", kind)
    counts = {math.prod(map(int, s.split(","))) for s in shapes if s}
    if name in COPYING and counts & sizes:
      found.append(line)
  return found


def nbytes(buffers):
  return sum(math.prod(b.shape) * b.dtype.itemsize for b in buffers)


TREES = [f"{who}, {how}" for who in ("model", "early exit") for how in SHAPES]


@pytest.mark.parametrize(
  "name, batch",
  [
    (name, batch)
    for name in ("baseline", "lookup", "model", "early exit")
    for batch in (1, 4)
  ]
  + [("layer skip, threshold", 4)]
  + [
    pytest.param(name, batch, marks=pytest.mark.slow)
    for name in ("layer skip", "layer skip, threshold", "layer skip, chains")
    for batch in (1, 4)
    if (name, batch) != ("layer skip, threshold", 4)
  ]
  + [(name, 4) for name in TREES]
  + [pytest.param(name, 1, marks=pytest.mark.slow) for name in TREES],
)
def test_generation_never_copies_a_cache(name, batch):
  lowered, (cache, own) = lower(pairs(TARGET, DRAFT)[name], batch)
  assert len(cache) == 4
  assert len(own) == (2 if name.startswith("model") else 0)
  compiled = lowered.compile()
  hlo = compiled.as_text()
  # The search did see the loops: their bodies carry the cache.
  shape = ",".join(map(str, cache[0].shape))
  assert any(f"[{shape}]" in line for line in in_loops(hlo))
  assert copies(hlo, cache + own) == []
  # The most that lives beside the caches is the scores of one prefill chunk:
  # heads * chunk * slots floats, an eighth of the target's cache here.
  temporary = compiled.memory_analysis().temp_size_in_bytes
  assert temporary < nbytes(cache) / 4, temporary / nbytes(cache)


def test_stream_gives_its_buffers_on():
  pair = pairs(TARGET, DRAFT)["baseline"]
  static, (params, *rest, settings) = arguments(pair, 4, TARGET, DRAFT)
  state = jax.eval_shape(
    lambda params, *rest: decode.start(
      *static, params, *rest, max_length=MAX_LENGTH, sampling=settings
    ),
    params,
    *rest,
  )
  eos_ids = jax.ShapeDtypeStruct((1,), jnp.int32)
  compiled = decode.run.lower(*static, params, state, eos_ids, 4).compile()
  cache, _ = cache_buffers(state)
  memory = compiled.memory_analysis()
  assert copies(compiled.as_text(), cache) == []
  assert memory.alias_size_in_bytes >= nbytes(cache)
  assert memory.temp_size_in_bytes < nbytes(cache) / 4


def test_the_search_finds_a_buffer_that_is_kept_beside_its_successor():
  # A cache carried through `lax.cond` is copied by jax 0.10 and no longer by
  # 0.11; an old buffer that lives on while the new one is written always is.
  shape = jax.ShapeDtypeStruct((1, 2, 512, 32), jnp.float32)

  def sample_tree(i, buffer):
    new = jnp.full((1, 2, 1, 32), i, buffer.dtype)
    return jax.lax.dynamic_update_slice(buffer, new, (0, 0, i, 0))

  def keep_both(i, pair):
    return sample_tree(i, pair[0]), pair[0]

  def found(step, start):
    loop = jax.jit(lambda buffer: jax.lax.fori_loop(0, 9, step, start(buffer)))
    return copies(loop.lower(shape).compile().as_text(), [shape])

  assert found(keep_both, lambda buffer: (buffer, buffer))
  assert not found(sample_tree, lambda buffer: buffer)


def test_the_search_finds_a_single_vector_write(monkeypatch):
  """Without the second scratch vector of `cache.write`, XLA copies on CPU."""

  def write(buffer, new, slot):
    new = new.astype(buffer.dtype)
    return jax.lax.dynamic_update_slice(buffer, new, (0, 0, slot[0], 0))

  monkeypatch.setattr(kv, "write", write)
  jax.clear_caches()  # or the trace of the real `write` is found again
  lowered, (cache, _) = lower(pairs(TARGET, DRAFT)["baseline"], 1)
  found = copies(lowered.compile().as_text(), cache)
  jax.clear_caches()
  assert found


@pytest.mark.slow  # minutes of the TPU's compiler
def test_tpu_program_never_copies_a_cache():
  pytest.importorskip("libtpu")
  environment = os.environ | {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used that others might want
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
  }
  result = subprocess.run(
    [sys.executable, __file__],
    env=environment,
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert result.returncode == 0, result.stderr[-2000:]
  findings = json.loads(result.stdout.splitlines()[-1])
  assert len(findings) == 2 * len(pairs(TARGET, DRAFT))
  for name, finding in findings.items():
    assert finding["copies"] == [], name
    # Of one row's whole cache, drafted in and then verified at one of several
    # widths, the compiler keeps one buffer more: a quarter of two layers'.
    most = 2 if name == "layer skip, threshold, batch 1" else 4
    assert finding["temporary"] < finding["cache"] / most, name


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
      lowered, (cache, own) = lower(
        pair, batch, target, draft, sharding, max_length=2**18 + 58
      )
      compiled = lowered.compile()
      findings[f"{name}, batch {batch}"] = {
        "copies": copies(compiled.as_text(), cache + own),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "cache": nbytes(cache),
      }
  return findings


if __name__ == "__main__":
  print(json.dumps(tpu_findings()))
