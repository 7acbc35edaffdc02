"""Drafters in the formats of others: loaded exactly, written back bit for bit.

The folders of fixtures/drafters were written, and their logits computed, by the
`speculators` package (tools/record_drafters.py).
"""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specdec import drafters
from specdec.checkpoints import formats
from specdec.drafters.heads.draft_head import TargetWeights
from specdec.drafters.heads.unroll import growing, unroll
from specdec.models.config import TransformerConfig
from specdec.types import ModelOutput

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "drafters"
TARGET = TransformerConfig(
  vocab_size=24,
  num_layers=6,
  width=16,
  mlp_width=20,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)


def unrolled(head_config, ids, net, tokens, hidden, weights=None):
  """[levels, T, n] logits of a drafter, teacher-forced.

  Args:
    tokens: [T].
    hidden: [T, n * M] the target's streams, side by side, or its last one.
    weights: TargetWeights, where it has no embedding and head of its own.
  """
  head = drafters.LEARNED[head_config.kind](head_config, TARGET, ids, growing)
  streams = jnp.split(hidden[None], hidden.shape[1] // TARGET.width, axis=-1)
  features = tuple(streams) if head_config.features else ()
  output = ModelOutput(None, streams[-1], features)
  levels = 3 if head_config.kind != "medusa" else head_config.levels
  logits, _ = jax.jit(
    lambda net: unroll(head, net, weights, tokens[None], output, levels)
  )(net)
  return np.stack([x[0] for x in logits])


@pytest.mark.parametrize("name", sorted(x.name for x in FIXTURES.iterdir()))
def test_logits_are_those_of_speculators(name):
  expected = load_file(FIXTURES / name / "expected.safetensors")
  drafter = formats.load(FIXTURES / name, TARGET)
  weights = None
  if "embed" in expected:
    weights = TargetWeights(
      jnp.asarray(expected["embed"]), jnp.asarray(expected["head"])
    )
  ours = unrolled(
    drafter.stored.head_config,
    drafter.ids,
    drafter.net,
    jnp.asarray(expected["tokens"], jnp.int32),
    jnp.asarray(expected["hidden"]),
    weights,
  )
  theirs = expected["logits"]
  # Later steps of its MTP attend to hidden states of their own step only, which
  # no decoder with a KV cache does.
  for level in range(1 if name.startswith("mtp") else len(theirs)):
    count = min(theirs.shape[1], ours.shape[1] - 1 - level)
    first = 1 + level
    gap = ours[level, first : first + count] - theirs[level, :count]
    assert theirs.std() > 0.3
    assert np.abs(gap).max() < 1e-4, level
