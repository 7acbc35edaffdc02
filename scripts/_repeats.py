"""How often programs that compare speeds time what they compare."""

from absl import flags

flags.DEFINE_integer(
  "repeats",
  None,
  "Timings of everything, after warming up; of decoding pairs, plain and "
  "speculative in turns, at least: the prompts are decoded again until there "
  "are as many. Default 9 in bench, 3 in generate.",
)
FLAGS = flags.FLAGS


def settle(usual: int) -> None:
  """Fills in a program's default and refuses what is no number of timings."""
  if FLAGS.repeats is None:
    FLAGS.repeats = usual
  if FLAGS.repeats < 1:
    raise ValueError(f"--repeats={FLAGS.repeats}; it must be >= 1")


def turns(batches: int) -> int:
  """How often so many batches are timed to make --repeats pairs or more."""
  return -(-FLAGS.repeats // batches)
