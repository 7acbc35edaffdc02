"""Held-out loss of a smoothed 3-gram model: what a trained one must beat.

  python scripts/ngram_baseline.py --tokenizer=tokenizer --data=corpus/train \\
    --held_out=corpus/held_out

In nats a token, over every token of the held-out text but the first two.
"""

import sys

from absl import app, flags

from specdec import checkpoints
from specdec.checkpoints.fetch import fetch
from specdec.training import data, ngram

_TOKENIZER = flags.DEFINE_string(
  "tokenizer", None, "Whose tokens, named like --target.", required=True
)
_DATA = flags.DEFINE_string("data", None, "Text to count.", required=True)
_HELD_OUT = flags.DEFINE_string(
  "held_out", None, "Text to be judged by.", required=True
)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  try:
    tokenizer = checkpoints.load_tokenizer(fetch(_TOKENIZER.value))
    counted, judged = (
      data.tokenize(data.read(path), tokenizer)
      for path in (_DATA.value, _HELD_OUT.value)
    )
    model = ngram.Trigram(counted, tokenizer.vocab_size)
  except (ValueError, FileNotFoundError) as error:
    sys.exit(f"ngram_baseline: {error}")
  loss = -model.log_probs(judged).mean()
  print(f"{loss:.4f} nats a token over {len(judged) - 2:,} tokens")


if __name__ == "__main__":
  app.run(main)
