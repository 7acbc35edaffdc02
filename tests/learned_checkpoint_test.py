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

from learned_kinds import IDS, KINDS, TARGET, head_config
from programs import write_model
from specdec import checkpoints, draft_shape, drafters
from specdec.checkpoints import learned as saved
from specdec.drafters.heads import serve
from specdec.utils import files
from training_test import Killed

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
  made = head_config(kind, 0 if ids is None else len(ids), **changes)
  own = drafters.LEARNED[made.kind](made, config, ids)
  rng = np.random.default_rng(0)
  net = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32),
    jax.eval_shape(own.init, jax.random.key(0)),
  )
  return made, ids, net


@pytest.fixture(scope="module")
def file(whom, tmp_path_factory):
  path = tmp_path_factory.mktemp("drafter") / "new" / "best.safetensors"
  saved.save(path, *drafter_for(whom.config), saved.fingerprint(whom))
  return path


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind, tmp_path):
  path = tmp_path / "a.safetensors"
  made, _, net = drafter_for(TARGET, kind)
  saved.save(path, made, IDS, net, {"config": "1"})
  found = saved.load(path)
  assert found.head_config == made == saved.inspect(path)
  assert found.source == str(path)
  np.testing.assert_array_equal(found.ids, IDS)
  halved = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), net
  )
  jax.tree.map(np.testing.assert_array_equal, found.net, halved)


def test_all_tokens_need_no_vocabulary(whom, tmp_path):
  path = tmp_path / "a.safetensors"
  drafter = drafter_for(whom.config, ids=None)
  saved.save(path, *drafter, saved.fingerprint(whom), dtype="float32")
  found = saved.load(path, whom)
  assert found.ids is None
  jax.tree.map(np.testing.assert_array_equal, found.net, drafter[2])
  assert found.draft_head(whom.config).head_config == drafter[0]


def test_the_type_of_the_weights_makes_no_other_target(folder, whom, file):
  halved = checkpoints.load(folder, dtype="bfloat16")
  assert saved.fingerprint(halved) == saved.fingerprint(whom)
  assert (
    saved.load(file, halved).head_config == saved.load(file, whom).head_config
  )


def changed(whom, tmp_path, what):
  if what == "weights":
    nudged = jax.tree.map(lambda x: 1.01 * x, whom.params)
    return dataclasses.replace(whom, params=nudged)
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


def test_one_changed_weight_is_enough(whom):
  """Of every tensor some values are looked at, its last one too."""
  flat, form = jax.tree.flatten(whom.params)
  flat[-1] = flat[-1].at[(-1,) * flat[-1].ndim].add(1.0)
  other = dataclasses.replace(whom, params=jax.tree.unflatten(form, flat))
  before, after = saved.fingerprint(whom), saved.fingerprint(other)
  assert [x for x in before if before[x] != after[x]] == ["weights"]


def test_there_is_no_such_file(whom, tmp_path):
  with pytest.raises(FileNotFoundError, match="does not exist"):
    saved.load(tmp_path / "none.safetensors", whom)
  with pytest.raises(FileNotFoundError, match=r"drafter .* does not exist"):
    saved.inspect(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.99])
def test_a_file_that_is_cut_short(whom, file, tmp_path, kept):
  content = file.read_bytes()
  path = tmp_path / "cut.safetensors"
  path.write_bytes(content[: kept if kept >= 1 else int(kept * len(content))])
  with pytest.raises(ValueError, match="is not a complete safetensors"):
    saved.load(path, whom)


def rewritten(path, file, arrays=None, **about):
  """The file again, with other entries or arrays in it."""
  header = int.from_bytes(file.read_bytes()[:8], "little")
  held = json.loads(file.read_bytes()[8 : 8 + header])["__metadata__"]
  held = json.loads(held["specdec"]) | about
  with safe_open(file, framework="flax") as source:
    names = source.keys()
    found = {name: source.get_tensor(name) for name in names}
  found |= arrays or {}
  found = {name: x for name, x in found.items() if x is not None}
  save_file(found, path, {"specdec": json.dumps(held)})
  return path


def test_any_other_safetensors_file_is_no_drafter(tmp_path):
  path = tmp_path / "a.safetensors"
  save_file({"x": jnp.zeros(3)}, path)
  with pytest.raises(
    ValueError, match="is not a drafter: its metadata have no"
  ):
    saved.load(path)
  save_file({"x": jnp.zeros(3)}, path, {"specdec": "{"})
  with pytest.raises(
    ValueError, match="is not a drafter: its metadata have no"
  ):
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
def test_a_head_config_that_is_none(file, tmp_path, entries):
  own = dataclasses.asdict(saved.inspect(file)) | entries
  path = rewritten(tmp_path / "a.safetensors", file, head_config=own)
  with pytest.raises(ValueError, match=re.escape(str(path))):
    saved.load(path)


@pytest.mark.parametrize(
  "ids, found", [(None, 0), (IDS[:-1], 10), (np.arange(12), 12)]
)
def test_a_vocabulary_of_another_length(whom, file, tmp_path, ids, found):
  ids = None if ids is None else jnp.asarray(ids, jnp.int32)
  path = rewritten(tmp_path / "a.safetensors", file, {"vocabulary": ids})
  with pytest.raises(
    ValueError,
    match=f"a vocabulary of {found} tokens; its head config requires 11",
  ):
    saved.load(path, whom)


@pytest.mark.parametrize("ids", [[0, 0], [3, 27], [-1, 4]])
def test_a_vocabulary_of_no_tokens_of_the_target(whom, file, tmp_path, ids):
  ids = jnp.asarray([*ids, *range(5, 14)], jnp.int32)
  path = rewritten(tmp_path / "a.safetensors", file, {"vocabulary": ids})
  with pytest.raises(ValueError, match="tokens below 27"):
    saved.load(path, whom)


@pytest.mark.parametrize(
  "arrays, said",
  [
    ({"fuse/weight": None}, "fuse/weight is None and should be"),
    ({"fuse/weight": jnp.zeros((2, 2))}, r"fuse/weight is \(2, 2\) and should"),
    ({"more": jnp.zeros(3)}, r"more is \(3,\) and should be None"),
  ],
)
def test_weights_that_do_not_fit(whom, file, tmp_path, arrays, said):
  path = rewritten(tmp_path / "a.safetensors", file, arrays)
  with pytest.raises(
    ValueError, match=f"does not match its head config: {said}"
  ):
    saved.load(path, whom)


def test_weights_that_are_not_finite(whom, file, tmp_path):
  fuse = saved.load(file, whom).net["fuse"]["weight"]
  arrays = {"fuse/weight": fuse.at[0, 0].set(jnp.nan)}
  path = rewritten(tmp_path / "a.safetensors", file, arrays)
  with pytest.raises(ValueError, match=r"fuse\.weight hold NaN or infinite"):
    saved.load(path, whom)


@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_kill_in_the_middle_of_a_write(whom, tmp_path, monkeypatch, where):
  path = tmp_path / "best.safetensors"
  made, ids, net = drafter_for(whom.config)
  whose = saved.fingerprint(whom)
  saved.save(path, made, ids, net, whose)
  before = path.read_bytes()
  other = jax.tree.map(lambda x: x + 1, net)
  with monkeypatch.context() as patch:
    if where == "replace":

      def replace(*_):
        raise Killed

      patch.setattr(files.os, "replace", replace)
    else:

      def write(file, content):
        file.write(content[: len(content) // 2])
        raise Killed

      patch.setattr(files, "_write", write)
    with pytest.raises(Killed):
      saved.save(path, made, ids, other, whose)
  assert path.read_bytes() == before
  assert saved.load(path, whom).head_config == made
  saved.save(path, made, ids, other, whose)  # what was left is in no one's way
  assert path.read_bytes() != before
  assert list(tmp_path.iterdir()) == [path]


def with_head_config(whom, path, **changes):
  """A file whose head config asks for what the target has not."""
  own = dataclasses.asdict(head_config("mtp")) | changes
  saved.save(path, head_config("mtp"), IDS, {"x": jnp.zeros(1)}, {})
  return rewritten(path, path, head_config=own, target=saved.fingerprint(whom))


@pytest.mark.parametrize(
  "changes, said",
  [
    (
      dict(kind="eagle3", features=[1, 3]),
      "features asks for layers 3; this target has 2",
    ),
    (dict(kind="exit", exit_layer=2), r"exit_layer = 2; .*must be in 1\.\.1"),
  ],
)
def test_layers_that_the_target_has_not(whom, tmp_path, changes, said):
  path = with_head_config(whom, tmp_path / "a.safetensors", **changes)
  with pytest.raises(ValueError, match=said):
    saved.load(path, whom)


def test_medusa_is_asked_for_more_than_its_heads(whom, tmp_path):
  path = tmp_path / "a.safetensors"
  drafter = drafter_for(whom.config, "medusa", levels=2)
  saved.save(path, *drafter, saved.fingerprint(whom))
  own = saved.load(path, whom).draft_head(whom.config)
  with pytest.raises(ValueError, match=r"3 levels.* medusa has 2 heads"):
    serve.drafter(own, None, draft_shape.chain(3))
