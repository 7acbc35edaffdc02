"""Presets have the parameter counts that their publishers state."""

import itertools
import pathlib

import jax
import pytest

from imports_test import imported
from specdec.checkpoints import hf_config
from specdec.models import presets, transformer


def seeing(published: int, width: int) -> int:
  """Less SigLIP (400M, 896 pixels) and its projection into a Gemma 3."""
  return published - 416_866_032 - 1152 * (width + 1)


def twice(published: int, width: int) -> int:
  """Less the copy of the tied embedding that two Qwen 3 are stored with."""
  return published - 151_936 * width


# The parameter counts of the safetensors on Hugging Face.
PUBLISHED = {
  "llama2-7b": 6_738_415_616,
  "llama2-13b": 13_015_864_320,
  "llama2-70b": 68_976_648_192,
  "llama3-1b": 1_235_814_400,
  "llama3-3b": 3_212_749_824,
  "llama3-8b": 8_030_261_248,
  "llama3-70b": 70_553_706_496,
  "llama3-405b": 405_853_388_800,
  "mistral-7b": 7_248_023_552,
  "mixtral-8x7b": 46_702_792_704,
  "qwen2.5-0.5b": 494_032_768,
  "qwen2.5-1.5b": 1_543_714_304,
  "qwen2.5-3b": 3_085_938_688,
  "qwen2.5-7b": 7_615_616_512,
  "qwen2.5-14b": 14_770_033_664,
  "qwen2.5-32b": 32_763_876_352,
  "qwen2.5-72b": 72_706_203_648,
  "qwen3-0.6b": twice(751_632_384, 1024),
  "qwen3-1.7b": twice(2_031_739_904, 2048),
  "qwen3-4b": 4_022_468_096,
  "qwen3-8b": 8_190_735_360,
  "qwen3-14b": 14_768_307_200,
  "qwen3-32b": 32_762_123_264,
  "qwen3-30b-a3b": 30_532_122_624,
  "gemma2-2b": 2_614_341_888,
  "gemma2-9b": 9_241_705_984,
  "gemma2-27b": 27_227_128_320,
  "gemma3-270m": 268_098_176,
  "gemma3-1b": 999_885_952,
  "gemma3-4b": seeing(4_300_079_472, 2560),
  "gemma3-12b": seeing(12_187_325_040, 3840),
  "gemma3-27b": seeing(27_432_406_640, 5376),
  "smollm2-135m": 134_515_008,
  "smollm2-360m": 361_821_120,
  "smollm2-1.7b": 1_711_376_384,
}


def test_counts_are_the_published_ones():
  counts = {name: presets.get(name).num_parameters for name in PUBLISHED}
  assert counts == PUBLISHED


def test_only_chinchilla_has_no_published_count():
  rest = [name for name in presets.names() if name not in PUBLISHED]
  assert rest == ["chinchilla-4b", "chinchilla-70b"]


@pytest.mark.parametrize("name", ["chinchilla-4b", "chinchilla-70b"])
def test_chinchilla_has_the_weights_of_a_plain_mlp(name):
  config = presets.get(name)
  square = config.width**2
  baseline = config.num_layers * (4 + 8) * square + 32_000 * config.width
  assert config.num_parameters == pytest.approx(baseline, rel=1e-3)
  assert config.mlp_width % 16 == 0
  assert config.num_heads * config.head_dim == config.width


def test_chinchilla_is_70_billion_with_its_relative_positions():
  config = presets.get("chinchilla-70b")
  positions = config.num_layers * config.width**2
  assert config.num_parameters + positions == pytest.approx(70e9, rel=0.01)


def test_an_unknown_name_is_told_the_known_ones():
  with pytest.raises(ValueError, match=r"'llama4-8b' is unknown") as error:
    presets.get("llama4-8b")
  for name in presets.names():
    assert name in str(error.value)


def test_names_are_distinct_and_families_stand_together():
  names = presets.names()
  families = [name.split("-")[0] for name in names]
  changes = sum(a != b for a, b in itertools.pairwise(families))
  assert len(set(names)) == len(names)
  assert changes == len(set(families)) - 1


def test_the_dtype_is_the_callers():
  assert presets.get("llama3-1b").dtype == "float32"
  assert presets.get("llama3-1b", "bfloat16").dtype == "bfloat16"
  with pytest.raises(ValueError, match="float8"):
    presets.get("llama3-1b", "float8")


@pytest.mark.parametrize("name", presets.names())
def test_options_are_those_of_an_architecture(name):
  config = presets.get(name)
  rendered = hf_config.render(config)
  family = name.split("-")[0]
  expected = {
    "mixtral": "Mixtral",
    "qwen2.5": "Qwen2",
    "qwen3": "Qwen3Moe" if config.num_experts else "Qwen3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
  }.get(family, "Llama")
  assert rendered["architectures"] == [f"{expected}ForCausalLM"]


@pytest.mark.parametrize(
  "name, windows",
  [
    ("gemma2-2b", (4096, None) * 13),
    ("gemma2-27b", (4096, None) * 23),
    ("gemma3-270m", (*(512,) * 5, None) * 3),
    ("gemma3-1b", (*(512,) * 5, None) * 4 + (512, 512)),
    ("gemma3-4b", (*(1024,) * 5, None) * 5 + (1024,) * 4),
    ("gemma3-27b", (*(1024,) * 5, None) * 10 + (1024, 1024)),
    ("mistral-7b", ()),
    ("qwen2.5-7b", ()),
  ],
)
def test_windows_alternate_as_published(name, windows):
  assert presets.get(name).windows == windows


@pytest.mark.parametrize(
  "name, scale",
  [("gemma2-9b", 256), ("gemma2-27b", 144), ("gemma3-27b", 168)],
)
def test_gemma_scales_its_queries_as_published(name, scale):
  assert presets.get(name).query_scalar == scale


def test_only_the_long_gemmas_stretch_their_frequencies():
  assert presets.get("gemma3-1b").rope_scaling is None
  scaling = presets.get("gemma3-4b").rope_scaling
  assert (scaling.kind, scaling.factor) == ("linear", 8.0)


@pytest.mark.parametrize("name, factor", [("llama3-1b", 32), ("llama3-8b", 8)])
def test_llama3_stretches_its_frequencies_as_published(name, factor):
  scaling = presets.get(name).rope_scaling
  assert (scaling.kind, scaling.factor) == ("llama3", factor)


@pytest.mark.parametrize(
  "name",
  [
    "llama3-1b",
    "mixtral-8x7b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "gemma2-2b",
    "gemma3-270m",
    "smollm2-1.7b",
    "chinchilla-4b",
  ],
)
def test_the_decoder_has_these_shapes(name):
  config = presets.get(name)
  params = jax.eval_shape(
    lambda key: transformer.init_params(config, key), jax.random.key(0)
  )
  sizes = [leaf.size for leaf in jax.tree.leaves(params)]
  assert sum(sizes) == config.num_parameters


def test_nothing_of_jax_is_imported():
  source = pathlib.Path(presets.__file__).read_text()
  assert imported(source, "specdec.models.presets") == {
    "dataclasses",
    "specdec.models.config.RopeScaling",
    "specdec.models.config.TransformerConfig",
    "specdec.utils.spelling.choices",
  }
