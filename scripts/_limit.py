"""How many of the prompts are decoded."""

from absl import flags

flags.DEFINE_integer(
  "limit", 0, "Prompts (of each category, by eval), 0 for all of them."
)
FLAGS = flags.FLAGS


def check_flags() -> None:
  """Refuses what is no number of prompts."""
  if FLAGS.limit < 0:
    raise ValueError(f"--limit={FLAGS.limit}; it must be >= 0")
