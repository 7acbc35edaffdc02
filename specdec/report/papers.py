"""Formats the founding papers' tables in Markdown, with ours recomputed."""

from specdec.roofline import papers


def _table(header: list[str], lines) -> str:
  rows = [header, ["---"] * len(header), *lines]
  return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def tables() -> str:
  """Returns every table of specdec.roofline.papers."""
  free = _table(
    ["alpha", "k", "operations", "printed", "speed", "printed"],
    [
      [x.alpha, x.k, f"{x.ours()[0]:.2f}", x.operations, f"{x.ours()[1]:.2f}"]
      + [x.speed]
      for x in papers.LEVIATHAN_1
    ],
  )
  decoded = _table(
    ["task", "draft", "T", "k", "alpha", "c", "predicted here", "alpha and c "
     "unrounded", "printed", "measured", "measured / printed"],
    [
      [x.task, x.draft, x.temperature, x.k, x.alpha, x.cost, f"{x.ours():.2f}"]
      + ["{:.2f} to {:.2f}".format(*x.span()), x.predicted, x.measured]
      + [f"{x.measured / x.predicted:.2f}"]
      for x in papers.LEVIATHAN_2
    ],
  )  # fmt: skip
  sampled = _table(
    ["benchmark", "ms a token", "tokens a round", "alpha implied", "speedup "
     "here", "printed"],
    [
      [x.benchmark, x.milliseconds, f"{x.tokens():.2f}", f"{x.alpha():.3f}"]
      + [f"{x.ours():.2f}", x.speedup]
      for x in papers.CHEN
    ],
  )  # fmt: skip
  steps = _table(
    ["batch", "ms a step", "printed", "tokens/s", "printed",
     "ms with collectives"],
    [
      [x.batch, f"{x.ours():.2f}", x.milliseconds]
      + [f"{1e3 * x.batch / x.ours():.0f}", x.tokens_per_second]
      + [f"{x.ours(collectives=True):.2f}"]
      for x in papers.SCALING_BOOK
    ],
  )  # fmt: skip
  low, high = papers.worst()
  return "\n\n".join(
    [
      "Leviathan et al. (arXiv:2211.17192), table 1: a draft that costs "
      "nothing",
      free,
      "Table 2: T5-XXL on one TPU v4, batch 1",
      decoded,
      f"Measured over printed prediction: {low:.2f} to {high:.2f}.",
      "Chen et al. (arXiv:2302.01318): Chinchilla 70B and its 4B draft, K = 4, "
      "14.1 and 1.8 ms a token",
      sampled,
      "The scaling book: 13 B weights in bfloat16 on 8 TPU v5e, 8192 tokens",
      steps,
    ]
  )
