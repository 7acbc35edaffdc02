"""Parts that do not fit together are refused, in words."""

import jax
import numpy as np
import pytest

from specdec import acceptance, decode, drafters, sampling
from specdec.models import table
from specdec.types import Params

V = 5
PROMPT = np.zeros((2, 9), int)


def arguments(draft_vocabulary=V, max_length=12):
  params = Params(
    *(
      table.init_params(jax.random.key(0), size)
      for size in (V, draft_vocabulary)
    )
  )
  positional = (params, PROMPT, np.full(2, 9), jax.random.key(0))
  settings = sampling.settings(2, 1.0)
  return positional, {"max_length": max_length, "sampling": settings}


@pytest.mark.parametrize("size", [V - 1, V + 1])
def test_b23_two_vocabularies_are_refused(size):
  positional, options = arguments(size)
  drafter = drafters.model(table.model(size), 2)
  with pytest.raises(ValueError, match="share one vocabulary"):
    decode.generate(
      table.model(V), drafter, acceptance.rejection(), *positional, **options
    )


def test_siblings_that_the_rule_does_not_know_are_refused():
  positional, options = arguments()
  picky = acceptance.rejection()._replace(siblings=frozenset({"iid"}))
  with pytest.raises(ValueError, match="this rule is right for iid"):
    decode.generate(
      table.model(V), drafters.lookup(2), picky, *positional, **options
    )


def test_a_prompt_longer_than_the_buffer_is_refused():
  positional, options = arguments(max_length=8)
  with pytest.raises(ValueError, match="max_length must be at least as long"):
    decode.autoregress(table.model(V), *positional, **options)


@pytest.mark.parametrize("widths", [(), (2,), (3, 1), (0, 3), (1, 1, 3)])
def test_widths_that_make_no_sense_are_refused(widths):
  positional, options = arguments()
  drafter = drafters.lookup(2)
  drafter = drafter._replace(spec=drafter.spec._replace(widths=widths))
  with pytest.raises(ValueError, match="widths = "):
    decode.generate(
      table.model(V), drafter, acceptance.coupled(), *positional, **options
    )
