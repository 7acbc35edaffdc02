"""Times the parts of a round: passes of n tokens, warps, acceptance.

  python scripts/steps.py                        # SmolLM2-135M's shape
  python scripts/steps.py --target=DIR --slots=1024

Prints medians in ms (with the lowest), the read bandwidth of this machine
measured just before, and the machine's load. Weights are as the checkpoint's;
their values do not matter here.
"""

import logging
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from specdec import accept, acceptance, checkpoints, sampling, tree
from specdec.checkpoints.fetch import fetch
from specdec.models import transformer
from specdec.types import Draft

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "Model.")
_SLOTS = flags.DEFINE_integer("slots", 512, "Cache slots.")
_REPEATS = flags.DEFINE_integer("repeats", 30, "Runs of each part.")
_WIDTHS = flags.DEFINE_multi_integer("n", [1, 2, 4, 6, 8, 16], "Tokens a pass.")


def timed(function, *arguments, carry=None) -> tuple[float, float]:
  """Median and least ms; `carry` is donated and the last result fed back."""
  seconds = []
  for _ in range(_REPEATS.value + 3):
    begin = time.perf_counter()
    if carry is None:
      jax.block_until_ready(function(*arguments))
    else:
      result, carry = function(*arguments, carry)
      jax.block_until_ready(result)
    seconds.append(time.perf_counter() - begin)
  return 1e3 * float(np.median(seconds[3:])), 1e3 * min(seconds[3:])


def read_bandwidth() -> float:
  """GB/s of one product of a large matrix and a vector."""
  matrix = jnp.ones((1 << 17, 1 << 11))  # 1 GiB
  _, least = timed(jax.jit(jnp.dot), matrix, jnp.ones((1 << 11,)))
  return matrix.nbytes / least / 1e6


def passes(model, params) -> float:
  """Prints T(n); returns that of 8 tokens."""
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  step = jax.jit(lambda p, t, c: model.apply(p, t, c), donate_argnums=2)
  first = eight = None
  for n in _WIDTHS.value:
    cache = model.init_cache(1, _SLOTS.value)
    cache = cache.replace(length=jnp.array([_SLOTS.value - 32]))
    tokens = jnp.zeros((1, n), jnp.int32)
    begin = time.perf_counter()
    step.lower(params, tokens, cache).compile()
    compiled = time.perf_counter() - begin
    median, least = timed(step, params, tokens, carry=cache)
    first = first or median
    eight = median if n == 8 else eight
    print(
      f"pass of {n:2d}: {median:6.2f} ms (least {least:.2f}), "
      f"{median / first:.2f} x one, {size / median / 1e6:.1f} GB/s, "
      f"compiled in {compiled:.1f} s"
    )
  return eight or first


def acceptance_parts(vocab_size: int, whole: float, nodes: int = 8) -> None:
  """Prints what accepting `nodes` nodes costs, as a share of their pass."""
  key = jax.random.key(0)
  logits = 3 * jax.random.normal(key, (1, nodes, vocab_size))
  drawn = jax.nn.log_softmax(
    3 * jax.random.normal(jax.random.fold_in(key, 1), logits.shape)
  )
  best = jnp.argmax(logits, -1).astype(jnp.int32)
  tokens = jnp.roll(best, 1, axis=1)  # every guess is the likeliest token
  keys = sampling.row_keys(key, jnp.arange(1))

  def show(name, result):
    print(f"{name}: {result[0]:.2f} ms, {100 * result[0] / whole:.1f} %")

  def step(rule, temperature, with_law):
    settings = sampling.settings(1, temperature)

    def run(logits, tokens, drawn):
      noise = sampling.Noise(
        keys,
        jnp.array([5]),
        vocab_size,
        rule.walk == "coupled",
        jnp.any(settings.temperature > 0),
      )
      law = sampling.warp(logits, settings)
      draft = Draft(
        tokens, tree.chain(nodes), drawn if with_law else None, jnp.array([8])
      )
      return accept.accept_step(rule, draft, logits, law, noise, nodes - 1)

    return timed(jax.jit(run), logits, tokens, drawn)

  show("accept, greedy, T = 0", step(acceptance.greedy(), 0.0, False))
  show("accept, coupled, T = 0", step(acceptance.coupled(), 0.0, False))
  show("accept, coupled, T = 1", step(acceptance.coupled(), 1.0, True))
  show("accept, rejection, T = 1", step(acceptance.rejection(), 1.0, True))
  for name, options in (
    ("top-p 0.9", {"top_p": 0.9}),
    ("top-k 50", {"top_k": 50}),
  ):
    settings = sampling.settings(1, 1.0, **options)
    warp = jax.jit(lambda x, s=settings: sampling.warp(x, s))
    show(f"warp, {name}", timed(warp, logits))


def main(argv):
  del argv
  loaded = checkpoints.load(fetch(_TARGET.value)).packed()
  print(
    f"jax {jax.__version__}, {jax.devices()[0].device_kind}, load "
    f"{os.getloadavg()[0]:.2f}, {_SLOTS.value} slots, batch 1, float32"
  )
  bandwidth = read_bandwidth()
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
  print(
    f"reads {bandwidth:.1f} GB/s: the roof of one token is "
    f"{size / bandwidth / 1e6:.1f} ms"
  )
  model = transformer.model(loaded.config)
  whole = passes(model, loaded.params)
  acceptance_parts(loaded.config.vocab_size, whole)
  print(f"reads {read_bandwidth():.1f} GB/s afterwards")


if __name__ == "__main__":
  # Which backends are absent is no news to whoever runs this.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  app.run(main)
