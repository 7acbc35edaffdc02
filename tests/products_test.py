"""FLOPs of compiled products, in loops as often as they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.compiled import hlo, products


def counted(f, *shapes):
  """(flops of its program, XLA's own count)."""
  compiled = jax.jit(f).lower(*map(jnp.ones, shapes)).compile()
  ours = products.flops(hlo.Program(compiled.as_text()))
  return ours, compiled.cost_analysis()["flops"]


def test_a_loop_counts_as_often_as_it_runs():
  def f(x, w):
    return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)

  ours, of_xla = counted(f, (8, 64), (64, 64))
  assert ours == 5 * 2 * 8 * 64 * 64
  assert of_xla < ours / 4  # once, with what is not a product


def test_batches_and_convolutions():
  ours, _ = counted(
    lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k),
    (2, 3, 4, 16),
    (2, 3, 5, 16),
  )
  assert ours == 2 * 2 * 3 * 4 * 5 * 16
  ours, of_xla = counted(
    lambda x, k: jax.lax.conv_general_dilated(
      x, k, (2,), "SAME", dimension_numbers=("NCH", "OIH", "NCH")
    ),
    (2, 3, 9),
    (7, 3, 4),
  )
  assert ours == of_xla > 0


# As a TPU computes the products of two batches of 4 x 16 and 16 x 5: padded
# windows, of which each meets the batch of its own.
BATCHED = """\
ENTRY %main (a: bf16[2,4,16], b: bf16[2,16,5]) -> f32[2,4,5] {
  %a = bf16[2,4,16]{2,1,0} parameter(0)
  %b = bf16[2,16,5]{2,1,0} parameter(1)
  ROOT %products = f32[2,4,5]{2,1,0} convolution(%a, %b), window={size=2 stride=1 pad=1_1 lhs_dilate=2 rhs_reversal=1}, dim_labels=0bf_0io->0bf
}
"""  # noqa: E501


@pytest.mark.parametrize("stride, pairs", [(1, 2), (4, 1)])
def test_windows_over_a_spread_batch(stride, pairs):
  text = BATCHED.replace("stride=1", f"stride={stride}")
  places = stride * np.arange(2)[:, None] + np.arange(2) - 1
  assert pairs == np.sum((places >= 0) & (places <= 2) & (places % 2 == 0))
  assert products.flops(hlo.Program(text)) == pairs * 2 * 4 * 5 * 16
