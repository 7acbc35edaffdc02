"""P-EAGLE and DFlash2 of others: what they have beyond the other formats.

Tensors, configs and written files are compared in formats_test.py and
block_formats_test.py, as those of the other formats.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import block_formats_test as blocks
import formats_test as heads
import published_blocks
import published_heads
from formats_test import PARALLEL, TARGET, refused
from specdec import drafters
from specdec.checkpoints import formats
from specdec.drafters import mask_slots
from specdec.drafters.heads.draft_head import TargetWeights
from specdec.drafters.heads.unroll import growing, unroll_slots
from specdec.models.presets import get
from specdec.types import ModelOutput

MASK, LEVELS, ROOTS = 13, 4, (2, 5, 7)
EXACT = blocks.EXACT
# The first layer's residual, by the manifests' configs.
OPTIONS = {"speculators peagle": {"normed_residual": True}, "P-EAGLE": {}}


def peagle(folder, name, arrays=None, **changes):
  return heads.write(folder, heads.MANIFESTS[name], arrays, **changes)


def published(name, target, tokens, streams, root, levels):
  arrays = blocks.doubles(heads.arrays_of(heads.MANIFESTS[name]))
  return published_heads.peagle(
    arrays, target, MASK, tokens, streams, root, levels, **OPTIONS[name]
  )


def unrolled(config, drafter, tokens, streams, roots, levels, weights=None):
  """[levels, R, n] logits of what follows each of `roots`, of one pass."""
  head = drafters.LEARNED["peagle"](
    drafter.stored.head_config, config, drafter.ids, growing
  )
  if weights:
    rows = (jnp.asarray(weights[x], jnp.float32) for x in ("embed", "head"))
    weights = TargetWeights(*rows)
  entering = tuple(jnp.asarray(x, jnp.float32)[None] for x in streams)
  text, rounds = jnp.asarray(tokens, jnp.int32)[None], jnp.asarray(roots)[None]
  slots = mask_slots.behind(rounds, (len(roots),) * (levels - 1), len(tokens))

  @jax.jit
  def run(net):
    output = ModelOutput(None, entering[-1], entering)
    return unroll_slots(head, net, weights, text, output, slots)

  first, *behind = (np.asarray(x[0]) for x in run(drafter.net))
  return np.stack([first[np.asarray(roots)], *behind])


@pytest.mark.parametrize("name", PARALLEL)
def test_logits_are_those_of_the_published_pass(name, tmp_path):
  drafter = formats.load(peagle(tmp_path, name), TARGET)
  tokens, streams, weights = heads.random_inputs()
  ours = unrolled(TARGET, drafter, tokens, streams, ROOTS, LEVELS, weights)
  for i, root in enumerate(ROOTS):
    expected = published(name, weights, tokens, streams, root, LEVELS)
    np.testing.assert_allclose(ours[:, i], expected, rtol=EXACT, atol=EXACT)
    assert expected.std() > 0.3


def test_logits_are_those_of_speculators(tmp_path):
  """And the folder is written as it was."""
  folder = heads.FOLDER / "parallel_drafters" / "peagle"
  expected = load_file(folder / "expected.safetensors")
  config = heads.target(16, 24)
  drafter = formats.load(folder, config)
  streams = np.split(expected["hidden"], 3, axis=1)
  # The package samples slots in front of the text's first pair, too.
  real = expected["roots"] > 0
  roots, levels = (expected[x][real].astype(int) for x in ("roots", "levels"))
  every = np.arange(1, roots.max() + 1)
  ours = unrolled(config, drafter, expected["tokens"], streams, every, 3)
  theirs = expected["logits"][real]
  gap = ours[levels, roots - 1] - theirs
  assert np.bincount(levels).min() > 5 and theirs.std() > 0.3
  assert np.abs(gap).max() < 1e-4
  to = blocks.TO._replace(width=16, vocab_size=24)
  arguments = drafter.stored.head_config, drafter.ids, drafter.net, to
  formats.save(tmp_path / "b", "speculators", *arguments, "float32")
  written = load_file(tmp_path / "b" / "model.safetensors")
  blocks.same(written, load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("name", PARALLEL)
def test_a_draft_is_of_the_published_distributions(name, tmp_path):
  folder = peagle(tmp_path, name)
  read = formats.load(folder, TARGET)
  written, length, draft, entering, weights = blocks.one_round(
    *blocks.serving(folder)
  )
  head_config = read.stored.head_config
  assert head_config.levels == {"speculators peagle": 5, "P-EAGLE": 4}[name]
  for row in range(2):
    root = length[row] - 1
    streams = [entering[i][row] for i in head_config.features]
    logits = published(
      name, weights, written[row], streams, root, head_config.levels
    )
    ours = draft.log_probs[row, 1:]
    wanted = blocks.log_softmax(logits)
    np.testing.assert_allclose(ours[:, read.ids], wanted, atol=EXACT)
    others = np.delete(ours, read.ids, axis=1)
    assert np.all(np.isneginf(others))


@pytest.mark.parametrize("name", PARALLEL)
def test_leading_axes_and_names_of_the_mask(name, tmp_path):
  """vLLM flattens the tensor, and reads the token under three names."""
  first = formats.load(peagle(tmp_path / "a", name), TARGET)
  assert first.stored.head_config.mask_token == MASK
  arrays = heads.arrays_of(heads.MANIFESTS[name])
  for shape in ((24,), (1, 24)):
    other = arrays | {"mask_hidden": arrays["mask_hidden"].reshape(shape)}
    again = formats.load(peagle(tmp_path / "b", name, other), TARGET)
    jax.tree.map(np.testing.assert_array_equal, again.net, first.net)
  for shape in ((24, 1), (2, 12)):
    other = arrays | {"mask_hidden": arrays["mask_hidden"].reshape(shape)}
    assert "mask_hidden" in refused(peagle(tmp_path / "c", name, other))
  if name == "P-EAGLE":
    for key in ("pard_token", "mask_token_id"):
      changes = {"ptd_token_id": "absent", key: 7}
      folder = peagle(tmp_path / "d", name, **changes)
      assert formats.inspect(folder, TARGET).mask_token == 7


@pytest.mark.parametrize(
  "name, changes, what",
  [
    ("speculators peagle", {"mask_token_id": None}, "mask_token_id = None"),
    ("speculators peagle", {"mask_token_id": 16}, "the target has 16 tokens"),
    ("speculators peagle", {"norm_before_residual": None}, "of type bool"),
    (
      "P-EAGLE",
      {"ptd_token_id": None},
      "names no token for masks; give one as",
    ),
    ("P-EAGLE", {"ptd_token_id": "13"}, "ptd_token_id = '13'; it must be of"),
    ("P-EAGLE", {"ptd_token_id": -1}, "mask_token = -1; masks of a published"),
    ("speculators peagle", {"mask_token_id": -1}, "mask_token = -1; masks of"),
    ("P-EAGLE", {"pard_token": 12}, "'pard_token': 12} for masks"),
  ],
)
def test_a_peagle_that_does_not_load(name, changes, what, tmp_path):
  assert what in refused(peagle(tmp_path, name, **changes))


@pytest.mark.parametrize("layout", ["speculators", "eagle"])
def test_a_peagle_with_masks_of_its_own_is_not_written(layout, tmp_path):
  read = formats.load(peagle(tmp_path / "a", PARALLEL[0]), TARGET)
  head_config = dataclasses.replace(read.stored.head_config, mask_token=-1)
  what = f"{layout}: mask_token = -1; masks of a published P-EAGLE"
  arguments = head_config, read.ids, read.net, blocks.TO
  with pytest.raises(ValueError, match=what):
    formats.save(tmp_path / "b", layout, *arguments)
  assert not (tmp_path / "b").exists()


def test_a_peagle_in_either_layout_is_one(tmp_path):
  """What SafeAILab's config cannot say is how many levels it has."""
  first = formats.load(peagle(tmp_path / "a", PARALLEL[0]), TARGET)
  blocks.saved(tmp_path / "b", "eagle", first)
  second = formats.load(tmp_path / "b", TARGET)
  levels = dataclasses.replace(second.stored.head_config, levels=5)
  assert levels == first.stored.head_config
  written = blocks.saved(tmp_path / "c", "speculators", second)
  blocks.same(written, heads.arrays_of(heads.MANIFESTS[PARALLEL[0]]))
  assert written["mask_hidden"].shape == (1, 1, 24)


def test_a_dflash2_is_written_with_all_its_keys(tmp_path):
  drafter = formats.load(blocks.write(tmp_path / "a", "DFlash2"), TARGET)
  blocks.saved(tmp_path / "b", "dflash", drafter)
  config = json.loads((tmp_path / "b" / "config.json").read_text())
  theirs = published_blocks.MANIFESTS["DFlash2"][0]
  assert config["architectures"] == theirs["architectures"]
  more = {"causal": False}  # what is_causal says, too
  assert config["dflash_config"] == theirs["dflash_config"] | more
  blocks.saved(tmp_path / "c", "speculators", drafter)
  again = formats.load(tmp_path / "c", TARGET)
  assert again.stored.head_config == drafter.stored.head_config
  expected = blocks.arrays_of("DFlash2")
  blocks.same(blocks.saved(tmp_path / "d", "dflash", again), expected)


def test_sizes_of_a_dflash2_by_their_names(tmp_path):
  """Taps, channels a group, rank and candidates all differ."""
  nested = dict(published_blocks.MANIFESTS["DFlash2"][0]["dflash_config"])
  for key in published_blocks.CHOICE:
    del nested[key]
  sizes = published_blocks.CHOICE  # at the top level
  folder = blocks.write(
    tmp_path / "a", "DFlash2", dflash_config=nested, **sizes
  )
  block = formats.inspect(folder, TARGET).block
  assert (block.taps, block.group, block.rank, block.candidates) == (2, 4, 3, 5)
  assert (block.successor, block.slots, block.causal) == (
    *("selector", "in_place", False),
  )
  drafter = formats.load(folder, TARGET)
  jax.tree.map(
    np.testing.assert_array_equal,
    drafter.net,
    formats.load(blocks.write(tmp_path / "b", "DFlash2"), TARGET).net,
  )
  absent = {key: "absent" for key in sizes}
  absent["sliding_window_non_causal"] = "absent"
  wide = dataclasses.replace(TARGET, width=16)
  layer = published_blocks.MANIFESTS["speculators dflash2"][0]
  layer = layer["transformer_layer_config"] | {"hidden_size": 16}
  folder = blocks.write(
    *(tmp_path / "c", "speculators dflash2"),
    transformer_layer_config=layer,
    **absent,
  )
  block = formats.inspect(folder, wide).block
  assert (block.taps, block.group, block.rank) == (2, 16, 256)
  assert block.candidates == 16 and not block.causal_window


def nested(**changes):
  config = published_blocks.MANIFESTS["DFlash2"][0]["dflash_config"]
  return {"dflash_config": config | changes}


ZLAB, SPECULATORS = "DFlash2", "speculators dflash2"


@pytest.mark.parametrize(
  "name, changes, what",
  [
    (ZLAB, nested(selector_rank=None), "selector_rank = None; it must be of"),
    (ZLAB, nested(conv_kernel_size=2.0), "conv_kernel_size = 2.0; it must be"),
    (
      ZLAB,
      nested(conv_kernel_size=5),
      "block_size = 4 and 16 tokens has 1 to 4",
    ),
    (ZLAB, nested(conv_kernel_size=0), "conv_kernel_size = 0; a DFlash2 with"),
    (ZLAB, nested(selector_top_k=17), "selector_top_k = 17; a DFlash2 with bl"),
    (ZLAB, nested(conv_group_size=3), "block.group = 3 does not divide width"),
    (ZLAB, nested(selector_rank=0), "block.rank = 0"),
    (ZLAB, {"selector_rank": 4}, "4 at the top level and 3 below it"),
    (ZLAB, nested(output_multiplier=0.2), "0.2; accepted: 1.0"),
    (ZLAB, nested(input_embedding_scale=8.0), "8.0; accepted: 1.0"),
    (ZLAB, nested(final_logit_softcapping=20.0), "the target, whose vocabular"),
    (
      ZLAB,
      nested(
        projector_type="domino",
        shift_label=True,
        pure_draft_prefix_len=1,
        emb_dim=3,
        gru_hidden_dim=5,
      ),
      "is a DFlash2 with projector_type = 'domino'; accepted: 'dflash'",
    ),
    ("DFlash", nested(), "key of dflash_config 'conv_kernel_size' is unknown"),
    (SPECULATORS, {"draft_vocab_size": 8}, "drafts 8 of 16 tokens; its select"),
    (SPECULATORS, {"draft_vocab_size": "absent"}, "drafts 32000 of 16 tokens"),
    (SPECULATORS, {"selector_top_k": 17}, "and 16 tokens has 1 to 16"),
  ],
)
def test_a_dflash2_that_does_not_load(name, changes, what, tmp_path):
  assert what in refused(blocks.write(tmp_path, name, **changes))


@pytest.mark.parametrize(
  "layout, changes, what",
  [
    ("deepspec", {}, "block.slots = 'in_place': deepspec knows"),
    ("deepspec", {"slots": "next"}, "block.successor = 'selector': deepspec"),
    ("dflash", {"slots": "next"}, "block.slots = 'next': dflash knows"),
    ("dflash", {"confidence": True}, "block.confidence = True: dflash knows"),
    ("speculators", {"confidence": True}, "block.confidence = True: specul"),
    ("dflash", {"successor": "none"}, "block.taps = 2: dflash knows block"),
    ("speculators", {"successor": "none"}, "block.taps = 2: speculators kn"),
    (
      "deepspec",
      {"slots": "next", "successor": "markov", "window": 0},
      "block.taps = 2: deepspec knows",
    ),
    ("dflash", {"taps": 0}, "dflash: conv_kernel_size = 0; a DFlash2 with"),
    ("speculators", {"taps": 5}, "speculators: conv_kernel_size = 5; a DF"),
    ("speculators", {"candidates": 17}, "selector_top_k = 17; a DFlash2"),
  ],
)
def test_a_dflash2_that_is_not_written(layout, changes, what, tmp_path):
  drafter = formats.load(blocks.write(tmp_path / "a", "DFlash2"), TARGET)
  head_config = drafter.stored.head_config
  block = dataclasses.replace(head_config.block, **changes)
  stored = drafter.stored._replace(
    head_config=dataclasses.replace(head_config, block=block)
  )
  with pytest.raises(ValueError, match=what):
    blocks.saved(tmp_path / "b", layout, drafter._replace(stored=stored))
  assert not (tmp_path / "b").exists()


def test_the_81_tensors_of_a_published_dflash2(tmp_path):
  """Those of Qwen3.8-27B-DFlash2 by its config.json; no weights."""
  config = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "is_causal": False,
    "dflash_config": {
      "block_size": 8,
      "conv_group_size": 16,
      "conv_kernel_size": 2,
      "mask_token_id": 248070,
      "selector_rank": 256,
      "selector_top_k": 16,
      "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": 248320,
  }
  (tmp_path / "config.json").write_text(json.dumps(config))
  save_file({"norm.weight": np.zeros(1)}, tmp_path / "model.safetensors")
  big = dataclasses.replace(get("qwen3-32b"), vocab_size=248320)
  head_config = formats.inspect(tmp_path, big)
  assert head_config.features == (6, 20, 34, 48, 62)
  assert head_config.levels == 7 and head_config.block.window == 2048
  assert not head_config.block.causal and not head_config.block.causal_window
  expected = published_blocks.backbone(5, 5, 5120, 17408, 4096, 128)
  expected |= published_blocks.dflash2(5, 5120, 2, 16, 256, 248320)
  assert len(expected) == 81
  assert blocks.shapes_of(head_config, big) == expected
  # As the hub counts them in its safetensors.
  assert sum(map(np.prod, expected.values())) == 1_924_404_480
