"""Setups of training refuse what cannot be trained, before anything loads."""

import importlib.util
import math
import re
import runpy

import numpy as np
import pytest

import programs
from specdec.models import presets, transformer
from specdec.training import drafting, placing
from specdec.training.setup import (
  HeadSetup,
  JointSetup,
  ModelSetup,
  from_config,
)
from tiny_training import DECODING, SHAPE

SHARED = dict(
  data="text",
  held_out="text",
  options=dict(steps=12, batch=4, sequence=6, warmup=2),
)
MODEL = dict(vocab_size=32, num_layers=3, **SHAPE)
LANGUAGE_MODEL = SHARED | dict(tokenizer="letters", model=MODEL)
HEAD_CONFIG = dict(kind="mtp", head="shared", **SHAPE)
HEAD = SHARED | dict(
  target="target",
  head_config=HEAD_CONFIG,
  loss=dict(divergence="forward_kl"),
  decoding=DECODING,
)
JOINT = LANGUAGE_MODEL | dict(head_config=None, decoding=DECODING)
SKIP = dict(layer_skip=dict(dropout=0.5))
TEXT = dict(loss=dict(divergence="cross_entropy"))


@pytest.mark.parametrize(
  "config, setup, kind",
  [
    (LANGUAGE_MODEL, ModelSetup, None),
    (LANGUAGE_MODEL | dict(target="", decoding=DECODING), ModelSetup, None),
    (HEAD, HeadSetup, None),
    (JOINT, JointSetup, "none"),
    (LANGUAGE_MODEL | dict(layer_skip=None), JointSetup, "none"),
    (JOINT | TEXT | dict(head_config=HEAD_CONFIG), JointSetup, "mtp"),
    (
      JOINT | SKIP | dict(decoding=DECODING | dict(exit_layer=1)),
      JointSetup,
      "layerskip",
    ),
  ],
)
def test_a_config_s_entries_say_what_is_trained(config, setup, kind):
  built = from_config(config)
  assert type(built) is setup and getattr(built, "kind", None) == kind


@pytest.mark.parametrize(
  "config, part, changes, complaint",
  [
    (LANGUAGE_MODEL, None, dict(speed=1), "sets speed; accepted: tokenizer, "),
    (HEAD, "head_config", dict(colour=1), "sets head_config.colour; accepted"),
    (LANGUAGE_MODEL, None, dict(target="a"), "the config lacks decoding, loss"),
    (LANGUAGE_MODEL, None, dict(loss="forward_kl"), "needs a target"),
    (
      LANGUAGE_MODEL,
      None,
      dict(samples=dict(count=9, prompt=2, temperature=1.0)),
      "samples.count = 9 needs a target",
    ),
    (LANGUAGE_MODEL, "model", dict(num_layers=10**9), "= 1,000,000,000"),
    (LANGUAGE_MODEL, "model", dict(dtype="bfloat16"), "trained in float32"),
    (JOINT, "model", dict(dtype="bfloat16"), "trained in float32"),
    (HEAD, None, dict(loss=None), "the config lacks loss"),
    (
      HEAD,
      None,
      dict(decoding=dict(k=2)),
      "lacks decoding.length, decoding.new_tokens",
    ),
    (HEAD, "loss", dict(divergence="hinge"), "divergence 'hinge' is unknown; "),
    (HEAD, "loss", dict(decay=-1.0), "decay = -1.0; it must be in 0..1"),
    (HEAD, "decoding", dict(k=0), "decoding.k = 0; it must be >= 1"),
    (HEAD, "decoding", dict(temperature=1e38), "it must be in 0..1e+37"),
    (HEAD, "loss", dict(token_weight=float("inf")), ">= 0, and finite"),
    (HEAD, "loss", dict(token_weight=0.0), "are 0: nothing would be trained"),
    (HEAD, "loss", dict(decay=0.0), "levels only the first would count"),
    (HEAD, "decoding", dict(prompts=0), "decoding.prompts = 0; it must be >= "),
    (HEAD, "decoding", dict(temperature=-1.0), "decoding.temperature = -1.0"),
    (JOINT | SKIP, None, dict(head_config=HEAD_CONFIG), "and layer_skip"),
    (JOINT, None, dict(loss=HEAD["loss"]), "and no head_config to train"),
    (JOINT, None, dict(head_config=HEAD_CONFIG), "the config lacks loss"),
    (JOINT, None, SKIP, "the config lacks decoding.exit_layer"),
    (JOINT | SKIP, "layer_skip", dict(dropout=1.5), "it must be in 0..1"),
    (HEAD, "options", dict(steps=0), "steps = 0; it must be >= 1"),
    (HEAD, "options", dict(steps="many"), "steps = 'many'; it must be an int"),
    (HEAD, "options", dict(batch=10**30), "it must be an integer below 2**31"),
    (HEAD, "options", dict(steps=2.5), "options.steps = 2.5; it must be an in"),
    (
      HEAD,
      "options",
      dict(eval_sequences=True),
      "= True; it must be an intege",
    ),
    (HEAD, "decoding", dict(new_tokens=10**9), "it must be in 1..65536"),
    (HEAD, "decoding", dict(k=2.5), "decoding.k = 2.5; it must be an integer"),
    (HEAD, "loss", dict(block=3), "loss.block = 3; it must be a mapping or No"),
    (HEAD, None, dict(cache=5), "cache = 5; it must be a text or None"),
    (HEAD, None, dict(samples=5), "samples = 5; it must be a mapping or None"),
    (HEAD, "loss", dict(decay=1.5), "decay = 1.5; it must be in 0..1"),
    (HEAD, "options", dict(accumulate=3), "does not divide batch = 4"),
    (HEAD, "options", dict(warmup=12), "it must be < options.steps"),
    (HEAD, "options", dict(optimizer="sgd"), "known: adamw, muon"),
    (HEAD, "options", dict(dtype="float16"), "known: float32, bfloat16"),
    (HEAD, "options", dict(learning_rate=0.0), "it must be > 0"),
    (HEAD, "options", dict(clip=float("nan")), "clip = nan; it must be > 0"),
    (HEAD, "options", dict(adam_b2=2.0), "adam_b2 = 2.0; it must be in 0..1"),
    (
      JOINT | TEXT | dict(head_config=HEAD_CONFIG),
      "options",
      dict(sequence=3),
      "options.sequence = 3; a draft of head_config.levels takes at least 4",
    ),
  ],
)
def test_setups_refuse(config, part, changes, complaint):
  if part:
    changes = {part: config[part] | changes}
  with pytest.raises(ValueError, match=re.escape(complaint)):
    from_config(config | changes)


BLOCK = SHAPE | dict(kind="block", features=(1,))


@pytest.mark.parametrize("kind", ["block", "peagle"])
def test_joint_training_says_what_one_pass_heads_need_instead(kind):
  with pytest.raises(ValueError) as error:
    from_config(JOINT | TEXT | dict(head_config=BLOCK | dict(kind=kind)))
  for part in (
    f"head_config.kind = {kind!r}: a head that drafts all levels in one pass "
    "is trained on a frozen target, not jointly with it",
    "Train the target first (configs/train/joint.py:none), then the head",
    "or take a kind that drafts level by level, such as mtp, prophet or medusa",
  ):
    assert part in str(error.value)


def test_joint_training_is_on_the_text():
  with pytest.raises(ValueError, match="joint training needs divergence"):
    from_config(JOINT | dict(head_config=HEAD_CONFIG, loss=HEAD["loss"]))


@pytest.mark.parametrize(
  "options, weights, complaint",
  [
    (
      dict(confidence=True),
      {},
      "loss.block.confidence_weight = 0.0 with head_config.block.confidence = "
      "True: the confidence would not be trained; set a weight above 0",
    ),
    (
      {},
      dict(confidence_weight=1.0),
      "loss.block.confidence_weight = 1.0 without head_config.block.confidence",
    ),
    (
      dict(successor="selector"),
      {},
      "loss.block.selector_weight = 0.0 with head_config.block.successor = "
      "'selector': the selector would not be trained; set a weight above 0",
    ),
    (
      dict(successor="markov"),
      dict(selector_weight=1.0),
      "loss.block.selector_weight = 1.0 without head_config.block.successor",
    ),
    (
      dict(successor="gru"),
      dict(base_weight=1.0),
      "base_weight = 1 with base_steps = 0: the successor would not be trained",
    ),
    (
      dict(successor="selector"),
      dict(selector_weight=1.0, base_weight=1.0),
      "loss.block.base_weight = 1.0 with head_config.block.successor = 'selec",
    ),
    (
      dict(successor="gru"),
      dict(base_steps=9),
      "loss.block.base_steps = 9 has no effect with base_weight = 0",
    ),
    (
      {},
      dict(base_weight=1.0),
      "loss.block.base_weight = 1.0 with head_config.block.successor = 'none'",
    ),
  ],
)
def test_losses_and_parts_of_blocks_go_together(options, weights, complaint):
  head_config = BLOCK | dict(block=options)
  with pytest.raises(ValueError, match=re.escape(complaint)):
    from_config(HEAD | dict(head_config=head_config, loss=dict(block=weights)))


def test_losses_of_blocks_with_their_parts():
  for options, weights in (
    (dict(confidence=True), dict(confidence_weight=1.0)),
    (dict(successor="selector"), dict(selector_weight=1.0)),
    (dict(successor="gru"), dict(base_weight=1.0, base_steps=3)),
    ({}, {}),
  ):
    config = dict(
      head_config=BLOCK | dict(block=options), loss=dict(block=weights)
    )
    assert isinstance(from_config(HEAD | config), HeadSetup)


def configs():
  """(name of a file of configs/train, kind or None), of every config."""
  folder = programs.SCRIPTS.parent / "configs" / "train"
  for path in sorted(folder.glob("*.py")):
    module = runpy.run_path(str(path))
    kinds = module.get("KINDS") or module.get("SIZES") or [None]
    yield from ((path, kind) for kind in kinds)


@pytest.mark.parametrize(
  "path, kind", list(configs()), ids=lambda x: getattr(x, "stem", x)
)
def test_our_configs_load(path, kind):
  get_config = runpy.run_path(str(path))["get_config"]
  from_config((get_config(kind) if kind else get_config()).to_dict())


@pytest.mark.parametrize("path", ["drafter", "equal", "published"])
def test_the_base_loss_of_domino_goes_as_training_does(path):
  """Also where a flag changes how long that is."""
  folder = programs.SCRIPTS.parent / "configs" / "train"
  config = runpy.run_path(str(folder / f"{path}.py"))["get_config"]("domino")
  config.update_from_flattened_dict({"options.steps": 7777})
  setup = from_config(config.to_dict())
  assert setup.loss.block.base_steps == setup.options.steps == 7777


def published(kind=None):
  """KINDS of configs/train/published.py, or the setup of one."""
  path = programs.SCRIPTS.parent / "configs" / "train" / "published.py"
  spec = importlib.util.spec_from_file_location("published", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if kind is None:
    return module.KINDS
  return from_config(module.get_config(kind).to_dict())


def test_published_settings_fit_an_8b_target():
  target = presets.get("llama3-8b")
  assert isinstance(published("pard"), ModelSetup)
  for kind in published().keys() - {"pard"}:
    setup = published(kind)
    assert isinstance(setup, HeadSetup)
    setup.head_config.check(target)
    assert setup.options.dtype == "bfloat16"
    count = setup.head_config.vocabulary
    ids = np.arange(count) if count else None
    head, _ = placing.heads(setup.head_config, target, ids, None)
    # Refused if head and loss did not go together.
    drafting.objective(head, transformer.model(target), setup.loss)
  eagle3 = published("eagle3")
  assert eagle3.head_config.features == (2, 32 // 2, 32 - 3)
  assert (eagle3.head_config.levels, eagle3.loss.decay) == (7, 0.8)
  with pytest.raises(ValueError, match="known: eagle3, specforge_eagle3, mtp"):
    published("dream")


@pytest.mark.parametrize(
  "kind, slots, gamma",
  [
    ("dflash", 10, 5),
    ("dflash2", 16, 7),
    ("dspark", 7, 4),
    ("domino", 16, 7),
    ("jetspec", 16, 0),
  ],
)
def test_published_blocks(kind, slots, gamma):
  setup = published(kind)
  config, loss = setup.head_config, setup.loss
  assert config.block_size == slots
  decay = math.exp(-1 / gamma) if gamma else 1.0
  assert loss.decay == pytest.approx(decay, abs=5e-5)
  assert loss.block.base_steps == (50_000 if kind == "domino" else 0)
  assert setup.options.steps == 50_000
  # Streams that leave layers 1 to L - 3, which enter the ones after them.
  leaving = np.linspace(1, 32 - 3, 5).round().astype(int)
  assert config.features == tuple(leaving + 1)
  assert config.rope_scaling == presets.get("llama3-8b").rope_scaling
  assert 0.04 * setup.options.steps == setup.options.warmup
  assert setup.options.learning_rate == (3e-4 if kind == "jetspec" else 6e-4)
