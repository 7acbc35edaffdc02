"""ReDrafters as Apple's ml-recurrent-drafter writes them."""

from specdec.checkpoints.formats.files import Files
from specdec.checkpoints.formats.stored import Stored, Target, typed
from specdec.drafters.heads.head_config import HeadConfig

NAME = "redrafter"


def matches(files: Files) -> bool:
  """Whether a folder is of this layout."""
  return files.config.get("model_type") == "recurrent_drafting_drafter"


def parse(files: Files, target: Target | None) -> Stored:
  """Returns what a folder holds; raises ValueError where that is unknown."""
  del target
  config, source = files.config, files.source

  def number(key):
    return typed(config, key, int, source)

  hidden, width = number("hidden_size"), number("exit_dim")
  head_config = HeadConfig(
    kind=NAME,
    layout="published",
    num_layers=0,
    width=width,
    residual_layers=number("num_draft_layers"),
    rnn=typed(config, "rnn", bool, source, False),
  )
  names = {
    f"residual_{i}": f"lm_head.{i}.linear"
    for i in range(head_config.residual_layers)
  }
  if width != 2 * hidden:
    names["fuse"] = "input_proj"
  if head_config.rnn:
    names["from_state"] = "rnn_u"
  table = {
    f"{path}/{end}": f"{name}.{end}"
    for path, name in names.items()
    for end in ("weight", "bias")
  }
  table["head/weight"] = f"lm_head.{head_config.residual_layers}.weight"
  if head_config.rnn:
    table["from_token/weight"] = "rnn_w.weight"
  vocab_size = number("vocab_size")
  return Stored(head_config, table, vocab_size, target_width=hidden)
