"""MTP layers of a model's own: mixtures, with latent attention or gates.

A recorded model is cut in two: its first layers are a target, its last one is
its MTP layer. What that computes is what the layer does in the whole model,
whose logits are transformers' (transformer_test.py).
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

import specdec
from specdec import checkpoints, drafters
from specdec.checkpoints import formats, learned
from specdec.drafters.heads import draft_head, unroll
from specdec.drafters.heads.cost import drafter_cost
from specdec.models import attention, transformer
from specdec.roofline import chips, shapes
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import round_cost, step_cost
from specdec.training import drafting, loop
from specdec.training.options import Options
from specdec.types import Params

PARITY = Path(__file__).parent / "fixtures" / "parity"
WEIGHTS = "model.safetensors"


class Family(NamedTuple):
  """A recorded model, and where files hold its MTP layer."""

  name: str
  layers: int  # of the target
  prefix: str  # of the layer's tensors
  outside: dict[str, str]  # fuse, embed, hidden, final -> tensors
  config: dict  # what the target's config.json has of its own


FAMILIES = [
  Family(
    "deepseek_v3",
    2,
    "model.layers.2.",
    {
      "fuse": "model.layers.2.eh_proj.weight",
      "embed": "model.layers.2.enorm.weight",
      "hidden": "model.layers.2.hnorm.weight",
      "final": "model.layers.2.shared_head.norm.weight",
    },
    {"num_nextn_predict_layers": 1},
  ),
  Family(
    "qwen3_next",
    3,
    "mtp.layers.0.",
    {
      "fuse": "mtp.fc.weight",
      "embed": "mtp.pre_fc_norm_embedding.weight",
      "hidden": "mtp.pre_fc_norm_hidden.weight",
      "final": "mtp.norm.weight",
    },
    {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
  ),
]


def cut(family: Family, folder: Path) -> dict[str, np.ndarray]:
  """Writes a target with an MTP layer; returns the new tensors."""
  arrays = load_file(PARITY / family.name / WEIGHTS)
  config = json.loads((PARITY / family.name / "config.json").read_text())
  width, rng = config["hidden_size"], np.random.default_rng(0)
  own = f"model.layers.{family.layers}."
  arrays = {
    name.replace(own, family.prefix) if name.startswith(own) else name: x
    for name, x in arrays.items()
  }
  new = {
    family.outside[name]: rng.normal(0, 0.3, (width,)).astype(np.float32) + 1
    for name in ("embed", "hidden", "final")
  }
  fuse = rng.normal(0, 0.2, (width, 2 * width)).astype(np.float32)
  new[family.outside["fuse"]] = fuse
  folder.mkdir()
  config |= {"num_hidden_layers": family.layers} | family.config
  (folder / "config.json").write_text(json.dumps(config))
  save_file(arrays | new, folder / WEIGHTS)
  return new


@pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.name)
def test_an_mtp_layer_computes_what_the_layer_does(family, tmp_path):
  new = cut(family, tmp_path / "whole")
  whole = checkpoints.load(PARITY / family.name)
  target = checkpoints.load(tmp_path / "whole")
  assert target.config.num_layers == family.layers
  drafter = formats.load(tmp_path / "whole", target.config)
  head_config = drafter.stored.head_config
  assert head_config.layer is not None
  rng = np.random.default_rng(1)
  shape = 2, 7, target.config.width
  hidden = jnp.asarray(rng.normal(size=shape), jnp.float32)
  tokens = jnp.asarray(rng.integers(64, size=(2, 7)), jnp.int32)
  head = drafters.LEARNED["mtp"](head_config, target.config, None)
  both = draft_head.weights_of(head, drafter.net, target.params)
  weights = draft_head.target_weights_of(Params(target.params, both))
  view = attention.view(jnp.zeros(2, jnp.int32), None, 0, 7).masked(7)
  stepped, _ = head.step(
    drafter.net, weights, tokens, hidden, (), view, 0, None
  )
  logits = head.logits(drafter.net, weights, stepped, 0)

  offset = float(target.config.norm_offset)

  def normed(x, name):
    mean = np.mean(np.square(x), -1, keepdims=True)
    scale = offset + new[family.outside[name]]
    return x / np.sqrt(mean + target.config.norm_epsilon) * scale

  x = np.asarray(whole.params["embed"]["weight"])[np.asarray(tokens)]
  x = np.concatenate(
    [normed(x, "embed"), normed(np.asarray(hidden), "hidden")], axis=-1
  )
  x = x @ new[family.outside["fuse"]].T
  params = whole.params | {
    "final_norm": {"scale": jnp.asarray(new[family.outside["final"]])}
  }
  expected, _ = transformer.model(whole.config).apply(
    params, tokens, None, start=family.layers, hidden=jnp.asarray(x)
  )
  np.testing.assert_allclose(logits, expected.logits, rtol=0, atol=2e-4)
  assert np.std(expected.logits) > 0.5


@pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.name)
def test_it_drafts_and_is_kept_in_a_file_of_ours(family, tmp_path):
  cut(family, tmp_path / "whole")
  target = checkpoints.load(tmp_path / "whole")
  drafter = formats.load(tmp_path / "whole", target.config)
  head_config = drafter.stored.head_config
  path = tmp_path / "mtp.safetensors"
  learned.save(
    path, head_config, None, drafter.net, learned.fingerprint(target)
  )
  again = learned.load(path, target)
  assert again.head_config == head_config

  settings = dict(drafter=f"head({path})", batch=4, prompt_size=16)
  settings |= dict(temperature=1.0, max_new_tokens=20)
  rows = np.random.default_rng(0).integers(0, 64, (4, 9)).tolist()
  rows = [row[:n] for row, n in zip(rows, (1, 4, 7, 9))]
  for shape in (dict(k=3), dict(shape="optimal(3, [0.5, 0.3])")):
    decoder = specdec.load(str(tmp_path / "whole"), **settings, **shape)
    [batch] = decoder.encode(rows)
    ours = decoder.complete(batch)
    assert ours.texts == decoder.baseline().complete(batch).texts
    assert ours.stats.accepted.sum() > 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.name)
def test_it_learns_from_its_own_hidden_states(family, tmp_path):
  """Experts have derivatives at every level, and choose by unrounded biases."""
  cut(family, tmp_path / "whole")
  target = checkpoints.load(tmp_path / "whole")
  head_config = formats.inspect(tmp_path / "whole", target.config)
  head_config = dataclasses.replace(head_config, levels=2)
  head = drafters.LEARNED["mtp"](
    head_config, target.config, None, unroll.growing
  )
  options = Options(steps=2, batch=2, sequence=8, warmup=1, dtype="bfloat16")
  model = transformer.model(options.in_dtype(target.config))
  honest = drafting.objective(head, model, drafting.Loss())
  biases = []

  def objective(net, frozen, tokens):
    for path, x in traverse_util.flatten_dict(
      {"net": net, "t": frozen}
    ).items():
      biases.extend([x.dtype] * (path[-1] == "choice_bias"))
    return honest(net, frozen, tokens)

  optimizer = loop.make_optimizer(options)
  step = loop.make_step(objective, optimizer, options)
  net = head.init(jax.random.key(0))
  before = jax.tree.map(np.array, net)
  tokens = np.random.default_rng(0).integers(
    0, target.config.vocab_size, (2, 9)
  )
  state, _ = step(loop.init(net, optimizer), target.params, tokens)
  assert int(state.failed) == -1
  moved = traverse_util.flatten_dict(
    jax.tree.map(lambda a, b: np.any(a != b), before, state.params), sep="/"
  )
  experts = [name for name in moved if re.search("/mlp/(gate|up|down)", name)]
  assert experts and all(moved[name] for name in experts)
  assert set(biases) <= {jnp.dtype("float32")}
  assert bool(biases) == (family.name == "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.name)
def test_a_step_is_priced_by_the_experts_that_tokens_choose(family, tmp_path):
  cut(family, tmp_path / "whole")
  target = checkpoints.load(tmp_path / "whole")
  head_config = formats.inspect(tmp_path / "whole", target.config)
  layer = head_config.layer
  head = drafters.LEARNED["mtp"](head_config, target.config, None)
  cost = drafter_cost(head, target.config)
  expert = 3 * layer.width * layer.mlp_width
  assert cost.step.experts == (
    (4 * expert, 2 * expert, layer.num_experts, layer.experts_per_token),
  )
  assert cost.step.position_bytes == 4 * layer.kv_size
  # Everything but the experts, the norms of both inputs, and the projection.
  sizes = {
    path: x.size
    for path, x in traverse_util.flatten_dict(
      jax.eval_shape(head.init, jax.random.key(0)), sep="/"
    ).items()
  }
  dense = sum(
    size
    for path, size in sizes.items()
    if not (
      path.endswith("weight") and "/mlp/" in path and "router" not in path
    )
  )
  routed = sum(sizes.values()) - dense
  assert routed == layer.num_experts * expert
  assert cost.step.bytes == 4 * dense and cost.step.flops == 2 * dense
  unread = 0 if head_config.feeds_back_norm else sizes["norm/scale"]
  assert cost.update.bytes == 4 * (dense - unread)
  [experts] = (
    term
    for term in step_cost(
      Deployment(shapes.of_config(target.config), chips.get("v5e")),
      *(cost.step, 3, 2, 8),
    ).terms
    if term.name == "experts"
  )
  assert experts.flops == 3 * 2 * layer.experts_per_token * 2 * expert
  held = sum(x.size for x in jax.tree.leaves(head.init(jax.random.key(0))))
  assert cost.weight_bytes == 4 * held
  priced = Deployment(
    shapes.of_config(target.config), chips.get("v5e"), weights="float32"
  )
  one, many = (
    round_cost(priced, cost, 2, batch, 8).only("draft").bytes
    for batch in (1, 64)
  )
  touched = layer.num_experts - layer.experts_per_token
  assert many - one >= 2 * 4 * expert * touched * 0.9


@pytest.fixture
def deepseek(tmp_path):
  """A folder with DeepSeek-V3's layers, and the config of its target."""
  folder = tmp_path / "whole"
  cut(FAMILIES[0], folder)
  return folder, checkpoints.inspect(folder)


def test_a_matrix_of_several_with_other_rows_is_refused(deepseek):
  folder, target = deepseek
  arrays = load_file(folder / WEIGHTS)
  name = "model.layers.2.self_attn.kv_b_proj.weight"
  arrays[name] = arrays[name][:-1].copy()
  save_file(arrays, folder / WEIGHTS)
  with pytest.raises(ValueError, match=r"kv_b_proj.* 111 rows; .* 112"):
    formats.load(folder, target)


def test_float8_is_read_with_its_scales(deepseek):
  """DeepSeek-V3's own MTP layer is published so."""
  folder, target = deepseek
  path = folder / WEIGHTS
  arrays, rounded = load_file(path), {}
  for name in list(arrays):
    if name.startswith("model.layers.2.") and "_proj" in name:
      scale = np.abs(arrays[name]).max() / 448
      rounded[name] = (arrays[name] / scale).astype(ml_dtypes.float8_e4m3fn)
      arrays[name] = rounded[name].astype(np.float32) * scale
      rounded[f"{name}_scale_inv"] = np.full((1, 1), scale, np.float32)
  save_file(arrays, path)
  expected = formats.load(folder, target).net
  save_file(arrays | rounded, path)
  config = json.loads((folder / "config.json").read_text())
  config["quantization_config"] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
  }
  (folder / "config.json").write_text(json.dumps(config))
  ours = formats.load(folder, target).net
  jax.tree.map(np.testing.assert_array_equal, ours, expected)


def test_an_expert_that_is_not_there_is_named(deepseek):
  folder, target = deepseek
  path = folder / WEIGHTS
  arrays, name = load_file(path), "model.layers.2.mlp.experts.3.up_proj.weight"
  whole = arrays.pop(name)
  save_file(arrays, path)
  with pytest.raises(ValueError, match=rf"lacks {re.escape(name)}"):
    formats.load(folder, target)
  save_file(arrays | {name: whole[:-1].copy()}, path)
  with pytest.raises(
    ValueError, match=rf"{re.escape(name)} .* shape \(15, 32\)"
  ):
    formats.load(folder, target)
  save_file(
    {x: y for x, y in arrays.items() if "kv_b_proj" not in x} | {name: whole},
    path,
  )
  with pytest.raises(ValueError, match=r"lacks .*self_attn\.kv_b_proj\.weight"):
    formats.load(folder, target)
