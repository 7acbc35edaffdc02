"""A way of decoding named by a few words, and the one place that loads it.

Drafter, rule and shape are calls written as text (utils/calls.py):

  Setup("stdlib-11m", drafter="model(stdlib-1m)", k=3)
  Setup("stdlib-11m", drafter="lookup(ngram=4) | eagle3(runs/x/best.st)")
  Setup("stdlib-11m", drafter="mine.py:bigram(text=x.txt)", temperature=1.0,
        acceptance="typical(epsilon=0.1)", shape="chains(3)")

A function of somebody's own file returns a `Drafter`, or a pair of it and its
weights, which become `Params.draft`; it is passed what its signature names of
`target` (a `Target`), `shape` (a `DraftShape`), `k` and `max_external_drafts`.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specdec import (
  acceptance,
  checkpoints,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec.benchmark.decoder import PROMPT_STEP, Decoder
from specdec.checkpoints import (
  Checkpoint,
  check_vocabulary,
  inspect,
  random_checkpoint,
  shipped,
)
from specdec.checkpoints import learned as saved
from specdec.checkpoints.fetch import fetch
from specdec.draft_shape import DraftShape
from specdec.drafters.heads import draft_head as heads
from specdec.drafters.heads import serve
from specdec.models import layouts, presets, transformer
from specdec.types import AcceptanceRule, Drafter, Model, Params, PyTree, Skip
from specdec.utils import calls
from specdec.utils.calls import Call
from specdec.utils.spelling import choices

PRESET = "preset:"
_DEFAULT_K = {"lookup": 5, "model": 3, "early_exit": 3, "layer_skip": 3}
_OTHER_K = 4  # of heads, and of drafters of somebody's own


class Target(NamedTuple):
  """The loaded target, as a drafter's function is given it."""

  model: Model
  checkpoint: Checkpoint
  dtype: str
  random_weights: bool
  seed: int


class Weighted(NamedTuple):
  """A drafter and its weights, None where it has none."""

  drafter: Drafter
  params: PyTree = None


# Drafters by name. Each is passed `target`, `shape` and, behind |, how many
# tokens another drafter may draft, if its signature has them.


def _lookup(shape: DraftShape, ngram: int = 5, min_ngram: int = 3) -> Drafter:
  return drafters.lookup(shape=shape, ngram=ngram, min_ngram=min_ngram)


def _model(name: str, target: Target, shape: DraftShape) -> Weighted:
  source = name if name.startswith(PRESET) else fetch(name)
  if target.random_weights:
    size = target.checkpoint.config.vocab_size
    config = dataclasses.replace(shape_of(source, target), vocab_size=size)
    draft = random_checkpoint(config, target.seed + 1, str(source))
  else:
    size = target.checkpoint.config.vocab_size
    check_vocabulary(size, inspect(source, target.dtype).vocab_size)
    draft = checkpoints.load(source, target.dtype)
    check_vocabulary(
      *(size, draft.config.vocab_size),
      *(target.checkpoint.tokenizer, draft.tokenizer),
    )
  draft = draft.packed()
  model = transformer.model(draft.config)
  return Weighted(drafters.model(model, shape=shape), draft.params)


def _early_exit(layer: int, target: Target, shape: DraftShape) -> Drafter:
  return drafters.early_exit(target.model, layer, shape=shape)


def _layer_skip(
  target: Target,
  shape: DraftShape,
  file: str | None = None,
  attention: Sequence[int] = (),
  mlp: Sequence[int] = (),
  threshold: float | None = None,
) -> Drafter:
  if file is not None:
    if attention or mlp:
      raise ValueError("layer_skip: give a file, or attention and mlp")
    document = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
    attention, mlp = document["skip_attention"], document["skip_mlp"]
    if threshold is None:
      threshold = document.get("exit_threshold")
  skip = Skip(tuple(attention), tuple(mlp))
  start = None if threshold is None else drafters.Threshold(threshold)
  return drafters.layer_skip(target.model, skip, shape=shape, threshold=start)


def _head(
  kind: str | None,
  file: str,
  target: Target,
  shape: DraftShape,
  max_external_drafts: int = 0,
) -> Weighted:
  path, checkpoint = shipped.drafter(file), target.checkpoint
  head_config = saved.inspect(path)
  if kind is not None and head_config.kind != kind:
    raise ValueError(f"{file} is a drafter of kind {head_config.kind}")
  learned = saved.load(path, checkpoint, trained=not target.random_weights)
  head = learned.draft_head(checkpoint.config)
  weights = heads.weights_of(head, learned.net, checkpoint.params)
  drafter = serve.drafter(head, target.model, shape, None, max_external_drafts)
  return Weighted(drafter, layouts.pack(weights))


DRAFTERS: Mapping[str, Callable] = {
  "early_exit": _early_exit,
  "layer_skip": _layer_skip,
  "lookup": _lookup,
  "model": _model,
  "head": functools.partial(_head, None),
} | {kind: functools.partial(_head, kind) for kind in drafters.LEARNED}
RULES: Mapping[str, Callable[..., AcceptanceRule]] = {
  name: getattr(acceptance, name) for name in acceptance.__all__
}


def _chains(count: int, k: int, siblings: str, shared: int = 0) -> DraftShape:
  return draft_shape.static(draft_tree.parallel(count, k, shared), siblings)


def _optimal(
  size: int, rank_acceptance: Sequence[float], k: int, siblings: str
) -> DraftShape:
  by_depth = np.tile(np.asarray(rank_acceptance, float), (k, 1))
  paths = draft_tree.optimal(by_depth, size)
  return draft_shape.static(draft_tree.from_paths(paths), siblings)


def _dynamic(size: int, k: int, top: int = 4) -> DraftShape:
  return draft_shape.dynamic(top, k, size)


def _paths(file: str, siblings: str) -> DraftShape:
  paths = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
  return draft_shape.static(draft_tree.from_paths(paths), siblings)


SHAPES: Mapping[str, Callable[..., DraftShape]] = {
  "chain": draft_shape.chain,
  "chains": _chains,
  "dynamic": _dynamic,
  "optimal": _optimal,
  "paths": _paths,
}


def shape_of(source, target: Target):
  """Returns the config of a preset or a checkpoint; reads no weights."""
  if str(source).startswith(PRESET):
    return presets.get(str(source).removeprefix(PRESET), target.dtype)
  return inspect(source, target.dtype)


@dataclasses.dataclass(frozen=True)
class Setup:
  """One way of decoding.

  Attributes:
    target: a directory, a .gguf file, a hub name, a shipped model, or
      preset:NAME with random_weights.
    drafter: a call, or several with | between them: where the first has no
      draft, the second drafts.
    acceptance, shape: calls.
    k: tokens of a chain, levels of a tree; default by the drafter.
    temperature, top_k, top_p: of sampling; 0 is greedy.
    siblings: how a tree's children are drawn; default deterministic at
      temperature 0, iid with kseq, else without_replacement.
    batch: prompts decoded together.
    prompt_size: tokens that the longest prompt may have.
    max_new_tokens: of each row.
    dtype: of weights and caches.
    random_weights: shapes alone are read.
    seed: of all noise.
  """

  target: str = shipped.TARGET
  drafter: str = "lookup"
  acceptance: str = "coupled"
  shape: str = "chain"
  k: int | None = None
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  siblings: str | None = None
  batch: int = 1
  prompt_size: int = 4 * PROMPT_STEP
  max_new_tokens: int = 128
  dtype: str = "float32"
  random_weights: bool = False
  seed: int = 0

  def __post_init__(self):
    for name in ("batch", "prompt_size", "max_new_tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}; it must be >= 1")
    if self.k is not None and self.k < 0:
      raise ValueError(f"k = {self.k}; it must be >= 0")
    sampling.settings(1, self.temperature, self.top_k, self.top_p)
    if self.temperature == 0 and not (self.top_k is self.top_p is None):
      raise ValueError(
        "top_k and top_p filter what is sampled, and temperature = 0 samples "
        "nothing; leave them out, or raise the temperature"
      )
    if len(self._drafters) > 2:
      raise ValueError(f"{self.drafter}: at most two drafters, with one |")
    for call in self._drafters:
      calls.find(call, DRAFTERS)
    self.make_rule()
    if self.levels:
      self.make_shape()

  @classmethod
  def from_config(cls, config: Mapping) -> "Setup":
    """Makes one of a dict or an ml_collections.ConfigDict.

    Raises:
      ValueError: it has an entry that is no field.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    for name in config:
      if name not in names:
        raise ValueError(f"{name} is no setting; {choices(name, names)}")
    return cls(**{name: config[name] for name in config})

  @functools.cached_property
  def _drafters(self) -> list[Call]:
    return calls.parse_all(self.drafter)

  @property
  def levels(self) -> int:
    """Levels of a draft: k, or the drafter's default."""
    if self.k is not None:
      return self.k
    return _DEFAULT_K.get(self._drafters[-1].name, _OTHER_K)

  def make_rule(self) -> AcceptanceRule:
    """Builds the acceptance rule."""
    call = calls.parse(self.acceptance)
    return calls.invoke(call, calls.find(call, RULES), {})

  def make_shape(self) -> DraftShape:
    """Builds the draft's shape."""
    call = calls.parse(self.shape)
    siblings = self.siblings
    if siblings is None:
      siblings = "without_replacement"
      if calls.parse(self.acceptance).name == "kseq":
        siblings = "iid"
      elif self.temperature == 0:
        siblings = "deterministic"
    context = {"k": self.levels, "siblings": siblings}
    return calls.invoke(call, calls.find(call, SHAPES), context)

  def load(self) -> Decoder:
    """Reads the weights and returns the decoder, not yet compiled.

    Raises:
      ValueError: drafter, rule, shape and target do not go together.
      FileNotFoundError: a model or a file is not there.
    """
    target = self._load_target()
    drafter, draft_params = self._make_drafter(target)
    # Packing takes the weights, which drafters may have read before.
    checkpoint = target.checkpoint.packed()
    return Decoder(
      target.model,
      drafter,
      self.make_rule(),
      Params(checkpoint.params, draft_params),
      jax.random.key(self.seed),
      batch=self.batch,
      prompt_size=self.prompt_size,
      max_new_tokens=self.max_new_tokens,
      eos_ids=checkpoint.eos_ids,
      temperature=self.temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      tokenizer=checkpoint.tokenizer,
    )

  def _load_target(self) -> Target:
    blank = Target(None, None, self.dtype, self.random_weights, self.seed)
    if self.random_weights:
      preset = self.target.startswith(PRESET)
      source = self.target if preset else fetch(self.target)
      config = shape_of(source, blank)
      checkpoint = random_checkpoint(config, self.seed, str(source))
    elif self.target.startswith(PRESET):
      raise ValueError(
        f"{self.target} is a shape alone; add random_weights=True"
      )
    else:
      checkpoint = checkpoints.load(fetch(self.target), self.dtype)
    model = transformer.model(checkpoint.config)
    return blank._replace(model=model, checkpoint=checkpoint)

  def _make_drafter(self, target: Target) -> Weighted:
    context = {"target": target, "k": self.levels, "shape": self.make_shape()}
    drafter = None
    for call in self._drafters:
      if drafter is not None:
        context["max_external_drafts"] = drafter.drafter.spec.max_depth
      given = context
      if "k" in call.kwargs:  # of this drafter, a chain
        k = call.kwargs["k"]
        given = context | {"k": k, "shape": draft_shape.chain(k)}
        kwargs = {n: x for n, x in call.kwargs.items() if n != "k"}
        call = call._replace(kwargs=kwargs)
      current = calls.invoke(call, calls.find(call, DRAFTERS), given)
      current = (
        Weighted(current)
        if isinstance(current, Drafter)
        else Weighted(*current)
      )
      if drafter is not None:
        both = drafters.fallback(drafter.drafter, current.drafter)
        current = Weighted(both, current.params)
      drafter = current
    return drafter


def load(target: str = shipped.TARGET, **settings) -> Decoder:
  """Loads a target and its drafter; arguments as of `Setup`."""
  return Setup(target, **settings).load()
