"""Drafters in the formats of others: loaded exactly, written back bit for bit.

fixtures/drafters: folders that the `speculators` package wrote, and logits that
it computed (tools/record_drafters.py). fixtures/drafter_manifests.json: names
and shapes of every format's tensors, for drafters of random numbers, which are
compared with published_heads.py.
"""

import dataclasses
import json
import pathlib
import pickle
import re
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import published_heads as reference
from specdec import drafters
from specdec.checkpoints import formats
from specdec.checkpoints.formats import pickled, tables
from specdec.drafters.heads.draft_head import TargetWeights
from specdec.drafters.heads.unroll import growing, unroll
from specdec.models.config import TransformerConfig
from specdec.types import ModelOutput

FOLDER = pathlib.Path(__file__).parent / "fixtures"
RECORDED = sorted(path.name for path in FOLDER.glob("drafters/*"))
MANIFESTS = json.loads((FOLDER / "drafter_manifests.json").read_text())
T, LEVELS = 12, 3


def target(width=8, vocab_size=16):
  return TransformerConfig(
    vocab_size=vocab_size,
    num_layers=6,
    width=width,
    mlp_width=20,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
  )


TARGET = target()


def unrolled(config, drafter, tokens, streams, weights=None):
  """[levels, T, n] logits of a drafter, teacher-forced.

  Args:
    tokens: [T].
    streams: of the target, each [T, M]; of a head without features its last
      hidden state alone.
    weights: TargetWeights, of which it may use both, one or none.
  """
  head_config = drafter.stored.head_config
  make = drafters.LEARNED[head_config.kind]
  head = make(head_config, config, drafter.ids, growing)
  streams = [jnp.asarray(x, jnp.float32)[None] for x in streams]
  features = tuple(streams) if head_config.features else ()
  output = ModelOutput(None, streams[-1], features)
  levels = min(LEVELS, head_config.most_levels or LEVELS)
  logits, _ = jax.jit(
    lambda net: unroll(
      head, net, weights, jnp.asarray(tokens, jnp.int32)[None], output, levels
    )
  )(drafter.net)
  return np.stack([x[0] for x in logits])


@pytest.mark.parametrize("name", RECORDED)
def test_logits_are_those_of_speculators(name):
  expected = load_file(FOLDER / "drafters" / name / "expected.safetensors")
  config = target(16, 24)
  drafter = formats.load(FOLDER / "drafters" / name, config)
  weights = None
  if "embed" in expected:
    weights = TargetWeights(
      jnp.asarray(expected["embed"]), jnp.asarray(expected["head"])
    )
  hidden, theirs = expected["hidden"], expected["logits"]
  streams = np.split(hidden, hidden.shape[1] // config.width, axis=1)
  ours = unrolled(config, drafter, expected["tokens"], streams, weights)
  # Later steps of its MTP attend to hidden states of their own step only, which
  # no decoder with a KV cache does.
  for level in range(1 if name.startswith("mtp") else LEVELS):
    first = 1 + level
    gap = ours[level, first:][: len(theirs[level])]
    gap = gap - theirs[level, : len(gap)]
    assert len(gap) >= T - LEVELS - 1 and theirs.std() > 0.3
    assert np.abs(gap).max() < 1e-4, level


def arrays_of(manifest):
  """Random tensors of a manifest; 8 of the 16 tokens where it drafts fewer."""
  rng = np.random.default_rng(5)
  arrays = {}
  for name, shape in manifest["shapes"].items():
    noise = rng.normal(size=shape)
    norm = len(shape) == 1 and not name.endswith("bias")
    arrays[name] = np.float32(1 + 0.3 * noise if norm else 0.5 * noise)
  if manifest.get("vocabulary"):
    ids = np.array([0, 2, 3, 7, 8, 11, 14, 15])
    arrays["d2t"] = ids - np.arange(8)
    arrays["t2d"] = np.isin(np.arange(16), ids)
  return arrays


def write(folder, manifest, arrays=None, **changes):
  folder.mkdir(parents=True, exist_ok=True)
  config = manifest["config"] | changes
  config = {key: x for key, x in config.items() if x != "absent"}
  (folder / "config.json").write_text(json.dumps(config))
  arrays = arrays_of(manifest) if arrays is None else arrays
  save_file(arrays, folder / "model.safetensors")
  return folder


def mtp_names(prefix, *names):
  return [prefix + name for name in names]


SPECULATORS_MTP = mtp_names(
  "mtp_layers.0.",
  *("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
)
DEEPSEEK = "model.layers.6."
MIMO = "model.mtp_layers.0."
REFERENCES = {
  "speculators eagle3": lambda w, t: reference.Eagle3(
    w, t, "layers.0.", normed_residual=True
  ),
  "speculators mtp": lambda w, t: reference.Mtp(
    w, t, "mtp_layers.0.", SPECULATORS_MTP
  ),
  "EAGLE": reference.Eagle,
  "EAGLE-3": lambda w, t: reference.Eagle3(w, t, "midlayer."),
  "SpecForge": lambda w, t: reference.Eagle3(w, t, "midlayer.", eagle31=True),
  "DeepSeek MTP": lambda w, t: reference.Mtp(
    w,
    t,
    DEEPSEEK,
    mtp_names(DEEPSEEK, "eh_proj", "enorm", "hnorm", "shared_head.norm"),
    returns_normed=False,
    embed=f"{DEEPSEEK}embed_tokens.weight",
    head=f"{DEEPSEEK}shared_head.head.weight",
  ),
  "Qwen MTP": lambda w, t: reference.Mtp(
    w,
    t,
    "mtp.layers.0.",
    mtp_names(
      "mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    ),
    offset=1.0,
  ),
  "MiMo MTP": lambda w, t: reference.Mtp(
    w,
    t,
    MIMO,
    mtp_names(
      MIMO,
      *("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    ),
    hidden_first=True,
  ),
}


PARALLEL = "speculators peagle", "P-EAGLE"  # parallel_formats_test.py
REDRAFTERS = {"ReDrafter": True, "ReDrafter without RNN": False}
MLP_SPECULATORS = {"MLP speculator": False, "tied MLP speculator": True}


def random_inputs():
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 16, T)
  streams = [rng.normal(size=(T, 8)) for _ in range(3)]
  weights = {key: 0.5 * rng.normal(size=(16, 8)) for key in ("embed", "head")}
  return tokens, streams, weights


def published(name, weights, tokens, streams):
  """Returns logits(root, level) of a published forward pass, in float64."""
  arrays = {
    key: x.astype(np.float64) for key, x in arrays_of(MANIFESTS[name]).items()
  }
  if name in REFERENCES:
    theirs = REFERENCES[name](arrays, weights)
    return lambda root, level: reference.drafted(
      theirs, tokens, streams, root, level
    )
  if name in MLP_SPECULATORS:
    theirs = reference.MlpSpeculator(arrays, MLP_SPECULATORS[name], 3, 12)
    return lambda root, level: theirs.logits(
      streams[-1][root - 1], tokens[root : root + level + 1]
    )
  if name in REDRAFTERS:
    return lambda root, level: reference.redrafter(
      arrays,
      streams[-1][root - 1],
      tokens[root : root + level + 1],
      weights["embed"],
      2,
      REDRAFTERS[name],
    )
  assert name == "Medusa"
  return lambda root, level: reference.medusa(
    arrays, streams[-1][root - 1], level, 2
  )


@pytest.mark.parametrize("name", sorted({*MANIFESTS} - {*PARALLEL}))
def test_logits_are_those_of_the_published_forward_pass(name, tmp_path):
  drafter = formats.load(write(tmp_path, MANIFESTS[name]), TARGET)
  tokens, streams, weights = random_inputs()
  theirs = published(name, weights, tokens, streams)
  used = {key: jnp.asarray(x, jnp.float32) for key, x in weights.items()}
  ours = unrolled(TARGET, drafter, tokens, streams, TargetWeights(**used))
  seen = []
  for level in range(LEVELS):
    for root in range(1, T - level):
      expected = theirs(root, level)
      seen.append(expected)
      gap = np.abs(ours[level, root + level] - expected).max()
      assert gap < 1e-4, (level, root)
  assert np.std(seen) > 0.3


def test_medusa_counts_heads_and_blocks_from_the_tensors(tmp_path):
  head_config = formats.inspect(write(tmp_path, MANIFESTS["Medusa"]), TARGET)
  assert (head_config.levels, head_config.residual_layers) == (3, 2)


WRITABLE = {
  "speculators eagle3": "speculators",
  "speculators peagle": "speculators",
  "speculators mtp": "speculators",
  "EAGLE": "eagle",
  "EAGLE-3": "eagle",
  "SpecForge": "eagle",
  "P-EAGLE": "eagle",
  "Medusa": "medusa",
}


@pytest.mark.parametrize("name, format_name", WRITABLE.items())
def test_there_and_back_bit_for_bit(name, format_name, tmp_path):
  manifest = MANIFESTS[name]
  drafter = formats.load(write(tmp_path / "theirs", manifest), TARGET)
  head_config = drafter.stored.head_config
  to = formats.Target(6, 8, 16, "somebody/target", ("LlamaForCausalLM",), 64)
  formats.save(
    tmp_path / "ours",
    format_name,
    head_config,
    drafter.ids,
    drafter.net,
    to,
    "float32",
  )
  [path] = (tmp_path / "ours").glob("*.safetensors")
  assert path.stem == ("medusa_lm_head" if name == "Medusa" else "model")
  written = load_file(path)
  expected = arrays_of(manifest)
  assert {*written} == {*expected}
  for key, array in expected.items():
    assert written[key].dtype == array.dtype, key
    np.testing.assert_array_equal(written[key], array, key)
  again = formats.load(tmp_path / "ours", TARGET)
  assert again.stored.head_config == head_config
  assert again.stored.verifier in (None, "somebody/target")
  config = json.loads((tmp_path / "ours" / "config.json").read_text())
  if format_name == "speculators":
    theirs = manifest["config"]
    kept = {*theirs} - {"speculators_version", "target_hidden_size"}
    for key in kept - {"transformer_layer_config"}:
      assert config[key] == theirs[key], key
    layer = theirs["transformer_layer_config"]
    assert layer.items() <= config["transformer_layer_config"].items()


def test_a_recorded_drafter_is_written_as_it_was(tmp_path):
  for name in RECORDED:
    drafter = formats.load(FOLDER / "drafters" / name, target(16, 24))
    to = formats.Target(6, 16, 24, "somebody/target", ("LlamaForCausalLM",))
    head_config, ids = drafter.stored.head_config, drafter.ids
    folder = tmp_path / name
    formats.save(
      folder, "speculators", head_config, ids, drafter.net, to, "float32"
    )
    theirs = load_file(FOLDER / "drafters" / name / "model.safetensors")
    written = load_file(folder / "model.safetensors")
    # Its package writes the mapping of all tokens, too.
    assert {*written} == {*theirs} - ({"d2t", "t2d"} if ids is None else set())
    for key in written:
      np.testing.assert_array_equal(written[key], theirs[key], key)


def test_layers_in_two_conventions():
  entering = (2, 3, 6)
  assert tables.layers_left(entering) == (1, 2, 5)
  assert tables.layers_entered((1, 2, 5)) == entering


def test_layers_that_a_config_leaves_out_depend_on_the_target(tmp_path):
  folder = write(tmp_path, MANIFESTS["EAGLE-3"])
  assert formats.inspect(folder, TARGET).features == (2, 3, 3)


def test_layers_of_eagle_config_are_those_that_streams_leave(tmp_path):
  """As SGLang and SpecForge count; vLLM's key at the top level goes first."""
  key, left = "eagle_aux_hidden_state_layer_ids", {"use_aux_hidden_state": True}
  manifest = MANIFESTS["SpecForge"]

  def features(**config):
    return formats.inspect(write(tmp_path, manifest, **config), TARGET).features

  assert features(eagle_config=left | {key: [1, 2, 4]}) == (2, 3, 5)
  assert features(eagle_config=left | {key: []}) == (2, 3, 3)
  assert features(eagle_config=left | {key: [1, 2, 4]}, **{key: [1, 3, 5]}) == (
    1,
    3,
    5,
  )
  drafter = formats.load(
    write(tmp_path, manifest, eagle_config={key: [1, 2, 4]}), TARGET
  )
  to = formats.Target(6, 8, 16)
  formats.save(
    tmp_path / "b", "eagle", drafter.stored.head_config, None, drafter.net, to
  )
  config = json.loads((tmp_path / "b" / "config.json").read_text())
  assert config[key] == [2, 3, 5] and config["eagle_config"][key] == [1, 2, 4]


def refused(folder, config=TARGET):
  with pytest.raises((ValueError, FileNotFoundError)) as error:
    formats.load(folder, config)
  assert str(folder) in str(error.value)
  return str(error.value)


# Tensors by which a format is known, and those that a drafter may share.
RECOGNISED = (
  "fc.weight",
  "q_proj.weight",
  "eh_proj.weight",
  "input_proj.weight",
)
SHARED = "embed_tokens.weight", "lm_head.weight", "shared_head.head.weight"


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(name, tmp_path):
  manifest = MANIFESTS[name]
  drafter = formats.load(write(tmp_path / "whole", manifest), TARGET)
  for key in drafter.stored.table.values():
    arrays = arrays_of(manifest)
    array = arrays.pop(key)
    if not key.endswith(SHARED):
      error = refused(write(tmp_path / "missing", manifest, arrays))
      recognised = key.endswith(RECOGNISED) and "holds no drafter" in error
      assert key in error or recognised
    if array.ndim == 2 and array.shape[0] != array.shape[1]:
      arrays[key] = np.ascontiguousarray(array.T)
      assert key in refused(write(tmp_path / "turned", manifest, arrays))
  arrays = arrays_of(manifest)
  extra = f"{drafter.stored.prefix}layers.0.self_attn.sinks"
  arrays[extra] = np.zeros(2, np.float32)
  assert extra in refused(write(tmp_path / "more", manifest, arrays))


EAGLE3, SPECULATORS = MANIFESTS["EAGLE-3"], MANIFESTS["speculators eagle3"]


def changed(folder, manifest, arrays=(), **config):
  return refused(
    write(folder, manifest, arrays_of(manifest) | dict(arrays), **config)
  )


def test_norm_before_residual_must_be_said(tmp_path):
  error = changed(tmp_path, SPECULATORS, norm_before_residual="absent")
  assert "norm_before_residual" in error


def test_a_vocabulary_that_contradicts_itself(tmp_path):
  kept = arrays_of(EAGLE3)["t2d"]
  error = changed(tmp_path / "a", EAGLE3, {"t2d": ~kept})
  assert "t2d does not name the tokens" in error
  for wrong in (np.append(kept, False), kept[None]):
    error = changed(tmp_path / "a", EAGLE3, {"t2d": wrong})
    assert "t2d does not name the tokens" in error
  offsets = np.array([5, 4, 3, 2, 1, 0, 0, 0])  # token 5 again and again
  error = changed(tmp_path / "b", EAGLE3, {"d2t": offsets})
  assert "ascending" in error
  error = changed(tmp_path / "c", EAGLE3, {"d2t": np.full(8, 9)})
  assert "below 16" in error
  error = changed(tmp_path / "d", EAGLE3, {"d2t": np.zeros(7, np.int64)})
  assert "7 tokens" in error
  arrays = arrays_of(EAGLE3)
  del arrays["d2t"]
  assert "no d2t" in refused(write(tmp_path / "e", EAGLE3, arrays))
  forge = MANIFESTS["SpecForge"]  # of all tokens
  error = changed(tmp_path / "f", forge, {"t2d": np.arange(16) < 9})
  assert "t2d does not name the tokens" in error
  error = changed(tmp_path / "g", EAGLE3, {"d2t": np.zeros(0, np.int64)})
  assert "n > 0" in error


def test_the_mapping_of_all_tokens_to_themselves_is_none(tmp_path):
  forge = MANIFESTS["SpecForge"]
  arrays = arrays_of(forge) | {"d2t": np.zeros(16, np.int64)}
  arrays["t2d"] = np.ones(16, bool)
  assert formats.load(write(tmp_path, forge, arrays), TARGET).ids is None


@pytest.mark.parametrize(
  "config, what",
  [
    (target(16), "hidden width 8 there, 16 here"),
    (target(8, 32), "tokens 16 there, 32 here"),
  ],
)
def test_another_target_is_refused_by_what_differs(config, what, tmp_path):
  error = refused(write(tmp_path, SPECULATORS), config)
  assert "somebody/target" in error and what in error


@pytest.mark.parametrize(
  "changes, what",
  [
    (dict(speculators_model_type="eagle"), "versions up to 0.4"),
    (
      dict(speculators_model_type="hydra"),
      "eagle3, peagle, mtp, dflash, dflash2, dspark",
    ),
    (dict(transformer_layer_config="here"), "of type dict"),
    (dict(speculators_config={}), "proposal_methods"),
    (dict(norm_before_fc=True, fc_norm=True), "both"),
    (dict(draft_vocab_size=True), "of type int"),
  ],
)
def test_a_config_of_speculators_that_does_not_load(changes, what, tmp_path):
  assert what in changed(tmp_path, SPECULATORS, **changes)


@pytest.mark.parametrize("ids", [5, "abc", [None], [-1], {"a": 1}, [True]])
def test_layers_that_are_no_list_of_integers(ids, tmp_path):
  key = "eagle_aux_hidden_state_layer_ids"
  for manifest in (SPECULATORS, EAGLE3):
    error = changed(tmp_path / "a", manifest, **{key: ids})
    assert f"{key} = " in error and "list of integers" in error
  error = changed(tmp_path / "b", EAGLE3, eagle_config={key: ids})
  assert "list of integers" in error


@pytest.mark.parametrize(
  "changes, what",
  [
    (dict(eagle_config={"use_aux_hidden_state": False}), "accepted: True"),
    (dict(eagle_config={"parallel_draft_step": 4}), "accepted: 1"),
    (dict(draft_vocab_size=9), "9"),
  ],
)
def test_a_config_of_eagle3_that_does_not_load(changes, what, tmp_path):
  assert what in changed(tmp_path, EAGLE3, **changes)


def test_spellings_of_eagle3_that_load(tmp_path):
  more = {"input_norm.weight": np.ones(24, np.float32)}
  more["midlayer.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
  arrays = arrays_of(EAGLE3) | more
  key = "eagle_aux_hidden_state_layer_ids"
  folder = write(
    tmp_path, EAGLE3, arrays, eagle_config={"norm_before_fc": True}, **{key: []}
  )
  head_config = formats.load(folder, TARGET).stored.head_config
  assert head_config.feature_norm == "joint"
  assert head_config.features == (2, 3, 3)
  folder = write(tmp_path / "b", MANIFESTS["EAGLE"], draft_vocab_size=None)
  assert formats.inspect(folder, TARGET).kind == "eagle"


def test_sizes_that_no_drafter_has_are_refused_at_once(tmp_path):
  error = changed(
    tmp_path, MANIFESTS["ReDrafter"], num_draft_layers=100_000_000
  )
  assert "residual_layers = 100000000" in error


def head_of(name, tmp_path, **changes):
  """(head config with changes, its random weights)."""
  head_config = formats.load(
    write(tmp_path / "a", MANIFESTS[name]), TARGET
  ).stored.head_config
  head_config = dataclasses.replace(head_config, **changes)
  ids = np.arange(8) if head_config.vocabulary else None
  head = drafters.LEARNED[head_config.kind](head_config, TARGET, ids)
  return head_config, ids, head.init(jax.random.key(0))


@pytest.mark.parametrize(
  "name, changes, what",
  [
    ("speculators mtp", dict(vocabulary=8), "vocabulary = 8"),
    ("EAGLE", dict(vocabulary=8), "vocabulary = 8: eagle knows"),
    ("speculators mtp", dict(num_layers=2), "num_layers = 2"),
    ("speculators mtp", dict(qk_norm=False), "qk_norm = False"),
    ("speculators mtp", dict(hidden_first=True), "hidden_first = True"),
    ("speculators eagle3", dict(features=(1, 2, 2)), "different layers"),
  ],
)
def test_what_readers_would_take_for_another_is_not_written(
  name, changes, what, tmp_path
):
  arguments, layout = head_of(name, tmp_path, **changes), WRITABLE[name]
  with pytest.raises(ValueError, match=what):
    formats.save(tmp_path / "b", layout, *arguments, formats.Target(6, 8, 16))
  assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format_name", ["speculators", "eagle"])
def test_a_written_config_says_one_type(format_name, dtype, tmp_path):
  arguments = head_of("speculators eagle3", tmp_path)
  folder = tmp_path / "b"
  to = formats.Target(6, 8, 16)
  formats.save(folder, format_name, *arguments, to, dtype)
  config = (folder / "config.json").read_text()
  assert re.findall(r'"(?:torch_)?dtype": "(\w+)"', config) == [dtype]


def test_layers_that_a_head_cannot_have(tmp_path):
  layer = SPECULATORS["config"]["transformer_layer_config"]
  window = {
    "model_type": "qwen3",
    "sliding_window": 4,
    "use_sliding_window": True,
  }
  window |= {"layer_types": ["sliding_attention"]}
  error = changed(
    tmp_path / "a", SPECULATORS, transformer_layer_config=layer | window
  )
  assert "windows = (4,)" in error
  error = changed(
    tmp_path / "b",
    SPECULATORS,
    transformer_layer_config=layer | {"attention_bias": True},
  )
  assert "attention_bias" in error


def test_formats_without_a_drafter_here_are_named(tmp_path):
  for config, what in (
    ({"architectures": ["Gemma4DSparkModel"]}, "which does not load"),
    ({"architectures": ["LlamaForCausalLM"]}, "no drafter"),
  ):
    manifest = {"config": config, "shapes": {"a.weight": [2]}}
    error = refused(write(tmp_path, manifest))
    assert what in error and "deepspec, medusa" in error


@pytest.mark.parametrize("value", [-1, True, [1], ["x"], {"x": {}}])
def test_names_in_a_config_that_are_of_another_type(value, tmp_path):
  nothing = {"config": {"model_type": value}, "shapes": {"a.weight": [2]}}
  assert "no drafter" in refused(write(tmp_path / "a", nothing))
  folder = write(tmp_path / "b", MANIFESTS["EAGLE"], architectures=value)
  assert formats.inspect(folder, TARGET).kind == "eagle"


def test_pickled_tensors_are_read_as_torch_saved_them():
  """Views, strides and types; see tools/record_drafters.py."""
  tensors = pickled.read(FOLDER / "pickled" / "mixed.pt")
  ours = {name: tensor.read() for name, tensor in tensors.items()}
  numbers = np.arange(24).reshape(4, 6)
  np.testing.assert_array_equal(ours["turned"], numbers.T[1:4])
  assert ours["turned"].dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(ours["steps"], np.arange(24)[3::5])
  assert ours["steps"].dtype == np.int64
  np.testing.assert_array_equal(ours["scalar"], np.float16(1.5))
  np.testing.assert_array_equal(ours["spread"], np.full((3, 2), 7, np.float32))
  np.testing.assert_array_equal(ours["flags"], [True, False])
  assert ours["none"].shape == (0, 3)


def test_pickled_medusa_is_the_same_drafter(tmp_path):
  manifest = MANIFESTS["Medusa"]
  (tmp_path / "config.json").write_text(json.dumps(manifest["config"]))
  path = tmp_path / "medusa_lm_head.pt"
  path.write_bytes((FOLDER / "pickled" / "medusa_lm_head.pt").read_bytes())
  ours = formats.load(tmp_path, TARGET)
  theirs = formats.load(write(tmp_path / "same", manifest), TARGET)
  assert ours.stored.head_config == theirs.stored.head_config
  jax.tree.map(np.testing.assert_array_equal, ours.net, theirs.net)


RAN = []


class Harmful:
  """Pickles as a call of a function."""

  def __init__(self, call, *args):
    self.call, self.args = call, args

  def __reduce__(self):
    return self.call, self.args


@pytest.mark.parametrize(
  "content, name",
  [
    (Harmful(RAN.append, "ran"), "getattr"),
    ({"a": Harmful(eval, "RAN.append(1)")}, "eval"),
    ({"a": Harmful(pathlib.Path, "x")}, "pathlib"),
    (np.zeros(3), "numpy|BYTES"),
    ({"a": 1}, "named tensors"),
    ({}, "named tensors"),
    ([1], "named tensors"),
  ],
)
def test_nothing_but_tensors_is_unpickled(content, name, tmp_path):
  path = tmp_path / "pytorch_model.bin"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
  with pytest.raises(ValueError, match=name) as error:
    pickled.read(path)
  assert str(path) in str(error.value) and not RAN


def test_damaged_pickles_are_refused(tmp_path):
  path = tmp_path / "a.pt"
  path.write_bytes(pickle.dumps({"a": 1}))  # as torch before 1.6
  with pytest.raises(ValueError, match=r"since version 1\.6"):
    pickled.read(path)
  whole = (FOLDER / "pickled" / "mixed.pt").read_bytes()
  with zipfile.ZipFile(FOLDER / "pickled" / "mixed.pt") as archive:
    names = {name: archive.read(name) for name in archive.namelist()}
  [key] = [name for name in names if name.endswith("data.pkl")]
  for count in (0, 5, len(names[key]) // 2):
    with zipfile.ZipFile(path, "w") as archive:
      for name, content in names.items():
        content = content[:count] if name == key else content
        archive.writestr(name, content)
    with pytest.raises(ValueError, match="is damaged"):
      pickled.read(path)
  with zipfile.ZipFile(path, "w") as archive:
    for name, content in names.items():
      short = "/data/" in name
      archive.writestr(name, content[:1] if short else content)
  with pytest.raises(ValueError, match="is damaged"):
    for tensor in pickled.read(path).values():
      tensor.read()
  path.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(ValueError, match=r"a\.pt is no whole zip"):
    pickled.read(path)


@pytest.mark.parametrize(
  "content, what",
  [
    (b"\x80\x02}" + b")" + b"\x85" * 3_000_000 + b"K\x01s.", "tuples"),
    (b"\x80\x02}r\x00\x00\x00\x08.", "entry 134217728"),
    (b"\x80\x02\x82\x01.", "EXT1"),
    (b"\x80\x02(ios\nsystem\n.", "INST"),
    (b"\x80\x02}X\x01", "is damaged"),
    (b"", "is damaged"),
  ],
)
def test_pickles_that_could_crash_a_reader_are_refused(content, what, tmp_path):
  path = tmp_path / "a.pt"
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("archive/data.pkl", content)
  with pytest.raises(ValueError, match=what) as error:
    pickled.read(path)
  assert str(path) in str(error.value)


@pytest.mark.parametrize("names", [[], ["a/data.pkl", "b/data.pkl"]])
def test_an_archive_without_one_pickle_is_refused(names, tmp_path):
  path = tmp_path / "a.pt"
  with zipfile.ZipFile(path, "w") as archive:
    for name in [*names, "x"]:
      archive.writestr(name, b"")
  with pytest.raises(ValueError, match=rf"a\.pt .*{len(names)} data\.pkl"):
    pickled.read(path)
