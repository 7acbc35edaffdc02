"""A bigram model as drafter: samples, and brings weights of its own.

specdec.load("stdlib-11m", drafter="examples/bigram.py:bigram(text=x.txt)")
"""

import pathlib

import jax.numpy as jnp
import numpy as np

from specdec.checkpoints import shipped
from specdec.types import Drafter, DrafterCost, StepCost

_LARGEST = 8192  # tokens of a vocabulary whose table is still small


def bigram(target, shape, text=None, smoothing=0.1):
  """Counts which token follows which in a text, and draws from that.

  Args:
    target: what Setup passes: its tokenizer and vocabulary.
    shape: of the drafts, a chain or a tree.
    text: a file; default the prompts in the package.
    smoothing: added to every count.

  Returns:
    The drafter, and its weights: logits [V, V] of what follows a token.

  Raises:
    ValueError: the vocabulary is too large for a table.
  """
  vocab_size = target.model.vocab_size
  if vocab_size > _LARGEST:
    raise ValueError(f"bigram: {vocab_size} tokens; at most {_LARGEST}")
  text = pathlib.Path(text or shipped.PROMPTS).read_text(encoding="utf-8")
  ids = np.asarray(target.checkpoint.tokenizer.encode(text))
  counts = np.full((vocab_size, vocab_size), smoothing, np.float32)
  np.add.at(counts, (ids[:-1], ids[1:]), 1.0)

  def init(params, context, prefill_output):
    return None

  def run(table, tokens, parents, first, need_logits):
    return table, table[tokens]

  def propose(params, draft_state, context):
    table = params.draft
    logits = table[context.pending[:, 0]]
    tree, _ = shape.sample_tree(context, logits, run, table)
    return tree.draft, draft_state

  def update(params, draft_state, *observed):
    return draft_state

  spec = shape.spec._replace(name="bigram")
  step = StepCost(logits=vocab_size)  # a row of the table for every token
  cost = DrafterCost(weight_bytes=counts.nbytes, step=step)
  return Drafter(spec, init, propose, update, cost), jnp.log(counts)
