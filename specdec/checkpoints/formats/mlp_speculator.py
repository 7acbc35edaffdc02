"""IBM's MLP speculators, as fms-extras writes and vLLM reads them."""

from specdec.checkpoints.formats.files import Files
from specdec.checkpoints.formats.stored import Stored, Target, typed
from specdec.drafters.heads.head_config import HeadConfig

NAME = "mlp_speculator"
_PREFIX = "speculator."


def matches(files: Files) -> bool:
  """Whether a folder is of this layout."""
  return files.config.get("model_type") == NAME


def parse(files: Files, target: Target | None) -> Stored:
  """Returns what a folder holds; raises ValueError where that is unknown."""
  del target
  config, source = files.config, files.source

  def number(key, *default):
    return typed(config, key, int, source, *default)

  width = number("emb_dim")
  head_config = HeadConfig(
    kind=NAME,
    layout="published",
    num_layers=0,
    width=number("inner_dim", 0) or width,
    levels=number("n_predict"),
    tied=typed(config, "tie_weights", bool, source, False),
    scale_input=typed(config, "scale_input", bool, source, False),
  )
  table = {}
  stages = 1 if head_config.tied else head_config.levels
  for i in range(stages):
    table[f"embed_table_{i}/weight"] = f"{_PREFIX}emb.{i}.weight"
    table[f"norm_{i}/scale"] = f"{_PREFIX}ln.{i}.weight"
    table[f"norm_{i}/bias"] = f"{_PREFIX}ln.{i}.bias"
    table[f"head_{i}/weight"] = f"{_PREFIX}head.{i}.weight"
  for i in range(min(2, head_config.levels) if head_config.tied else stages):
    table[f"project_{i}/weight"] = f"{_PREFIX}proj.{i}.weight"
  # Tied ones may be written once more for every token ahead.
  copies = rf"{_PREFIX}(emb|ln|head|proj)\.\d+\.(weight|bias)"
  return Stored(
    head_config,
    table,
    number("vocab_size"),
    target_width=width,
    ignored=copies if head_config.tied else None,
  )
