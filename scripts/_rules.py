"""The flags that choose an acceptance rule and its numbers."""

from absl import flags

from specdec import acceptance

FLAGS = flags.FLAGS

RULES = {
  "block": acceptance.block,
  "coupled": acceptance.coupled,
  "greedy": acceptance.greedy,
  "kseq": acceptance.kseq,
  "lenience": lambda: acceptance.lenience(FLAGS.share),
  "naive": acceptance.naive,
  "rejection": acceptance.rejection,
  "relaxed": lambda: acceptance.relaxed(FLAGS.relaxed_top, FLAGS.margin),
  "synthetic": lambda: acceptance.synthetic(FLAGS.rates),
  "typical": lambda: acceptance.typical(FLAGS.epsilon, FLAGS.delta),
}
# What only one rule reads.
_ONLY = {
  "rates": "synthetic",
  "share": "lenience",
  "epsilon": "typical",
  "delta": "typical",
  "relaxed_top": "relaxed",
  "margin": "relaxed",
}
_BEFORE = set(FLAGS)
flags.DEFINE_enum(
  "acceptance",
  "coupled",
  sorted(RULES),
  "coupled: token for token the text of plain sampling with this seed. "
  "rejection: the same distribution, other noise, accepts sampled drafts more "
  "often. "
  "block: the same distribution, evaluates a chain as a whole and accepts "
  "most. kseq: the "
  "same distribution, for several chains drawn alike. naive: the same "
  "distribution, accepts "
  "where a sample of the target is the drafted token. greedy: temperature 0 "
  "only. Lossy, and said so: lenience (--share), typical (--epsilon, --delta), "
  "relaxed (--relaxed_top, --margin). synthetic: accepts at --rates whatever "
  "was drafted, to study speed; the text is meaningless.",
)
flags.DEFINE_float(
  "share",
  0.5,
  "Lenience: a token x is kept with min(1, p(x) / (share q(x))), and comes at "
  "most 1 / share times as often as the target says.",
)
flags.DEFINE_float(
  "epsilon",
  0.09,
  "Typical: x is kept where p(x) > min(epsilon, delta exp(-entropy of p)).",
)
flags.DEFINE_float("delta", 0.3, "Typical: see --epsilon.")
flags.DEFINE_integer(
  "relaxed_top", 10, "Relaxed: any of so many likeliest tokens is kept ..."
)
flags.DEFINE_float(
  "margin", 0.6, "Relaxed: ... if it is within this of the likeliest's."
)
flags.DEFINE_multi_float(
  "rates",
  [],
  "Synthetic: probability that a token is kept, in [0, 1]; repeat it for "
  "position 1, 2 ... (the last one goes on).",
)
OWN = sorted(set(FLAGS) - _BEFORE)


def check_flags() -> None:
  """Refuses numbers that the chosen rule does not read."""
  for name, rule in _ONLY.items():
    if FLAGS[name].present and FLAGS.acceptance != rule:
      raise ValueError(f"--{name} is for --acceptance={rule}")
