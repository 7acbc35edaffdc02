"""Trains a language model, or distils a draft model from its target.

Invariant: everything that can be refused is refused before the run's folder is
written.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from specdec import checkpoints, drafters, sharding
from specdec.checkpoints import Checkpoint, Tokenizer
from specdec.checkpoints.fetch import fetch
from specdec.compiled import memory_plan
from specdec.models import params as model_params
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.sharding import Placement
from specdec.training import (
  data,
  evaluate,
  loop,
  masked,
  placing,
  run,
  samples,
  saving,
)
from specdec.training.objective import (
  Objective,
  distillation,
  language_model,
)
from specdec.training.setup import ModelSetup
from specdec.types import Model, Params, PyTree
from specdec.utils import run_folder

_SIZE = 2048  # of square matrices that exceed every cache


@dataclasses.dataclass(frozen=True)
class Task:
  """A model to train, its texts, and the target that it is distilled from."""

  setup: ModelSetup
  tokenizer: Tokenizer
  placement: Placement | None  # of the weights on a mesh
  params: PyTree  # initial weights
  data: data.Sequences
  held_out: data.Sequences
  objective: Objective
  target: Checkpoint | None = None
  target_model: Model | None = None
  decode: Callable[[PyTree], dict] | None = None  # acceptance of weights

  @property
  def frozen(self) -> PyTree | None:
    """Weights that the objective uses but does not train."""
    return self.target and self.target.params

  def train(self, folder: Path) -> None:
    """Trains, resuming the run if `folder` has a part of it.

    Raises:
      ValueError: the folder holds another run.
    """
    setup, place, frozen = self.setup, self.placement, self.frozen
    texts = self.data, self.held_out
    run.claim(
      folder,
      run.settings(setup, texts, target=frozen, first_weights=self.params),
    )
    packed = samples.of_target(
      setup.samples, self.data, self.target_model, frozen, setup.options, folder
    )
    if setup.masks:  # which slots are trained is drawn
      packed = data.Numbered(packed)
    size = f"{setup.model.num_parameters / 1e6:.2f} M parameters"
    run.announce(size, setup.options, packed)
    run.train(
      self.params,
      frozen,
      self.objective,
      packed,
      self.held_out,
      setup.options,
      folder,
      export=lambda weights, name: saving.export_model(
        folder / name, weights, setup.model, self.tokenizer
      ),
      decode=self.decode,
      where=place and model_params.shardings(setup.model, place),
    )

  def time_steps(self, repeats: int) -> tuple[float, float, float, float]:
    """Times training steps, without a mesh, and matrix products in turns.

    Args:
      repeats: timed steps; each is followed by five products. Neither includes
        compilation.

    Returns:
      Of the median step: seconds, tokens per second, FLOP/s; and FLOP/s of the
      median product of two square float32 matrices.
    """
    options, config = self.setup.options, self.setup.model
    optimizer = loop.make_optimizer(options)
    step = loop.make_step(self.objective, optimizer, options)
    state = loop.init(self.params, optimizer)
    batch = jax.tree.map(jnp.asarray, self.data.batch(0, options.batch))
    square = jnp.ones((_SIZE, _SIZE), jnp.float32)
    product = jax.jit(jnp.matmul)

    def timed(function, *arguments):
      begin = time.perf_counter()
      result = jax.block_until_ready(function(*arguments))
      return result, time.perf_counter() - begin

    steps, products = [], []
    for repeat in range(repeats + 1):
      (state, _), step_seconds = timed(step, state, self.frozen, batch)
      product_seconds = [timed(product, square, square)[1] for _ in range(5)]
      if repeat:  # the first one compiles
        steps.append(step_seconds)
        products += product_seconds
    seconds, length = statistics.median(steps), options.sequence
    rate = options.batch * length / seconds

    def multiplications(config: TransformerConfig) -> int:
      """Of a token in a forward pass: weights, and causal attention's."""
      heads = config.num_attention_layers * config.num_heads
      return config.num_parameters + heads * config.head_dim * length

    flops = 6 * multiplications(config)  # forward and backward
    if self.target is not None:
      flops += 2 * multiplications(self.target.config)
    product_flops = 2 * _SIZE**3 / statistics.median(products)
    return seconds, rate, flops * rate, product_flops


def load(
  setup: ModelSetup, mesh: str | None = None, draft_ways: int | None = None
) -> Task:
  """Reads texts and weights and checks that they go together.

  Args:
    mesh: 'data:N,model:M' (sharding.parse); None: one copy of the weights on
      each device.
    draft_ways: in distillation, how many devices of the M share the weights of
      the draft.

  Raises:
    ValueError: the config, the texts and the models do not go together.
    FileNotFoundError: a text or a model is not there.
    MemoryError: it would not fit.
  """
  tokenizer = data.load_tokenizer(setup.tokenizer, setup.model.vocab_size)
  texts = data.load(
    setup.data,
    setup.held_out,
    setup.options,
    tokenizer,
    setup.model.first_token,
  )
  samples.check(setup.samples, texts[0])
  place, target_place = _placements(setup, mesh, draft_ways)
  model = transformer.model(setup.model, place)
  trained = transformer.model(setup.options.in_dtype(setup.model), place)
  params = _initial_weights(setup, place)
  if not setup.target:
    objective = language_model(trained)
    return Task(setup, tokenizer, place, params, *texts, objective)
  target = checkpoints.load(fetch(setup.target), place=target_place)
  checkpoints.check_vocabulary(
    target.config.vocab_size,
    setup.model.vocab_size,
    target.tokenizer,
    tokenizer,
  )
  target_model = transformer.model(target.config, target_place)
  teacher = transformer.model(
    setup.options.in_dtype(target.config), target_place
  )
  if setup.masks:
    mask_token = setup.model.mask_token
    drafter = drafters.pard(model, mask_token, setup.decoding.k)
    objective = masked.distillation(
      trained,
      teacher,
      setup.loss,
      setup.masks,
      mask_token,
      setup.options.seed,
    )
  else:
    drafter = drafters.model(model, setup.decoding.k)
    objective = distillation(trained, teacher, setup.loss)
  measure = evaluate.acceptance_by_decoding(
    target_model,
    drafter,
    texts[1],
    setup.decoding,
    tokenizer.eos_ids if target_model.encode else (),
  )
  return Task(
    setup,
    tokenizer,
    place,
    params,
    *texts,
    objective,
    target,
    target_model,
    lambda weights: measure(Params(target.params, weights)),
  )


def _placements(
  setup: ModelSetup, mesh: str | None, draft_ways: int | None
) -> tuple[Placement | None, Placement | None]:
  """Places the model, and the target that it is distilled from; checks memory.

  Returns:
    Two placements; None without a mesh or without a target.
  """
  target, place, target_place = None, None, None
  if setup.target:
    target = checkpoints.inspect(fetch(setup.target))
  if mesh is not None and target:
    target_place, place = sharding.places(
      mesh, target.counts, setup.model.counts, draft_ways
    )
  elif mesh is not None:
    place = sharding.places(mesh, setup.model.counts).target
  if place:
    placing.check_rows(mesh, place, setup.options)
  plan = memory_plan.training(
    memory_plan.weight_bytes(setup.model, place),
    memory_plan.weight_bytes(target, target_place) if target else 0,
  )
  placing.check_memory(plan, place)
  return place, target_place


def _initial_weights(setup: ModelSetup, place: Placement | None) -> PyTree:
  """Returns random weights, or those of the checkpoint `start`, which may have
  another mask token or none."""
  if not setup.start:
    return checkpoints.random_checkpoint(
      setup.model, setup.options.seed, place=place
    ).params
  start = checkpoints.load(fetch(setup.start), place=place)
  run_folder.check_same(
    "start is of another shape",
    dataclasses.asdict(start.config) | {"mask_token": setup.model.mask_token},
    dataclasses.asdict(setup.model),
  )
  return start.params
