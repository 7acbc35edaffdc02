"""Block drafters of others: loaded exactly, drafting, written back bit for bit.

fixtures/block_drafters: folders that the `speculators` package wrote, and what
it computed (tools/record_drafters.py). Drafters of random numbers in every
layout are compared with published_blocks.py.
"""

import dataclasses
import importlib.util
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import published_blocks as reference
from formats_test import refused, target
from published_blocks import FEW, LAYERS, MANIFESTS, SIZE, V
from specdec import (
  acceptance,
  checkpoints,
  decode,
  draft_shape,
  drafters,
  sampling,
  step,
)
from specdec.checkpoints import formats
from specdec.checkpoints.fetch import fetch
from specdec.drafters.heads import block_unroll
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.draft_head import TargetWeights
from specdec.models import transformer
from specdec.models.presets import get
from specdec.testing import check_drafter
from specdec.types import ModelOutput, Params

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "block_drafters"
RECORDED = sorted(path.name for path in FOLDER.glob("*"))
TARGET, T, ANCHORS = target(), 12, (3, 7)
REJECTION = acceptance.rejection()
EXACT = 1e-5  # of a log-probability


def arrays_of(name):
  """Random tensors of a manifest; 8 of the 16 tokens where it drafts fewer."""
  config, shapes, _ = MANIFESTS[name]
  rng, arrays = np.random.default_rng(5), {}
  for key, shape in shapes.items():
    noise = rng.normal(size=shape)
    norm = len(shape) == 1 and not key.endswith("bias")
    arrays[key] = np.float32(1 + 0.3 * noise if norm else 0.5 * noise)
  if config.get("draft_vocab_size", V) == FEW:
    ids = np.array([0, 2, 3, 7, 8, 11, 14, 15])
    arrays |= {"d2t": ids - np.arange(FEW), "t2d": np.isin(np.arange(V), ids)}
  return arrays


def write(folder, name, arrays=None, **changes):
  """A folder of that manifest; a change to 'absent' leaves a key out."""
  folder.mkdir(parents=True, exist_ok=True)
  config = MANIFESTS[name][0] | changes
  config = {key: x for key, x in config.items() if x != "absent"}
  (folder / "config.json").write_text(json.dumps(config))
  save_file(
    arrays_of(name) if arrays is None else arrays, folder / "model.safetensors"
  )
  return folder


def head_of(drafter, config=TARGET):
  head_config = drafter.stored.head_config
  make = drafters.LEARNED[head_config.kind]
  return make(head_config, config, drafter.ids)


def unrolled(config, drafter, tokens, streams, anchors, weights):
  """([A, K, n] logits, [A, K] confidence or None), given the text."""
  head = head_of(drafter, config)
  streams = tuple(jnp.asarray(x, jnp.float32)[None] for x in streams)
  weights = TargetWeights(
    *(jnp.asarray(weights[x], jnp.float32) for x in ("embed", "head"))
  )

  @jax.jit
  def run(net):
    output = ModelOutput(None, streams[-1], streams)
    context = block_unroll.context_of(head, net, output)
    text, places = jnp.asarray(tokens)[None], jnp.asarray(anchors)[None]
    return block_unroll.unroll(head, net, weights, text, context, places)

  drafted = run(drafter.net)
  sure = drafted.confidence
  return np.asarray(drafted.logits[0]), None if sure is None else sure[0]


@pytest.mark.parametrize("name", RECORDED)
def test_logits_are_those_of_speculators(name):
  expected = load_file(FOLDER / name / "expected.safetensors")
  config = target(16, 24)
  drafter = formats.load(FOLDER / name, config)
  hidden, theirs = expected["hidden"], expected["logits"]
  ours, sure = unrolled(
    config,
    drafter,
    expected["tokens"].astype(np.int32),
    np.split(hidden, 2, axis=1),
    expected["anchors"].astype(np.int32),
    expected,
  )
  offset = drafter.stored.head_config.block.offset
  assert np.ma.masked_invalid(theirs).std() > 0.3
  np.testing.assert_allclose(ours, theirs[:, offset:], atol=2e-5)
  if "confidence" in expected:
    wanted = expected["confidence"][:, offset:]
    np.testing.assert_allclose(sure, wanted, atol=2e-5)


def test_every_head_is_recorded():
  """Their texts are shorter than their windows, which therefore show nothing;
  what windows let slots see is compared with a NumPy forward pass."""
  assert RECORDED == [
    "dflash2", "dflash_few", "dflash_mixed", "dspark", "dspark_gated",
    "dspark_rnn",
  ]  # fmt: skip


def random_inputs():
  rng = np.random.default_rng(1)
  streams = [rng.normal(size=(T, 8)) for _ in range(3)]
  weights = {key: 0.5 * rng.normal(size=(V, 8)) for key in ("embed", "head")}
  return rng.integers(0, V, T).astype(np.int32), streams, weights


def doubles(arrays):
  return {key: x.astype(np.float64) for key, x in arrays.items()}


@pytest.mark.parametrize("name", MANIFESTS)
def test_logits_are_those_of_the_published_forward_pass(name, tmp_path):
  drafter = formats.load(write(tmp_path, name), TARGET)
  tokens, streams, weights = random_inputs()
  ours, sure = unrolled(TARGET, drafter, tokens, streams, ANCHORS, weights)
  w, seen = doubles(arrays_of(name)), []
  for i, anchor in enumerate(ANCHORS):
    logits, confidence = reference.drafted(
      MANIFESTS[name], w, weights, tokens, streams, anchor
    )
    seen.append(logits)
    assert ours[i].shape == logits.shape
    np.testing.assert_allclose(ours[i], logits, rtol=EXACT, atol=EXACT)
    assert (sure is None) == (confidence is None)
    if sure is not None:
      np.testing.assert_allclose(sure[i], confidence, atol=EXACT)
  assert np.std(np.ma.masked_invalid(seen)) > 0.3


def test_a_domino_with_tables_of_its_own(tmp_path):
  """Its GRU reads the embeddings that the block begins with."""
  rng = np.random.default_rng(6)
  arrays = arrays_of("Domino") | {
    key: np.float32(0.5 * rng.normal(size=shape))
    for key, shape in reference.COPIES.items()
  }
  drafter = formats.load(write(tmp_path, "Domino", arrays), TARGET)
  assert drafter.stored.head_config.embed == "own"
  tokens, streams, weights = random_inputs()
  ours, _ = unrolled(TARGET, drafter, tokens, streams, ANCHORS, weights)
  for i, anchor in enumerate(ANCHORS):
    logits, _ = reference.drafted(
      MANIFESTS["Domino"], doubles(arrays), weights, tokens, streams, anchor
    )
    np.testing.assert_allclose(ours[i], logits, rtol=EXACT, atol=EXACT)


def serving(folder, config=TARGET):
  """(drafter, model, Params) of a folder and a small random target."""
  read = formats.load(folder, config)
  head, model = head_of(read, config), transformer.model(config)
  params = jax.tree.map(
    lambda x: 3 * x, transformer.init_params(config, jax.random.key(0))
  )
  levels = read.stored.head_config.levels
  drafter = drafters.from_head(head, model, draft_shape.chain(levels))
  return (
    drafter,
    model,
    Params(params, draft_heads.weights_of(head, read.net, params)),
  )


def one_round(drafter, model, params):
  """Drafts after prompts of 4 and 9 tokens.

  Returns:
    tokens [2, L], lengths [2], the draft, streams entering every layer, and the
    target's embedding and vocabulary projection.
  """
  lengths = np.array([4, 9])
  tokens = np.random.default_rng(2).integers(0, V, (2, 9))

  @jax.jit
  def propose():
    state = decode.start(
      model,
      drafter,
      REJECTION,
      params,
      jnp.asarray(tokens),
      jnp.asarray(lengths),
      jax.random.key(0),
      max_length=24,
      sampling=sampling.settings(2, 1.0),
    )
    context = step.context_of(state, V, REJECTION)
    draft, _ = drafter.propose(params, state.draft_state, context)
    every = tuple(range(TARGET.num_layers))
    output, _ = model.apply(
      params.target, state.tokens[:, :9], None, features=every
    )
    return state.tokens, state.length, draft, output.features

  written, length, draft, entering = jax.tree.map(np.asarray, propose())
  weights = {
    name: np.asarray(params.target[name]["weight"], np.float64)
    for name in ("embed", "head")
  }
  return written, length, draft, doubles(dict(enumerate(entering))), weights


def log_softmax(x):
  x = x - x.max(axis=-1, keepdims=True)
  return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
  "name",
  [
    *("DFlash of mixed layers", "DFlash2", "Domino", "DeepSpec rnn"),
    "speculators dspark",
  ],
)
def test_a_draft_is_of_the_published_distributions(name, tmp_path):
  """One round after a prompt, streams as transformers numbers hidden_states:
  z-lab's and DeepSpec's layer i is entry i + 1, speculators' entry i."""
  written, length, draft, entering, weights = one_round(
    *serving(write(tmp_path, name))
  )
  config = MANIFESTS[name][0]
  left = config.get("dflash_config", config).get("target_layer_ids")
  entries = config.get("aux_hidden_state_layer_ids") or [i + 1 for i in left]
  w = doubles(arrays_of(name))
  for row in range(2):
    anchor = length[row] - 1
    text = np.concatenate([written[row, :anchor], draft.tokens[row]])
    streams = [entering[i][row] for i in entries]
    logits, _ = reference.drafted(
      MANIFESTS[name], w, weights, text, streams, anchor
    )
    wanted = log_softmax(logits)
    np.testing.assert_allclose(draft.log_probs[row, 1:], wanted, atol=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  ["DFlash of mixed layers", "DeepSpec gated", "speculators dflash", "DFlash2"],
)
def test_conformance(name, tmp_path):
  # Of other heads than TARGET's, whose scores are of its cache's shape.
  config = dataclasses.replace(TARGET, num_kv_heads=2)
  drafter, model, params = serving(write(tmp_path, name), config)
  stats = check_drafter(lambda: drafter, model, params, rules=(REJECTION,))
  assert 0 < stats.accepted.sum() < stats.evaluated.sum()


WRITTEN = {
  name: "deepspec"
  if name.startswith("DeepSpec")
  else "speculators"
  if name.startswith("speculators")
  else "dflash"
  for name in MANIFESTS
}
TO = formats.Target(6, 8, V, "somebody/target", ("LlamaForCausalLM",), 64)


def saved(folder, layout, drafter):
  formats.save(
    folder,
    layout,
    drafter.stored.head_config,
    drafter.ids,
    drafter.net,
    TO,
    "float32",
  )
  return load_file(folder / "model.safetensors")


def same(written, expected):
  assert {*written} == {*expected}
  for key, array in expected.items():
    assert written[key].dtype == array.dtype, key
    np.testing.assert_array_equal(written[key], array, key)


@pytest.mark.parametrize("name, layout", WRITTEN.items())
def test_there_and_back_bit_for_bit(name, layout, tmp_path):
  drafter = formats.load(write(tmp_path / "theirs", name), TARGET)
  same(saved(tmp_path / "ours", layout, drafter), arrays_of(name))
  again = formats.load(tmp_path / "ours", TARGET)
  assert again.stored.head_config == drafter.stored.head_config
  config = json.loads((tmp_path / "ours" / "config.json").read_text())
  theirs = MANIFESTS[name][0]
  layer = config.get("transformer_layer_config", config)
  kept = theirs.get("transformer_layer_config", theirs).items()
  inner = {"dflash_config", "target_layer_ids", "mask_token_id"}
  inner |= {"max_window_layers", "block_size", "markov_head_type"}
  inner |= {"confidence_head_with_markov"}
  assert {key: layer.get(key) for key, _ in kept if key not in inner} == {
    key: x for key, x in kept if key not in inner
  }
  if layout == "speculators":
    for key in {*theirs} - {"transformer_layer_config"}:
      assert config[key] == theirs[key], key


def test_a_recorded_drafter_is_written_as_it_was(tmp_path):
  to = TO._replace(width=16, vocab_size=24)
  for name in RECORDED:
    drafter = formats.load(FOLDER / name, target(16, 24))
    head_config = drafter.stored.head_config
    formats.save(
      tmp_path / name,
      "speculators",
      head_config,
      drafter.ids,
      drafter.net,
      to,
      "float32",
    )
    written = load_file(tmp_path / name / "model.safetensors")
    same(written, load_file(FOLDER / name / "model.safetensors"))
    again = formats.load(tmp_path / name, target(16, 24))
    assert again.stored.head_config == head_config


def test_through_the_layout_of_another_and_back(tmp_path):
  name = "DFlash of mixed layers"
  drafter = formats.load(write(tmp_path / "a", name), TARGET)
  same(saved(tmp_path / "b", "speculators", drafter), arrays_of(name))
  again = formats.load(tmp_path / "b", TARGET)
  assert again.stored.head_config == drafter.stored.head_config
  same(saved(tmp_path / "c", "dflash", again), arrays_of(name))


def shapes_of(head_config, config):
  """Name in DFlash's layout -> shape, of the weights of a drafter."""
  head = drafters.LEARNED["block"](head_config, config)
  net = jax.eval_shape(head.init, jax.random.key(0))
  table = formats.WRITTEN["dflash"].table(head_config)
  return {
    table["/".join(part.key for part in path)]: leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(net)
  }


def test_the_58_tensors_of_a_published_drafter(tmp_path):
  """Those of Qwen3-4B-DFlash-b16 by its config.json; no weights."""
  config = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {
      "mask_token_id": 151669,
      "target_layer_ids": [1, 9, 17, 25, 33],
    },
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 36,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "dtype": "bfloat16",
  }
  (tmp_path / "config.json").write_text(json.dumps(config))
  save_file({"norm.weight": np.zeros(1)}, tmp_path / "model.safetensors")
  big = get("qwen3-4b")
  head_config = formats.inspect(tmp_path, big)
  assert head_config.features == (2, 10, 18, 26, 34)
  assert (head_config.levels, head_config.block.mask_token) == (15, 151669)
  published = reference.backbone(5, 5, 2560, 9728, 4096, 128)
  assert len(published) == 58
  assert shapes_of(head_config, big) == published


CONVENTIONS = {
  "DFlash": lambda ids: {
    "dflash_config": {"mask_token_id": 13, "target_layer_ids": ids}
  },
  "DeepSpec DSpark": lambda ids: {"target_layer_ids": ids},
  "speculators dspark": lambda ids: {"aux_hidden_state_layer_ids": ids},
}


@pytest.mark.parametrize(
  "name, ids, entering",
  [
    ("DFlash", [0, 2, 3], (1, 3, 4)),
    ("DeepSpec DSpark", [0, 2, 3], (1, 3, 4)),
    ("DeepSpec DSpark", [-1, 2, 4], (0, 3, 5)),
    ("speculators dspark", [1, 3, 4], (1, 3, 4)),
    ("speculators dspark", [0, 3, 5], (0, 3, 5)),
  ],
)
def test_layers_by_the_three_conventions(name, ids, entering, tmp_path):
  changes = CONVENTIONS[name](ids)
  drafter = formats.load(write(tmp_path / "a", name, **changes), TARGET)
  assert drafter.stored.head_config.features == entering
  if name == "DFlash":  # a config that names none, of older files
    nested = {"mask_token_id": 13}
    folder = write(tmp_path / "b", name, dflash_config=nested)
    assert formats.inspect(folder, TARGET).features == (2, 4)
  saved(tmp_path / "c", WRITTEN[name], drafter)
  config = json.loads((tmp_path / "c" / "config.json").read_text())
  written = config | config.get("dflash_config", {})
  key = "target_layer_ids"
  if WRITTEN[name] == "speculators":
    key = "aux_hidden_state_layer_ids"
  assert written[key] == ids


ALL_SLIDING = {"layer_types": ["sliding_attention"] * LAYERS}
SPECULATORS_SLIDING = {
  "transformer_layer_config": reference.LAYER | reference.SLIDING | ALL_SLIDING
}


@pytest.mark.parametrize(
  "name, changes, sees",
  [  # (window, full_layers, causal, causal_window)
    ("DFlash", {}, (0, (), False, False)),
    ("DFlash", {"is_causal": True}, (0, (), True, False)),
    ("JetSpec", {}, (0, (), True, False)),
    ("JetSpec", {"is_causal": False}, (0, (), False, False)),
    ("DFlash of mixed layers", {}, (5, (1,), False, True)),
    ("DFlash of mixed layers", {"is_causal": True}, (5, (1,), True, False)),
    ("DFlash of mixed layers", {"causal": False}, (5, (1,), False, False)),
    ("DFlash of mixed layers", ALL_SLIDING, (5, (), True, False)),
    ("DFlash with a window", {}, (5, (), False, False)),
    ("DFlash with a window", {"is_causal": None}, (5, (), True, False)),
    ("DFlash2", {"is_causal": None}, (5, (), True, False)),
    ("DeepSpec DSpark", {}, (0, (), False, False)),
    ("speculators dflash", {}, (5, (1,), False, True)),
    ("speculators dflash", SPECULATORS_SLIDING, (5, (), True, False)),
    (
      "speculators dflash",
      SPECULATORS_SLIDING | {"sliding_window_non_causal": True},
      (5, (), False, False),
    ),
  ],
)
def test_what_slots_see_by_the_config(name, changes, sees, tmp_path):
  head_config = formats.inspect(write(tmp_path, name, **changes), TARGET)
  block = head_config.block
  fields = "window", "full_layers", "causal", "causal_window"
  assert tuple(getattr(block, field) for field in fields) == sees
  folder = tmp_path / "b"
  drafter = formats.load(tmp_path, TARGET)
  saved(folder, WRITTEN[name], drafter)
  assert formats.inspect(folder, TARGET) == head_config


def test_what_slots_see_there_and_back(tmp_path):
  drafter = formats.load(write(tmp_path / "a", "DFlash"), TARGET)
  layers, fulls = range(LAYERS), ((), (0,), (1,), (0, 1))
  for i, (causal, causal_window, full) in enumerate(
    itertools.product((False, True), (False, True), fulls)
  ):
    block = dataclasses.replace(
      drafter.stored.head_config.block,
      causal=causal,
      causal_window=causal_window,
      window=5,
      full_layers=full,
    )
    head_config = dataclasses.replace(drafter.stored.head_config, block=block)
    stored = drafter.stored._replace(head_config=head_config)
    saved(tmp_path / str(i), "dflash", drafter._replace(stored=stored))
    again = formats.inspect(tmp_path / str(i), TARGET).block
    assert [*map(again.attention, layers)] == [*map(block.attention, layers)]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(name, tmp_path):
  drafter = formats.load(write(tmp_path / "whole", name), TARGET)
  assert {*drafter.stored.table.values()} == {*MANIFESTS[name][1]}
  shared = {"embed_tokens.weight", "lm_head.weight"}
  for key in MANIFESTS[name][1]:
    arrays = arrays_of(name)
    array = arrays.pop(key)
    if key not in shared:
      assert key in refused(write(tmp_path / "missing", name, arrays))
    if array.ndim == 2 and array.shape[0] != array.shape[1]:
      arrays[key] = np.ascontiguousarray(array.T)
      assert key in refused(write(tmp_path / "turned", name, arrays))
  more = arrays_of(name) | {"layers.0.self_attn.sinks": np.zeros(2, "f4")}
  error = refused(write(tmp_path / "more", name, more))
  assert "layers.0.self_attn.sinks" in error


def nested(name="DFlash", **changes):
  return {"dflash_config": MANIFESTS[name][0]["dflash_config"] | changes}


@pytest.mark.parametrize(
  "name, changes, what",
  [
    ("DFlash", {"block_size": "absent"}, "block_size = None"),
    ("DFlash", {"block_size": 1}, "block_size = 1; it must be >= 2"),
    ("DFlash", nested(block_size=9), "4 at the top level and 9 below it"),
    ("DFlash", nested(mask_token_id=None), "mask_token_id = None"),
    ("DFlash", nested(mask_token_id=16), "the target has 16 tokens"),
    ("DFlash", nested(mask_token_id=-1), "published blocks begin with a tok"),
    ("DFlash", nested(target_layer_ids=[0, 5]), "layer 5, the target's last"),
    ("DFlash", nested(target_layer_ids=[-1]), "list of integers >= 0"),
    ("DFlash", nested(target_layer_ids=[]), "no layers in target_layer_ids"),
    ("DFlash", nested(target_layer_ids=[0, 9]), "layers 10; this target has 6"),
    ("DFlash", {"num_target_layers": 36}, "36 layers; this one has 6"),
    ("DFlash", {"model_type": "llama"}, "supported: qwen3"),
    ("DFlash", {"attention_bias": True}, "attention_bias"),
    ("DFlash", nested(projector_type="gpt"), "known: dflash, domino"),
    ("DFlash", nested(shift_label=True), "shift_label = True with projector"),
    ("Domino", nested("Domino", shift_label=False), "accepted: True"),
    ("Domino", nested("Domino", pure_draft_prefix_len=0), "accepted: 1"),
    ("Domino", nested("Domino", emb_dim=None), "emb_dim = None; it must be"),
    ("DFlash", nested(use_swa=True), "use_swa = True; accepted: False"),
    ("DFlash", nested(output_multiplier=0.2), "0.2; accepted: 1.0"),
    ("DFlash", nested(gate=1), "'gate' is unknown; known: block_size, mask_"),
    (
      "DFlash",
      nested(final_logit_softcapping=20.0),
      "final_logit_softcapping = 20.0; the target, whose vocabulary proj",
    ),
    (
      "DFlash of mixed layers",
      {"sliding_window": 3},
      "sliding_window = 3 and block_size = 4",
    ),
    (
      "DFlash of mixed layers",
      {"use_sliding_window": False},
      "sliding_attention and use_sliding_window = False",
    ),
    (
      "DFlash of mixed layers",
      {"use_sliding_window": "x"},
      "use_sliding_window = 'x'; it must be true or false",
    ),
    ("DeepSpec DSpark", {"markov_rank": "absent"}, "markov_rank = None"),
    (
      "DeepSpec DSpark",
      {"markov_head_type": "lstm"},
      "markov_head_type 'lstm' is unknown; known: vanilla, gated, rnn",
    ),
    (
      "DeepSpec DSpark",
      {"confidence_head_with_markov": False},
      "confidence_head_with_markov = False with markov_rank = 3",
    ),
    ("DeepSpec DSpark", reference.SLIDING, "sliding window, which deepspec"),
    ("DeepSpec DSpark", {"block_size": 0}, "levels = 0"),
    ("speculators dflash", {"projector_type": "domino"}, "accepted: 'dflash'"),
    ("speculators dflash", {"mask_token_id": None}, "mask_token_id = None"),
    (
      "speculators dflash",
      {"aux_hidden_state_layer_ids": None},
      "aux_hidden_state_layer_ids = None; they must be a list",
    ),
    ("speculators dflash", {"draft_vocab_size": 7}, "d2t of 8 tokens"),
    ("speculators dspark", {"draft_vocab_size": 8}, "lacks lm_head.weight"),
    ("speculators dspark", {"block_size": "4"}, "it must be of type int"),
    (
      "speculators dspark",
      {"markov_head_type": "rnn", "sample_from_anchor": False},
      "sample_from_anchor = False, whose state begins a slot earlier",
    ),
    ("speculators dspark", {"target_hidden_size": 16}, "16 there, 8 here"),
    (
      "speculators dspark",
      {"aux_hidden_state_layer_ids": [0, 3, 6]},
      "reads what leaves layer 5, the target's last one",
    ),
    (
      "speculators dflash2",
      {"sample_from_anchor": True},
      "is a DFlash2 with sample_from_anchor = True; accepted: False",
    ),
  ],
)
def test_a_config_that_does_not_load(name, changes, what, tmp_path):
  assert what in refused(write(tmp_path, name, **changes))


def test_a_domino_by_both_names_of_its_architecture(tmp_path):
  folder = write(tmp_path, "Domino", architectures=["DominoDraftModel"])
  block = formats.inspect(folder, TARGET).block
  assert (block.successor, block.state, block.slots) == ("gru", 5, "next")


def test_a_target_that_bounds_its_logits_is_told_from_one_that_does_not(
  tmp_path,
):
  capped = dataclasses.replace(TARGET, logit_softcap=20.0)
  for name in ("DFlash", "DeepSpec DSpark", "speculators dspark"):
    assert "has 20.0" in refused(write(tmp_path / name, name), capped)
  folder = write(
    tmp_path / "a", "DFlash", **nested(final_logit_softcapping=20.0)
  )
  assert formats.inspect(folder, capped).kind == "block"


@pytest.mark.parametrize(
  "architecture, what",
  [
    ("Gemma4DSparkModel", "a DSpark with Gemma 4's layers, which"),
    ("MuseGlimmerAssistantModel", "a DFlash with Muse Glimmer's keys, which"),
  ],
)
def test_architectures_that_do_not_load_are_named(architecture, what, tmp_path):
  error = refused(write(tmp_path, "DFlash", architectures=[architecture]))
  assert what in error and "speculators, dflash, deepspec" in error


@pytest.mark.parametrize(
  "name, layout, changes, what",
  [
    ("DFlash", "deepspec", {}, "block.slots = 'in_place': deepspec knows"),
    ("DeepSpec DSpark", "dflash", {}, "block.successor = 'markov': dflash"),
    ("DeepSpec DFlash", "dflash", {}, "block.slots = 'next': dflash knows"),
    ("DeepSpec DFlash", "speculators", {}, "embed = 'own': speculators knows"),
    ("speculators dflash", "dflash", {}, "vocabulary = 8: dflash knows"),
    ("speculators dspark", "eagle", {}, "cannot be written as eagle"),
    ("Domino", "speculators", {}, "block.successor = 'gru': speculators know"),
    ("JetSpec", "speculators", {}, "block.causal = True: speculators knows"),
    ("DFlash", "dflash", {"features": (0, 2)}, "embeddings leave none"),
    ("DFlash", "dflash", {"features": (2, 6)}, "layer 5, the target's last"),
    ("DeepSpec DSpark", "deepspec", {"features": (3, 1)}, "ascending layers"),
    (
      "speculators dspark",
      "speculators",
      {"features": (2, 6)},
      "layer 5, the",
    ),
    ("DFlash", "dflash", {"layout": "compact"}, "layout = 'compact'"),
    (
      "DFlash",
      "dflash",
      {"block": {"window": 2}},
      "sliding_window = 2 and block_",
    ),
    (
      "speculators dflash2",
      "speculators",
      {"block": {"slots": "next"}},
      "block.slots = 'next': speculators knows block drafters with block.slots",
    ),
  ],
)
def test_what_readers_would_take_for_another_is_not_written(
  name, layout, changes, what, tmp_path
):
  drafter = formats.load(write(tmp_path / "a", name), TARGET)
  head_config = drafter.stored.head_config
  block = dataclasses.replace(head_config.block, **changes.get("block", {}))
  changes = changes | {"block": block}
  head_config = dataclasses.replace(head_config, **changes)
  stored = drafter.stored._replace(head_config=head_config)
  with pytest.raises(ValueError, match=what):
    saved(tmp_path / "b", layout, drafter._replace(stored=stored))
  assert not (tmp_path / "b").exists()


def test_weights_without_a_place_are_named(tmp_path):
  drafter = formats.load(write(tmp_path / "a", "DFlash"), TARGET)
  net = drafter.net | {"gate": {"weight": np.ones((2, 2), np.float32)}}
  for layout in ("dflash", "speculators"):
    with pytest.raises(ValueError, match="no place for gate/weight of this"):
      saved(tmp_path / "b", layout, drafter._replace(net=net))
  assert not (tmp_path / "b").exists()


def test_drafters_that_train_py_trains_are_written_and_read(tmp_path):
  path = pathlib.Path(__file__).parent.parent / "configs/train/drafter.py"
  spec = importlib.util.spec_from_file_location("drafter_config", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = checkpoints.inspect(fetch("stdlib-11m"), "float32")
  to = formats.target_of(config)
  for name, layouts in (
    ("published_dflash", ("dflash", "speculators")),
    ("published_dspark", ("deepspec", "speculators")),
    ("published_jetspec", ("dflash",)),
    ("published_domino", ("dflash",)),
    ("published_dflash2", ("dflash", "speculators")),
    ("published_peagle", ("speculators",)),
  ):
    head_config, _ = module.KINDS[name]
    ids = list(range(head_config.vocabulary)) or None
    head = drafters.LEARNED[head_config.kind](head_config, config, ids)
    net = jax.tree.map(
      lambda x: np.zeros(x.shape, np.float32),
      jax.eval_shape(head.init, jax.random.key(0)),
    )
    for layout in layouts:
      folder = tmp_path / name / layout
      formats.save(folder, layout, head_config, ids, net, to, "float32")
      assert formats.load(folder, config).stored.head_config == head_config


def test_a_cut_that_only_causal_blocks_take(tmp_path):
  """JetSpec's block is cut to k; DFlash's is whole."""
  causal, whole = (
    head_of(formats.load(write(tmp_path / name, name), TARGET))
    for name in ("JetSpec", "DFlash")
  )
  assert (causal.num_slots(1), whole.num_slots(1)) == (2, SIZE)
  assert whole.head_config.num_layers == LAYERS
