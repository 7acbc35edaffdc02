"""Learned drafters on disk: whole, of their own target, or refused by name."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.flax import save_file

from learned_kinds import (
  BLOCKS,
  IDS,
  KINDS,
  PARALLEL,
  TARGET,
  draft_head,
)
from programs import write_model
from specdec import checkpoints, draft_shape
from specdec.checkpoints import learned as saved
from specdec.drafters.heads import serve
from specdec.utils import files

LETTERS = [chr(i) for i in range(ord("a"), ord("z") + 1)] + [" "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def whom(folder):
  """A target with weights and a tokenizer."""
  return checkpoints.load(folder)


def drafter_for(config, kind="mtp", ids=IDS, **changes):
  """(head config, ids, net) that fit a target's config."""
  full = ids is None
  head = draft_head(kind, full, config=config, ids=ids, **changes)
  rng = np.random.default_rng(0)
  net = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32),
    jax.eval_shape(head.init, jax.random.key(0)),
  )
  return head.head_config, ids, net


@pytest.fixture(scope="module")
def file(whom, tmp_path_factory):
  path = tmp_path_factory.mktemp("drafter") / "new" / "best.safetensors"
  saved.save(path, *drafter_for(whom.config), saved.fingerprint(whom))
  return path


@pytest.mark.parametrize("kind", [*KINDS, *PARALLEL, *BLOCKS[-4:]])
def test_there_and_back(kind, tmp_path):
  path = tmp_path / "a.safetensors"
  config, _, net = drafter_for(TARGET, kind)
  saved.save(path, config, IDS, net, {"config": "1"})
  loaded = saved.load(path)
  assert loaded.head_config == config == saved.inspect(path)
  np.testing.assert_array_equal(loaded.ids, IDS)
  rounded = jax.tree.map(saved.rounded, net)
  jax.tree.map(np.testing.assert_array_equal, loaded.net, rounded)


def test_all_tokens_in_float32(whom, tmp_path):
  path = tmp_path / "a.safetensors"
  drafter = drafter_for(whom.config, ids=None)
  saved.save(path, *drafter, saved.fingerprint(whom), dtype="float32")
  loaded = saved.load(path, whom)
  assert loaded.ids is None
  jax.tree.map(np.testing.assert_array_equal, loaded.net, drafter[2])
  assert loaded.draft_head(whom.config).head_config == drafter[0]


def test_the_type_of_the_weights_makes_no_other_target(folder, whom, file):
  halved = checkpoints.load(folder, dtype="bfloat16")
  assert saved.fingerprint(halved) == saved.fingerprint(whom)
  assert (
    saved.load(file, halved).head_config == saved.load(file, whom).head_config
  )


def changed(whom, tmp_path, what):
  if what == "weights":  # of every tensor some values are compared, its last
    flat, form = jax.tree.flatten(whom.params)
    flat[-1] = flat[-1].at[(-1,) * flat[-1].ndim].add(1.0)
    params = jax.tree.unflatten(form, flat)
    return dataclasses.replace(whom, params=params)
  if what == "config":
    config = dataclasses.replace(whom.config, rope_theta=5.0)
    return dataclasses.replace(whom, config=config)
  letters = [LETTERS[1], LETTERS[0], *LETTERS[2:]]
  other = checkpoints.load(write_model(tmp_path, letters=letters))
  return dataclasses.replace(whom, tokenizer=other.tokenizer)


@pytest.mark.parametrize("what", ["config", "tokenizer", "weights"])
def test_another_target_is_refused_by_what_is_unlike(
  whom, file, tmp_path, what
):
  other = changed(whom, tmp_path, what)
  with pytest.raises(
    ValueError, match=f"another target than .*: different {what}$"
  ):
    saved.load(file, other)
  assert (
    saved.load(file).head_config.kind == "mtp"
  )  # it is no one's: nothing asked


@pytest.mark.parametrize(
  "name, missing",
  [
    ("none.safetensors", r"drafter .*none\.safetensors"),
    ("", r"config\.json"),  # a folder is a drafter of another format
  ],
)
def test_a_file_that_does_not_exist_is_refused(whom, tmp_path, name, missing):
  for read in (saved.inspect, lambda path: saved.load(path, whom)):
    with pytest.raises(FileNotFoundError, match=f"{missing} does not exist"):
      read(tmp_path / name)


def test_a_file_that_is_cut_short_is_refused(whom, file, tmp_path):
  content = file.read_bytes()
  path = tmp_path / "cut.safetensors"
  for kept in (0, 5, len(content) // 2, len(content) - 1):
    path.write_bytes(content[:kept])
    with pytest.raises(ValueError, match="is not a complete safetensors"):
      saved.load(path, whom)


def rewritten(path, file, arrays=None, **about):
  """The file again, with other entries or arrays in it; None: without."""
  with safe_open(file, framework="flax") as source:
    metadata = json.loads(source.metadata()["specdec"]) | about
    held = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
  held |= arrays or {}
  held = {name: x for name, x in held.items() if x is not None}
  save_file(held, path, {"specdec": json.dumps(metadata)})
  return path


@pytest.mark.parametrize(
  "metadata", [None, {"specdec": "{"}, {"specdec": "[1]"}]
)
def test_any_other_safetensors_file_is_no_drafter(tmp_path, metadata):
  path = tmp_path / "a.safetensors"
  save_file({"x": jnp.zeros(3)}, path, metadata)
  with pytest.raises(ValueError, match="not a drafter: its metadata have no"):
    saved.load(path)


@pytest.mark.parametrize(
  "entries",
  [
    {"kind": "beagle"},
    {"width": -4},
    {"colour": "red"},
    {"features": None},
    {"norm_epsilon": None},
    {"rope_theta": 10**19},
    {"levels": 10**9},
    {"num_layers": 10**9},
    {"exit_layer": "x"},
    {"recycle": 1},
  ],
  ids=str,
)
def test_a_damaged_head_config_is_refused(file, tmp_path, entries):
  config = dataclasses.asdict(saved.inspect(file)) | entries
  path = rewritten(tmp_path / "a.safetensors", file, head_config=config)
  with pytest.raises(ValueError, match=re.escape(str(path))):
    saved.load(path)


FLOATS = np.arange(11.0)


@pytest.mark.parametrize(
  "name, array, sentence",
  [
    (
      "vocabulary",
      None,
      "vocabulary of 0 tokens; its head config requires 11",
    ),
    ("vocabulary", IDS[:-1], "a vocabulary of 10 tokens; .* requires 11"),
    ("vocabulary", [0, 0, *range(5, 14)], "tokens below 27"),
    ("vocabulary", [3, 27, *range(5, 14)], "tokens below 27"),
    ("vocabulary", [-1, 4, *range(5, 14)], "tokens below 27"),
    ("vocabulary", FLOATS, "is float32 of shape .11,.; it must be a"),
    ("vocabulary", np.zeros((11, 1), int), r"of shape \(11, 1\); it must be"),
    ("fuse/weight", None, "match its head config: fuse/weight is None and sho"),
    ("fuse/weight", jnp.zeros((2, 2)), r"fuse/weight is \(2, 2\) and should"),
    ("more", jnp.zeros(3), r"more is \(3,\) and should be None"),
    ("fuse/weight", jnp.zeros((2, 2), jnp.int16), "fuse/weight is int16, no f"),
    ("fuse", jnp.zeros(3), "fuse is a tensor and a folder"),
    ("fuse/weight", "nan", r"fuse\.weight hold NaN or infinite"),
  ],
)
def test_damaged_arrays_are_refused(
  whom, file, tmp_path, name, array, sentence
):
  if isinstance(array, str):
    weight = saved.load(file, whom).net["fuse"]["weight"]
    array = weight.at[0, 0].set(jnp.nan)
  elif name == "vocabulary" and array is not None:
    array = jnp.asarray(array, jnp.float32 if array is FLOATS else jnp.int32)
  path = rewritten(tmp_path / "a.safetensors", file, {name: array})
  with pytest.raises(ValueError, match=sentence):
    saved.load(path, whom)


def test_a_kill_while_a_file_is_replaced_leaves_the_old_one(
  whom, tmp_path, monkeypatch
):
  path = tmp_path / "best.safetensors"
  config, ids, net = drafter_for(whom.config)
  fingerprint = saved.fingerprint(whom)
  saved.save(path, config, ids, net, fingerprint)
  before = path.read_bytes()
  other = jax.tree.map(lambda x: x + 1, net)

  def replace(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(files.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
      saved.save(path, config, ids, other, fingerprint)
  assert path.read_bytes() == before
  assert saved.load(path, whom).head_config == config
  saved.save(path, config, ids, other, fingerprint)
  assert path.read_bytes() != before
  assert list(tmp_path.iterdir()) == [path]  # nothing is left behind


def test_layers_that_the_target_lacks_are_refused(whom, file, tmp_path):
  config = dataclasses.asdict(saved.inspect(file))
  config |= {"kind": "eagle3", "features": [1, 3]}
  path = rewritten(tmp_path / "a.safetensors", file, head_config=config)
  with pytest.raises(ValueError, match="asks for layers 3; this target has 2"):
    saved.load(path, whom)


def test_a_draft_deeper_than_the_saved_heads_is_refused(whom, tmp_path):
  path = tmp_path / "a.safetensors"
  drafter = drafter_for(whom.config, "medusa", levels=2)
  saved.save(path, *drafter, saved.fingerprint(whom))
  head = saved.load(path, whom).draft_head(whom.config)
  with pytest.raises(ValueError, match=r"3 levels.* medusa has 2 heads"):
    serve.drafter(head, None, draft_shape.chain(3))
