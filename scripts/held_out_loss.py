"""Held-out loss of models, and of a smoothed 3-gram that they must beat.

  python scripts/held_out_loss.py --model=stdlib-11m --model=stdlib-1m \\
    --data=corpus/train --held_out=corpus/held_out

In nats a token and in bits a byte. Models see the text in pieces of --sequence
tokens; the 3-gram, counted on --data with the first model's tokens, sees all of
it at once.
"""

import math

import _main
import jax
import jax.numpy as jnp
from absl import flags

from specdec import checkpoints
from specdec.checkpoints.fetch import fetch
from specdec.models import transformer
from specdec.training import data, losses, ngram
from specdec.utils import terminal

_MODEL = flags.DEFINE_multi_string(
  "model", [], "Named like --target of generate.py; repeatable."
)
_DATA = flags.DEFINE_string("data", None, "Text that the 3-gram counts.")
_HELD_OUT = flags.DEFINE_string("held_out", None, "Text to be evaluated by.")
_SEQUENCE = flags.DEFINE_integer("sequence", 256, "Tokens that a model sees.")
_ROWS = 8  # sequences of one pass


def model_loss(checkpoint, sequences) -> float:
  """Mean over all positions of [n, T+1] sequences."""
  apply = transformer.model(checkpoint.config).apply

  @jax.jit
  def loss(params, tokens):
    logits = apply(params, tokens[:, :-1], None)[0].logits
    distribution = jax.nn.log_softmax(logits)
    return jnp.mean(losses.cross_entropy(distribution, tokens[:, 1:]))

  total = 0.0
  for first in range(0, len(sequences), _ROWS):
    piece = sequences[first : first + _ROWS]
    total += float(loss(checkpoint.params, jnp.asarray(piece))) * len(piece)
  return total / len(sequences)


def run() -> None:
  """Prints a line a model, and one of the 3-gram."""
  if not (_MODEL.value and _HELD_OUT.value):
    raise ValueError("give --model and --held_out")
  documents = data.read(_HELD_OUT.value)
  size = sum(len(document.text.encode()) for document in documents)
  rows, tokenizer = [], None
  for name in _MODEL.value:
    model = checkpoints.load(fetch(name))
    evaluated = data.tokenize(documents, model.tokenizer)
    tokenizer = tokenizer or model.tokenizer
    packed = data.Packed(evaluated, _SEQUENCE.value)
    found = model_loss(model, packed.evenly_spaced(packed.count))
    rows.append((name, line(found, len(evaluated), size)))
  if _DATA.value:
    counted, evaluated = (
      data.tokenize(texts, tokenizer)
      for texts in (data.read(_DATA.value), documents)
    )
    counts = ngram.Trigram(counted, tokenizer.vocab_size)
    found = -counts.log_probs(evaluated).mean()
    rows.append(("3-gram", line(found, len(evaluated), size)))
  terminal.report(terminal.table(rows))


def line(loss: float, tokens: int, size: int) -> str:
  """A loss in nats a token, said in both units."""
  bits = loss * tokens / size / math.log(2)
  return f"{loss:.3f} nats a token, {bits:.3f} bits a byte"


main = _main.main_of("held_out_loss", run)

if __name__ == "__main__":
  _main.start(main)
