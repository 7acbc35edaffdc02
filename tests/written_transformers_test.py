"""What is written in Hugging Face's format, as transformers reads it."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from specdec import checkpoints

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PARITY = Path(__file__).parent / "fixtures" / "parity"
DECODERS = [
  folder.name
  for folder in sorted(PARITY.iterdir())
  if not folder.name.startswith(("t5", "mt5"))
]


@pytest.mark.parametrize("name", DECODERS)
def test_transformers_reads_what_is_written(tmp_path, name):
  loaded = checkpoints.load(PARITY / name)
  checkpoints.save_safetensors(tmp_path, loaded.params, loaded.config)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  expected = load_file(PARITY / name / "expected.safetensors")
  tokens = torch.tensor(expected["tokens"]).long()
  with torch.no_grad():
    logits = model(input_ids=tokens, use_cache=False).logits.numpy()
  np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
