"""Presets have the parameter counts that their publishers state."""

import ast
import pathlib

import pytest

from specdec.checkpoints import hf_config
from specdec.models import presets
from specdec.models.rope_scaling import RopeScaling

# A projection of 4096 to 2048, a layer with attention, and three norms.
MTP_OF_QWEN3_NEXT = 1_650_471_424
SIGLIP = 416_866_032  # 400M, 896 pixels; in the larger Gemma 3
# The parameter counts of the safetensors on Hugging Face, less SigLIP and its
# projection, and the copy of the tied embedding that two Qwen 3 stored.
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
  "qwen3-0.6b": 751_632_384 - 151_936 * 1024,
  "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,
  "qwen3-4b": 4_022_468_096,
  "qwen3-8b": 8_190_735_360,
  "qwen3-14b": 14_768_307_200,
  "qwen3-32b": 32_762_123_264,
  "qwen3-30b-a3b": 30_532_122_624,
  "qwen3-next-80b-a3b": 81_324_862_720 - MTP_OF_QWEN3_NEXT,
  # As transformers builds their text models; 109 and 400 billion are published,
  # with what sees images.
  "llama4-scout": 107_769_861_120,
  "llama4-maverick": 400_711_848_960,
  # As transformers builds it, with the biases of its choice: 671 billion in
  # arXiv:2412.19437.
  "deepseek-v3": 671_026_419_200,
  # 20.91 and 116.83 billion in table 1 of the model card, arXiv:2508.10925.
  "gpt-oss-20b": 20_914_757_184,
  "gpt-oss-120b": 116_829_156_672,
  "gemma2-2b": 2_614_341_888,
  "gemma2-9b": 9_241_705_984,
  "gemma2-27b": 27_227_128_320,
  "gemma3-270m": 268_098_176,
  "gemma3-1b": 999_885_952,
  "gemma3-4b": 4_300_079_472 - SIGLIP - 1152 * 2561,
  "gemma3-12b": 12_187_325_040 - SIGLIP - 1152 * 3841,
  "gemma3-27b": 27_432_406_640 - SIGLIP - 1152 * 5377,
  "smollm2-135m": 134_515_008,
  "smollm2-360m": 361_821_120,
  "smollm2-1.7b": 1_711_376_384,
  "smollm3-3b": 3_075_098_624,
  "phi3-mini": 3_821_079_552,
  "phi3-medium": 13_960_238_080,
  "phi4-mini": 3_836_021_760,
  "phi4": 14_659_507_200,
  "olmo2-1b": 1_484_916_736,
  "olmo2-7b": 7_298_617_344,
  "olmo2-13b": 13_716_198_400,
  "olmo2-32b": 32_234_279_936,
  # google/flan-t5-*, as large as google/t5-v1_1-*.
  "t5-small": 76_961_152,
  "t5-base": 247_577_856,
  "t5-large": 783_150_080,
  "t5-xl": 2_849_757_184,
  "t5-xxl": 11_135_332_352,
}


def test_numbers_of_parameters_are_the_published_ones():
  counts = {name: presets.get(name).num_parameters for name in PUBLISHED}
  assert counts == PUBLISHED
  rest = [name for name in presets.names() if name not in PUBLISHED]
  assert rest == ["chinchilla-4b", "chinchilla-70b"]


def test_chinchilla_has_the_weights_of_an_ungated_mlp():
  for name in ("chinchilla-4b", "chinchilla-70b"):
    config = presets.get(name)
    square = config.width**2
    ungated = config.num_layers * (4 + 8) * square + 32_000 * config.width
    assert config.num_parameters == pytest.approx(ungated, rel=1e-3)
    assert config.mlp_width % 16 == 0
    assert config.num_heads * config.head_dim == config.width
  total = config.num_parameters + config.num_layers * square  # positions
  assert total == pytest.approx(70e9, rel=0.01)


def test_an_unknown_name_is_refused_with_the_valid_ones():
  with pytest.raises(ValueError, match=r"'llama4-8b' is unknown") as error:
    presets.get("llama4-8b")
  assert all(name in str(error.value) for name in presets.names())
  assert presets.get("llama3-1b", "bfloat16").dtype == "bfloat16"


def test_options_are_those_of_an_architecture():
  architectures = {
    "mixtral": "Mixtral",
    "qwen2.5": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "deepseek": "DeepseekV3",
    "gpt": "GptOss",
    "llama4": "Llama4",
    "smollm3": "SmolLM3",
    "phi3": "Phi3",
    "phi4": "Phi3",
    "olmo2": "Olmo2",
  }
  for name in presets.names():
    expected = architectures.get(name.split("-")[0], "Llama")
    expected += "Moe" if name == "qwen3-30b-a3b" else ""
    expected += "Next" if name == "qwen3-next-80b-a3b" else ""
    expected += "ForCausalLM"
    if name.startswith("t5"):
      expected = "T5ForConditionalGeneration"
    rendered = hf_config.render(presets.get(name))
    assert rendered["architectures"] == [expected], name


def test_options_are_the_published_ones():
  for name, field, value in (
    ("gemma2-27b", "windows", (4096, None) * 23),
    ("gemma3-1b", "windows", (*(512,) * 5, None) * 4 + (512, 512)),
    ("gemma3-27b", "windows", (*(1024,) * 5, None) * 10 + (1024, 1024)),
    ("mistral-7b", "windows", ()),
    ("gemma2-9b", "query_scalar", 256),
    ("gemma2-27b", "query_scalar", 144),
    ("gemma3-27b", "query_scalar", 168),
    ("gemma3-1b", "rope_scaling", None),
    ("gemma3-4b", "rope_scaling", RopeScaling("linear", 8.0)),
    ("smollm3-3b", "unrotated_layers", (3, 7, 11, 15, 19, 23, 27, 31, 35)),
    ("phi3-mini", "windows", (2047,) * 32),
    ("phi4", "windows", ()),
    ("phi4-mini", "rotary_dims", 96),
    ("olmo2-32b", "pre_norms", False),
    ("llama3-1b", "rope_scaling", RopeScaling("llama3", 32.0)),
    ("llama3-8b", "rope_scaling", RopeScaling("llama3", 8.0)),
  ):
    assert getattr(presets.get(name), field) == value, (name, field)


def test_presets_import_no_model_code():
  tree = ast.parse(pathlib.Path(presets.__file__).read_text())
  modules = {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
  ours = {module for module in modules if module.startswith("specdec")}
  assert ours == {
    "specdec.models.config",
    "specdec.models.parts",
    "specdec.models.rope_scaling",
    "specdec.utils.spelling",
  }
