"""One definition of every acceptance quantity, from the counts of decoding.

Definitions, over all rows given:
  tokens_per_pass: emitted tokens / target passes; 1 for plain decoding.
  acceptance_by_position[d]: of the rounds that drafted a token at position
    d + 1, the share that accepted it (and so all before it). Positions behind
    an EOS or the length limit are not counted.
  accepted_per_drafted: accepted tokens / drafted tokens that were verified.
"""

from collections.abc import Sequence

import numpy as np

from specdec.types import Stats


def acceptance(stats: Sequence[Stats]) -> dict:
  """The quantities above of one or several batches; None where undefined."""
  rounds = sum(int(np.sum(s.rounds)) for s in stats)
  accepted = sum(np.sum(s.accepted, axis=0) for s in stats)
  drafted = sum(np.sum(s.drafted, axis=0) for s in stats)
  nodes = sum(int(np.sum(s.nodes)) for s in stats)
  total = int(np.sum(accepted))
  emitted = sum(int(np.sum(s.emitted)) for s in stats)
  return {
    "tokens_per_pass": emitted / rounds if rounds else None,
    "acceptance_by_position": [
      float(a / d) if d else None for a, d in zip(accepted, drafted)
    ],
    "accepted_per_drafted": total / nodes if nodes else None,
    "target_passes": rounds,
  }
