"""Names of axes to mesh axes, and what cannot be; no device is needed."""

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from specdec import sharding
from specdec.compiled import memory_plan
from specdec.models import params as model_params
from specdec.models import presets
from specdec.roofline import chips, shapes
from specdec.roofline.cost import Deployment
from specdec.sharding import Places

COUNTS = {"vocab": 64, "query": 16, "key": 8, "mlp": 96}


def mesh(data, *model):
  names = ["data", "model", *(f"model_{i + 2}" for i in range(len(model) - 1))]
  return AbstractMesh((data, *model), tuple(names))


def test_a_mesh_as_text():
  assert sharding.parse("data:2,model:4") == {"data": 2, "model": 4}
  assert sharding.parse("model:8") == {"data": 1, "model": 8}
  with pytest.raises(ValueError, match="gives data twice"):
    sharding.parse("data:2,data:4")
  for text in ("rows:2", "data:0", "data", "model:x"):
    with pytest.raises(ValueError, match="no axis; give data:N,model:M"):
      sharding.parse(text)


def test_heads_columns_and_vocabulary_are_shared_out():
  place = sharding.place(mesh(2, 4), COUNTS)
  assert place.sharding(("query", "width")).spec == PartitionSpec(
    ("model",), None
  )
  assert place.sharding(sharding.CACHE).spec == PartitionSpec(
    ("data",), ("model",), None, None
  )
  assert place.ways("key") == place.ways("vocab") == 4
  assert place.ways("width") == 1 and place.ways("rows") == 2


def test_more_chips_than_heads_share_their_queries():
  place = sharding.place(mesh(1, 8, 2), COUNTS)
  assert place.ways("query") == 16 and place.ways("key") == 8
  assert place.rules.group == ("model_2",)
  assert place.sharding(("rows", "key", "group", None)).spec == PartitionSpec(
    ("data",), ("model",), ("model_2",), None
  )


@pytest.mark.parametrize(
  "name",
  ["llama3-70b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "deepseek-v3"],
)
def test_the_cost_model_knows_what_every_chip_has(name):
  """Routers and norms on all, one KV head on several: to the byte."""
  config = presets.get(name, "bfloat16")
  shared = sharding.shards(8, config.num_kv_heads)
  place = sharding.place(mesh(1, shared, 8 // shared), config.counts)
  chip = Deployment(shapes.get(name), chips.get("v6e"), ways=8)
  outside = 2 * config.width  # the final norm
  if config.routing:  # the biases of the choice are in float32
    mixtures = config.num_layers - len(config.dense_layers)
    outside += 2 * mixtures * config.num_experts
  held = memory_plan.weight_bytes(config, place)
  assert chip.weight_bytes + outside == pytest.approx(held, rel=1e-9)


def test_a_draft_may_have_fewer_shards():
  for ways, axes in ((1, ()), (2, ("model",)), (8, ("model", "model_2"))):
    place = sharding.place(mesh(1, 2, 4), COUNTS, ways)
    assert place.rules.vocab == axes
  with pytest.raises(ValueError, match=r"over 4 chips: this mesh has groups"):
    sharding.place(mesh(1, 2, 4), COUNTS, 4)
  for ways in (0, 3):
    with pytest.raises(ValueError, match=rf"draft_ways = {ways}; .* 1\.\.1"):
      sharding.places("data:2", COUNTS, COUNTS, draft_ways=ways)


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"query": 12}, "8 chips do not divide the 12 query heads .*; 4 would"),
    ({"vocab": 65}, "65 tokens of the vocabulary of the target; 1 would"),
    ({"mlp": 97}, "97 inner columns of the MLP of the target; 1 would"),
    ({"key": 6}, "8 chips and 6 KV heads of the target: neither divides"),
  ],
)
def test_what_does_not_divide_is_refused(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    sharding.place(mesh(1, 8), COUNTS | changes, who="the target")


def test_a_leaf_is_named():
  place = sharding.place(mesh(2, 4), COUNTS)
  with pytest.raises(ValueError, match="layer_0/x: 6 along 'mlp' do not divid"):
    place.sharding(("mlp", "width"), "layer_0/x", (6, 8))
  with pytest.raises(ValueError, match=r"layer_0/x .*over axis 'model'"):
    place.sharding(("mlp", "query"), "layer_0/x")
  with pytest.raises(ValueError, match="far from its keys"):
    sharding.Rules(query=("model",), key=("data",))


def test_devices_must_be_there_and_parts_must_nest():
  with pytest.raises(ValueError, match="needs 4096 devices; there are"):
    sharding.make_mesh(512, 8)
  with pytest.raises(ValueError, match="2 and 3 shards do not nest"):
    sharding.make_mesh(1, 6, (2, 3), devices=jax.devices() * 6)


def test_every_parameter_has_a_place():
  config = presets.get("llama3-8b", "bfloat16")
  place = sharding.place(mesh(1, 8), config.counts)
  shardings = model_params.shardings(config, place)
  layer = shardings["layer_0"]
  assert layer["attention"]["k"]["weight"].spec == PartitionSpec(
    ("model",), None
  )
  assert layer["mlp"]["down"]["weight"].spec == PartitionSpec(None, ("model",))
  assert layer["mlp_norm"]["scale"].spec == PartitionSpec(None)
  assert shardings["head"]["weight"].spec == PartitionSpec(("model",), None)


def test_memory_of_each_device():
  config = presets.get("llama3-8b", "bfloat16")
  shape = {"batch": 4, "max_length": 1000, "num_nodes": 5}
  alone = memory_plan.plan(config, None, **shape).parts
  assert alone["target"] == pytest.approx(2 * config.num_parameters)
  place = sharding.place(mesh(2, 4), config.counts)
  split = memory_plan.plan(config, None, **shape, places=Places(place))
  for name in ("KV caches", "logits"):
    assert split.parts[name] == pytest.approx(alone[name] / 8)
  # All but the norms are shared by four.
  assert split.parts["target"] == pytest.approx(alone["target"] / 4, rel=0.01)
  assert "target 3." in str(split) and "draft" not in str(split)
  weights = memory_plan.weight_bytes(config, place)
  train = memory_plan.training(weights, weights)
  assert train.needed == pytest.approx(1.1 * 5 * split.parts["target"])
