"""Arrays in huge pages."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.models import layouts
from specdec.utils import huge_pages


def bytes_in_huge_pages(array: jax.Array) -> int:
  """Those of the mapping that an array lies in."""
  address, inside = array.unsafe_buffer_pointer(), False
  for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
    if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
      inside = int(match[1], 16) <= address < int(match[2], 16)
    elif inside and line.startswith("AnonHugePages:"):
      return 1024 * int(line.split()[1])
  return 0


def supported() -> bool:
  try:
    array = jnp.ones((8 << 20,), jnp.float32)
    huge_pages.collapse(jax.block_until_ready(array))
    return bytes_in_huge_pages(array) > 0
  except OSError:
    return False


@pytest.mark.skipif(not supported(), reason="no huge pages on demand here")
def test_packed_weights_lie_in_huge_pages():
  weight = jnp.arange(2048.0 * 4096).reshape(2048, 4096)
  expected = np.array(weight)
  packed = layouts.pack({"q": {"weight": weight}}, "cpu")["q"]["weight"]
  assert bytes_in_huge_pages(packed) >= 0.8 * packed.nbytes
  np.testing.assert_array_equal(layouts.unpack(packed), expected)


def test_what_cannot_be_done_is_left():
  huge_pages.collapse(jnp.ones((3,)))  # far below a page
  jax.jit(lambda x: huge_pages.collapse(x))(jnp.ones((1 << 20,)))
