"""Setups of training refuse what cannot be trained, before anything loads."""

import re

import pytest

from specdec.training.joint import LayerSkip
from specdec.training.setup import (
  HeadSetup,
  JointSetup,
  ModelSetup,
  from_config,
)
from tiny_training import DECODING, SHAPE

SHARED = dict(data="text", held_out="text")
OPTIONS = dict(steps=12, batch=4, sequence=6, warmup=2)
LANGUAGE_MODEL = SHARED | dict(
  tokenizer="letters",
  model=dict(vocab_size=32, num_layers=3, **SHAPE),
  options=OPTIONS,
)
HEAD_CONFIG = dict(kind="mtp", head="shared", **SHAPE)
HEAD = SHARED | dict(
  target="target",
  head_config=HEAD_CONFIG,
  loss=dict(divergence="forward_kl"),
  options=OPTIONS,
  decoding=DECODING,
)
JOINT = LANGUAGE_MODEL | dict(head_config=None, decoding=DECODING)
SKIP = dict(layer_skip=dict(dropout=0.5))
EXIT = dict(decoding=DECODING | dict(exit_layer=1))


@pytest.mark.parametrize(
  "config, setup",
  [
    (LANGUAGE_MODEL, ModelSetup),
    (LANGUAGE_MODEL | dict(target="", decoding=DECODING), ModelSetup),
    (HEAD, HeadSetup),
    (JOINT, JointSetup),
    (LANGUAGE_MODEL | dict(layer_skip=None), JointSetup),
  ],
)
def test_a_config_s_entries_say_what_is_trained(config, setup):
  assert type(from_config(config)) is setup


def test_kinds_of_joint_training():
  head = dict(head_config=HEAD_CONFIG, loss=dict(divergence="cross_entropy"))
  for changes, kind in (
    (head, "mtp"),
    (SKIP | EXIT, "layerskip"),
    ({}, "none"),
  ):
    assert from_config(JOINT | changes).kind == kind


@pytest.mark.parametrize(
  "change, complaint",
  [
    ({"steps": 0}, "steps = 0; it must be >= 1"),
    ({"accumulate": 3}, "accumulate = 3 does not divide batch = 4"),
    ({"warmup": 12}, "warmup = 12; it must be < steps = 12"),
    ({"optimizer": "sgd"}, "optimizer 'sgd' is unknown; known: adamw, muon"),
    ({"dtype": "float16"}, "known: float32, bfloat16"),
    ({"learning_rate": 0.0}, "learning_rate = 0.0; it must be > 0"),
    ({"clip": float("nan")}, "clip = nan; it must be > 0"),
    ({"adam_b2": 2.0}, "adam_b2 = 2.0; it must be in 0..1"),
    ({"colour": 1}, "the config sets options.colour; accepted: steps, "),
    ({"steps": "many"}, "the config cannot be used: '"),
  ],
)
def test_options_refuse(change, complaint):
  with pytest.raises(ValueError, match=re.escape(complaint)):
    from_config(LANGUAGE_MODEL | dict(options=OPTIONS | change))


@pytest.mark.parametrize(
  "config, changes, complaint",
  [
    (LANGUAGE_MODEL, dict(speed="high"), "sets speed; accepted: tokenizer, "),
    (LANGUAGE_MODEL, dict(target="a"), "the config lacks decoding, loss"),
    (LANGUAGE_MODEL, dict(loss="forward_kl"), "'forward_kl' needs a target"),
    (
      LANGUAGE_MODEL,
      dict(samples=dict(count=9, prompt=2, temperature=1.0)),
      "samples.count = 9 needs a target",
    ),
    (
      LANGUAGE_MODEL,
      dict(model=LANGUAGE_MODEL["model"] | dict(num_layers=10**9)),
      "num_layers = 1,000,000,000",
    ),
    (
      LANGUAGE_MODEL,
      dict(model=LANGUAGE_MODEL["model"] | dict(dtype="bfloat16")),
      "trained in float32",
    ),
    (HEAD, dict(speed="high"), "the config sets speed; accepted: target, "),
    (HEAD, dict(loss=None), "the config lacks loss"),
    (HEAD, dict(decoding=dict(k=2)), "lacks decoding.length, decoding.new_to"),
    (
      HEAD,
      dict(head_config=HEAD_CONFIG | dict(colour=1)),
      "sets head_config.colour; accepted: kind, ",
    ),
    (HEAD, dict(loss=dict(divergence="hinge")), "divergence 'hinge' is unkn"),
    (HEAD, dict(loss=dict(decay=-1.0)), "decay = -1.0; it must be >= 0"),
    (
      HEAD,
      dict(decoding=DECODING | dict(prompts=0)),
      "decoding.prompts = 0; it must be >= 1",
    ),
    (
      HEAD,
      dict(decoding=DECODING | dict(temperature=-1.0)),
      "decoding.temperature = -1.0; it must be >= 0",
    ),
    (JOINT, SKIP | dict(head_config=HEAD_CONFIG), "head_config and layer_skip"),
    (JOINT, dict(loss=HEAD["loss"]), "sets loss, and no head_config to train"),
    (JOINT, dict(head_config=HEAD_CONFIG), "the config lacks loss"),
    (JOINT, SKIP, "the config lacks decoding.exit_layer"),
    (JOINT, dict(layer_skip=dict(p_max=0.1)), "sets layer_skip.p_max"),
    (
      JOINT,
      dict(model=LANGUAGE_MODEL["model"] | dict(dtype="bfloat16")),
      "trained in float32",
    ),
  ],
)
def test_setups_refuse(config, changes, complaint):
  with pytest.raises(ValueError, match=re.escape(complaint)):
    from_config(config | changes)


@pytest.mark.parametrize(
  "change, complaint",
  [
    ({"dropout": 1.5}, "dropout = 1.5; it must be in 0..1"),
    ({"exit_scale": -1.0}, "exit_scale = -1.0"),
    ({"rotation": 0}, "rotation = 0"),
  ],
)
def test_layer_skip_refuses(change, complaint):
  with pytest.raises(ValueError, match=complaint):
    LayerSkip(**change)
