"""The parts that the shared flags choose: models, drafter, rule, decoder."""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import _flags
import _mesh
import _skips
import jax
from _flags import PRESET, SHARED
from _rules import RULES
from absl import flags

from specdec import checkpoints, draft_shape, drafters
from specdec.benchmark import provenance
from specdec.benchmark.decoder import Decoder
from specdec.checkpoints import learned as saved
from specdec.checkpoints import shipped
from specdec.checkpoints.fetch import fetch
from specdec.checkpoints.learned import Learned
from specdec.compiled import memory_plan
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve, size
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import layouts, presets, transformer
from specdec.models.config import TransformerConfig
from specdec.noise import pilot_key
from specdec.sharding import Places
from specdec.types import (
  NO_COST,
  AcceptanceRule,
  Drafter,
  DrafterCost,
  Model,
  Params,
)
from specdec.utils import terminal
from specdec.utils.spelling import choices

FLAGS = flags.FLAGS
_MANY = 32  # rows that weights are read for better as they are than packed


class Models(NamedTuple):
  """What was loaded, and where on a mesh it lies."""

  target: checkpoints.Checkpoint
  draft: checkpoints.Checkpoint | None
  places: Places | None = None
  learned: Learned | None = None  # its weights ready to run

  @property
  def target_model(self) -> Model:
    place = self.places and self.places.target
    return transformer.model(self.target.config, place)

  @property
  def draft_model(self) -> Model:
    place = self.places and self.places.draft
    return transformer.model(self.draft.config, place)

  @property
  def configs(self) -> list[TransformerConfig]:
    return [m.config for m in (self.target, self.draft) if m]

  @property
  def params(self) -> Params:
    if self.learned:
      return Params(self.target.params, self.learned.net)
    return Params(self.target.params, self.draft and self.draft.params)


def rule() -> AcceptanceRule:
  """The acceptance rule."""
  return RULES[FLAGS.acceptance]()


def comparable() -> bool:
  """Whether the text should equal the autoregressive one, token for token."""
  if not rule().lossless:
    return False
  return FLAGS.temperature == 0 or FLAGS.acceptance == "coupled"


def caveats() -> list[str]:
  """What must be said wherever the results are printed."""
  found = [rule().caveat] if rule().caveat else []
  if FLAGS.random_weights:
    found.append("random weights: nothing follows for a trained model's text")
  return found


def source_of(flag: str):
  """What --target or --draft names: a path, or a preset as it stands."""
  name = getattr(FLAGS, flag)
  try:
    return name if name.startswith(PRESET) else fetch(name)
  except FileNotFoundError as error:
    raise FileNotFoundError(f"--{flag}: {error}") from error


def load(max_length: int) -> Models:
  """Target and draft, what they need of memory checked first.

  Args:
    max_length: prompt and output of a row, as far as they are known.
  """
  sources = [
    source_of(name) for name in ("target", "draft") if FLAGS[name].value
  ]
  shapes = [shape_of(source) for source in sources]
  if FLAGS.random_weights and len(shapes) > 1:
    shapes[1] = dataclasses.replace(shapes[1], vocab_size=shapes[0].vocab_size)
  if FLAGS.drafter == "early_exit":  # is there such a layer?
    drafters.early_exit(transformer.model(shapes[0]), FLAGS.exit_layer, 0)
  if FLAGS.learned:
    _check_learned(saved.inspect(_learned_file()), shapes[0])
  if FLAGS.drafter == "layer_skip":
    drafters.layer_skip(transformer.model(shapes[0]), _skips.skip(), 0)
  places = _mesh.places(*[*shapes, None][:2], whole=bool(FLAGS.learned))
  check_memory(shapes, max_length, places=places, loaded=False)
  where = places or (None, None)
  if FLAGS.random_weights:
    text = f"random weights for {', '.join(map(str, sources))}"
    terminal.report(text, file=sys.stderr)
    models = [
      checkpoints.random_checkpoint(shape, FLAGS.seed + i, str(source), place)
      for i, (shape, source, place) in enumerate(zip(shapes, sources, where))
    ]
  else:
    text = f"loading {', '.join(map(str, sources))}"
    terminal.report(text, file=sys.stderr)
    draft = sources[1] if FLAGS.draft else None
    models = checkpoints.load_pair(sources[0], draft, FLAGS.dtype, where)
  target, draft = [*models, None][:2]
  check_chat(target)
  learned = _load_learned(target, places) if FLAGS.learned else None
  if places:
    return Models(target, draft, places, learned)
  return Models(target.packed(), draft and draft.packed(), learned=learned)


def load_target(max_length: int) -> Models:
  """The target alone, not packed, for a program that loads drafters itself."""
  source = source_of("target")
  check_memory([shape_of(source)], max_length, loaded=False)
  target = checkpoints.load(source, FLAGS.dtype)
  check_chat(target)
  return Models(target, None)


def check_chat(target: checkpoints.Checkpoint) -> None:
  """Raises ValueError where --chat asks for a template that is not there."""
  text = target.tokenizer
  if FLAGS.chat and (text is None or text.chat_template is None):
    raise ValueError(
      f"--chat: {FLAGS.target} has no chat template; leave --chat out, or take "
      "a model that was trained to chat"
    )


def load_baseline(max_length: int) -> Models:
  """Loads the target alone, packed where that is faster."""
  models = load_target(max_length)
  if _flags.single("batch") >= _MANY:
    return models
  return models._replace(target=models.target.packed())


def _check_learned(head_config: HeadConfig, target: TransformerConfig) -> None:
  """Refuses ks that a drafter has no heads for, and other targets' shapes."""
  try:
    head_config.check(target)
  except ValueError as error:
    raise ValueError(
      f"--learned={FLAGS.learned} does not fit --target={FLAGS.target}: {error}"
    ) from error
  if head_config.exits and FLAGS.copy_first:
    raise ValueError(
      f"--copy_first: {FLAGS.learned} is an early exit, whose verification "
      "goes on from its own draft tokens"
    )
  most = head_config.most_levels
  if most is None:
    return
  if max(FLAGS.k, default=0) > most:
    raise ValueError(
      f"--k={max(FLAGS.k)}; {FLAGS.learned} has {most} heads, one a draft token"
    )
  if "most_k" in FLAGS:  # --k=auto
    FLAGS.most_k = min(FLAGS.most_k, most)


def _learned_file() -> pathlib.Path:
  try:
    return shipped.drafter(FLAGS.learned)
  except FileNotFoundError as error:
    raise FileNotFoundError(f"--learned: {error}") from error


def _load_learned(target, places: Places | None) -> Learned:
  """The drafter of --learned, its weights as Params.draft wants them."""
  path = _learned_file()
  # Random weights have no drafter of their own: any of that shape will do.
  found = saved.load(path, target, trained=not FLAGS.random_weights)
  weights = draft_heads.weights_of(
    found.draft_head(target.config), found.net, target.params
  )
  if places is None:
    return found._replace(net=layouts.pack(weights))
  whole = places.target.sharding(())
  return found._replace(net=jax.device_put(weights, whole))


def shape_of(source):
  """A preset's config, or a checkpoint's; no weight is read."""
  if not str(source).startswith(PRESET):
    return checkpoints.inspect(source, FLAGS.dtype)
  shape = presets.get(source.removeprefix(PRESET), FLAGS.dtype)
  if not FLAGS.random_weights:
    raise ValueError(f"{source} is a shape alone; add --random_weights")
  return shape


def check_memory(
  shapes,
  max_length: int,
  num_nodes: int = 1,
  places: Places | None = None,
  loaded: bool = True,
  show: bool = False,
) -> None:
  """Refuses what cannot fit, by the largest batch and k (and, in bench, pass)
  that are asked for.

  Args:
    loaded: the weights are there already.
    show: print the plan; it is printed in any case before anything is loaded.
  """
  widest = max(
    num_nodes,
    *map(_flags.num_nodes, FLAGS.k),
    *((FLAGS.most_k + 1,) if not FLAGS.k else ()),  # --k=auto
    *(FLAGS.passes if "passes" in FLAGS else ()),
  )
  cost = NO_COST
  if FLAGS.learned:
    path = _learned_file()
    stored = path.stat().st_size
    head_config = saved.inspect(path)
    cost = DrafterCost(
      weight_bytes=2 * stored,  # stored as bfloat16, run as float32
      position_bytes=size.serving_bytes(head_config, shapes[0], 1, 1),
    )
  found = memory_plan.plan(
    shapes[0],
    shapes[1] if len(shapes) > 1 else None,
    batch=max(FLAGS.batch),
    max_length=max_length,
    num_nodes=widest,
    places=places,
    drafter=cost,
    prompt_size=max_length - FLAGS.max_new_tokens,
    random_weights=FLAGS.random_weights and not loaded,
    cpu=jax.default_backend() == "cpu",
  )
  if show or not loaded:
    terminal.report(f"memory on each device: {found}", file=sys.stderr)
  memory_plan.check(
    found.excluding_weights if loaded else found, places and places[0]
  )


def drafter(models: Models, k: int) -> Drafter:
  """The drafter, for rounds of k levels."""
  return make_drafter(models, k, _flags.expansion(k))


def make_drafter(
  models: Models, k: int, shape: draft_shape.DraftShape | None
) -> Drafter:
  """The same, for any shape; None for a chain."""
  shape = shape or draft_shape.chain(k)
  if FLAGS.drafter == "model":
    return drafters.model(models.draft_model, shape=shape)
  if FLAGS.drafter == "early_exit":
    return drafters.early_exit(
      models.target_model, FLAGS.exit_layer, shape=shape
    )
  if FLAGS.drafter == "learned":
    places = models.places or Places(None, None)
    draft_head = models.learned.draft_head(models.target.config, places.draft)
    learned = serve.drafter(
      draft_head,
      models.target_model,
      shape,
      places.target,
      FLAGS.copy_first,
    )
    if not FLAGS.copy_first:
      return learned
    return drafters.fallback(_lookup(FLAGS.copy_first), learned)
  if FLAGS.drafter == "layer_skip":
    threshold = _skips.threshold() if shape.loops else None
    return drafters.layer_skip(
      models.target_model, _skips.skip(), threshold=threshold, shape=shape
    )
  if FLAGS.drafter == "lookup":
    return _lookup(k)
  raise _unknown_drafter()


def _unknown_drafter() -> ValueError:
  """Returns the error that lists the drafters."""
  known = choices(FLAGS.drafter, _flags.DRAFTERS)
  return ValueError(f"--drafter={FLAGS.drafter}; {known}")


def _lookup(k: int) -> Drafter:
  return drafters.lookup(k, ngram=FLAGS.ngram, min_ngram=FLAGS.min_ngram)


def make_decoder(
  models: Models,
  k: int,
  batch: int,
  prompt_size: int,
  eos_ids: Sequence[int],
  pilot: bool = False,
) -> Decoder:
  """Builds the decoder of one shape, not yet compiled."""
  made = drafter(models, k)
  return decoder_of(models, made, rule(), batch, prompt_size, eos_ids, pilot)


def decoder_of(
  models: Models,
  drafter: Drafter,
  rule: AcceptanceRule,
  batch: int,
  prompt_size: int,
  eos_ids: Sequence[int],
  pilot: bool = False,
) -> Decoder:
  """The same, for any drafter and rule.

  Args:
    pilot: it decides how another one decodes: it has noise of its own.
  """
  key = jax.random.key(FLAGS.seed)
  return Decoder(
    models.target_model,
    drafter,
    rule,
    models.params,
    key=pilot_key(key) if pilot else key,
    batch=batch,
    prompt_size=prompt_size,
    max_new_tokens=FLAGS.max_new_tokens,
    eos_ids=eos_ids,
    temperature=FLAGS.temperature,
    top_k=FLAGS.top_k,
    top_p=FLAGS.top_p,
    places=models.places,
  )


def describe_drafter() -> str:
  """A few words for tables and pages."""
  shape = "" if FLAGS.shape == "chain" else f", {FLAGS.shape}"
  if FLAGS.drafter == "model":
    return FLAGS.draft + shape
  if FLAGS.drafter == "learned":
    if FLAGS.copy_first:
      shape += f", behind copies of {FLAGS.copy_first}"
    return f"{FLAGS.learned}{shape}"
  if FLAGS.drafter == "early_exit":
    return f"early exit after layer {FLAGS.exit_layer}{shape}"
  if FLAGS.drafter == "layer_skip":
    return _skips.describe() + shape
  if FLAGS.drafter == "lookup":
    return f"lookup, {FLAGS.min_ngram} to {FLAGS.ngram} tokens"
  raise _unknown_drafter()


def header(own_flags: Sequence[str] = ()) -> dict:
  """The head of a JSON document."""
  names = [n for n in [*SHARED, *own_flags] if n != "json"]
  settings = {name: getattr(FLAGS, name) for name in names}
  return provenance.header(settings, caveats())
