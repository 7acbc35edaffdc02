"""No cache is copied inside a loop (rule 9), read off the programs."""

import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import cache_copies
from cache_copies import (
  MAX_LENGTH,
  arguments,
  beam_drafters,
  cache_buffers,
  check_in_place,
  copies,
  lower,
  lower_beams,
  nbytes,
  pairs,
)
from specdec import beam, decode

# check_drafter looks at more, at batch 32: exits, skips, sparse after copies.
DUE = {("lookup", 1), ("model", 1), ("model, chains", 4)}
DUE |= {("model, adaptive", 4), ("early exit, dynamic", 4)}


@pytest.mark.parametrize(
  "name, batch",
  [
    pytest.param(*case, marks=() if case in DUE else pytest.mark.slow)
    for case in itertools.product(pairs(), (1, 4))
  ],
)
def test_generation_never_copies_a_cache(name, batch):
  lowered, (cache, drafter_cache) = lower(pairs()[name], batch)
  assert len(cache) == 4
  assert len(drafter_cache) == (2 if name.startswith("model") else 0)
  check_in_place(lowered, cache, drafter_cache)


BEAM_DUE = {"baseline", "model", "eagle"}


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in BEAM_DUE else pytest.mark.slow)
    for name in beam_drafters()
  ],
)
def test_beam_search_never_copies_a_cache_nor_a_text(name):
  lowered, (cache, drafter_cache), texts = lower_beams(
    *beam_drafters()[name], beam.Search(3), batch=2
  )
  has_cache = name.startswith("model") or name == "eagle"
  assert len(drafter_cache) == 2 * has_cache
  # Prompt lookup shifts whole texts to compare them with themselves.
  texts = () if name == "lookup" else texts
  check_in_place(lowered, cache, (*drafter_cache, *texts))


def test_stream_gives_its_buffers_on():
  pair = pairs()["baseline"]
  static, (params, *rest, settings) = arguments(pair, 4)
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

  def write(i, buffer):
    new = jnp.full((1, 2, 1, 32), i, buffer.dtype)
    return jax.lax.dynamic_update_slice(buffer, new, (0, 0, i, 0))

  def keep_both(i, pair):
    return write(i, pair[0]), pair[0]

  def copied(step, start):
    loop = jax.jit(lambda buffer: jax.lax.fori_loop(0, 9, step, start(buffer)))
    return copies(loop.lower(shape).compile().as_text(), [shape])

  assert copied(keep_both, lambda buffer: (buffer, buffer))
  assert not copied(write, lambda buffer: buffer)


@pytest.mark.slow  # minutes of the TPU's compiler
def test_tpu_program_never_copies_a_cache():
  pytest.importorskip("libtpu")
  environment = os.environ | {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used that others might want
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
  }
  result = subprocess.run(
    [sys.executable, cache_copies.__file__],
    env=environment,
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert result.returncode == 0, result.stderr[-2000:]
  findings = json.loads(result.stdout.splitlines()[-1])
  assert len(findings) == 2 * len(pairs()) + 1  # and a refill
  for name, finding in findings.items():
    assert finding["copies"] == [], name
    # Of one row's whole cache, drafted in and then verified at one of several
    # widths, the compiler keeps one buffer more: a quarter of two layers'.
    most = 2 if name == "layer skip, threshold, batch 1" else 4
    assert finding["temporary"] < finding["cache"] / most, name
