"""What a config.json leaves out means what its architecture says it means."""

from specdec.checkpoints import hf_config
from specdec.models.config import TransformerConfig

BASE = {
  "vocab_size": 8,
  "num_hidden_layers": 2,
  "hidden_size": 32,
  "intermediate_size": 16,
  "num_attention_heads": 16,
}


def parse(architecture, **changes) -> TransformerConfig:
  config = {**BASE, "architectures": [architecture], **changes}
  return hf_config.parse(config, "config.json", "float32")


def test_mistral_has_a_window_and_eight_heads_unless_told_otherwise():
  config = parse("MistralForCausalLM")
  assert config.windows == (4096, 4096)
  assert config.num_kv_heads == 8
  told = parse("MistralForCausalLM", sliding_window=None, num_key_value_heads=4)
  assert told.windows == ()
  assert told.num_kv_heads == 4


def test_llama_has_neither():
  config = parse("LlamaForCausalLM")
  assert config.windows == ()
  assert config.num_kv_heads == 16
