"""Drafters, acceptance rules and draft shapes by name, for calls in a Setup.

A constructor is passed what its signature names of `target` (a `Target`),
`shape` (a `DraftShape`), `k`, `acceptance` (the rule's name), and, of two
drafters with | between them, `leads` (it is the first) and
`max_external_drafts` (how many tokens the first may draft for the second). It
returns a `Drafter`, or a pair of it and the weights that become `Params.draft`.
So does a function of a user's file, which needs no entry here.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec import (
  acceptance,
  decode,
  draft_length,
  draft_shape,
  draft_tree,
  drafters,
)
from specdec.benchmark import draft_models
from specdec.benchmark.target import PRESET, Target, Weighted
from specdec.checkpoints import learned as saved
from specdec.checkpoints import shipped, text_corpus
from specdec.compiled import lowering, memory_plan
from specdec.draft_shape import DraftShape
from specdec.drafters import suffix_index
from specdec.drafters.heads import draft_head as heads
from specdec.drafters.heads import head_presets
from specdec.drafters.heads.cost import drafter_cost as head_cost
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import layouts, weight_formats
from specdec.models import params as model_params
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import BITS
from specdec.roofline import drafter_cost, trees
from specdec.types import AcceptanceRule, Drafter, Skip, Sparse
from specdec.utils import calls
from specdec.utils.calls import Call

MAX_DRAFT = 4096  # tokens of a draft: ancestors are a table of their square
DEFAULT_K = {
  "lookup": 5, "model": 3, "translated": 3, "early_exit": 3, "layer_skip": 3,
  "quantized": 8, "sparse": 4, "suffix": 8, "pard": 8,
}  # fmt: skip
OTHER_K = 4  # of heads, and of users' drafters


def _lookup(
  shape: DraftShape,
  acceptance: str,
  ngram: int = 5,
  min_ngram: int | None = None,
  leads: bool = False,
) -> Drafter:
  if min_ngram is None:
    # 2 was found on held-out answers (docs/results/0.1.0/smollm2.md); synthetic
    # acceptance evaluates whatever is drafted.
    min_ngram = 2 if leads else 0 if acceptance == "synthetic" else 3
  if leads and not min_ngram:
    raise ValueError(
      "lookup(min_ngram=0) would always draft, and the drafter after | never"
    )
  return drafters.lookup(shape=shape, ngram=ngram, min_ngram=min_ngram)


def _suffix(
  shape: DraftShape,
  target: Target | None,
  corpus: str | None = None,
  max_match: int = 16,
  min_match: int | None = None,
  factor: float = 1.0,
  min_prob: float = 0.1,
  children: int = 4,
  leads: bool = False,
) -> Weighted:
  if min_match is None:  # as lookup, where another would draft instead
    min_match = 2 if leads else 1
  drafter = drafters.suffix(
    shape=shape,
    corpus=corpus is not None,
    max_match=max_match,
    min_match=min_match,
    factor=factor,
    min_prob=min_prob,
    children=children,
  )
  if corpus is None or target is None:
    return Weighted(drafter)
  size, tokenizer = target.model.vocab_size, target.checkpoint.tokenizer
  texts = text_corpus.load(corpus, size, tokenizer)
  place = target.places and target.places.target
  if target.abstract:
    index = lowering.replicated(suffix_index.shapes(texts), place)
  else:
    index = suffix_index.build(texts)
    index = jax.device_put(index, place.sharding(()) if place else None)
  held = sum(x.size * x.dtype.itemsize for x in index)
  cost = dataclasses.replace(drafter.cost, weight_bytes=held)
  return Weighted(drafter._replace(cost=cost), index)


def _recycling(
  shape: DraftShape, target: Target | None, *, full: bool = False
) -> Drafter:
  size = 2**31 if target is None else target.model.vocab_size
  return drafters.recycling(size, shape=shape, full=full)


def _early_exit(layer: int, target: Target, shape: DraftShape) -> Drafter:
  return drafters.early_exit(target.model, layer, shape=shape)


def read_skip(path: str) -> dict[str, Any]:
  """Reads a skip.json of choose_layers, and refuses other files."""
  path = shipped.SKIP if path == "shipped" else path
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8")
    document = json.loads(text)
    return {
      "attention": tuple(document["skip_attention"]),
      "mlp": tuple(document["skip_mlp"]),
      "k": min(int(document["k"]), MAX_DRAFT),
      "threshold": document.get("exit_threshold"),
    }
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{path} has no skip_attention, skip_mlp and k, as choose_layers writes "
      f"them ({type(error).__name__}: {error})"
    ) from error


def _layer_skip(
  target: Target,
  shape: DraftShape,
  file: str | None = None,
  attention: Sequence[int] | None = None,
  mlp: Sequence[int] | None = None,
  threshold: float | None = None,
) -> Drafter:
  if (file is None) == (attention is mlp is None):
    raise ValueError("layer_skip: give a file, or attention and mlp")
  if file is not None:
    document = read_skip(file)
    attention, mlp = document["attention"], document["mlp"]
    if threshold is None and shape.loops and shape.policy is None:
      threshold = document["threshold"]
  skip = Skip(tuple(attention or ()), tuple(mlp or ()))
  if any(type(layer) is not int for layers in skip for layer in layers):
    raise ValueError(f"layer_skip: {skip} names what is no layer")
  start = None if threshold is None else drafters.Threshold(threshold)
  drafter = drafters.layer_skip(
    target.model, skip, shape=shape, threshold=start
  )
  cost = drafter_cost.layer_skip(target.checkpoint.config, skip)
  return drafter._replace(cost=cost)


def _sparse(
  target: Target, shape: DraftShape, window: int = 256, sinks: int = 4
) -> Drafter:
  positions = Sparse(window, sinks)
  drafter = drafters.sparse(target.model, positions, shape=shape)
  cost = drafter_cost.sparse(target.checkpoint.config, positions)
  return drafter._replace(cost=cost)


def _quantized(
  target: Target,
  shape: DraftShape,
  weights: str = "int8",
  group: int = 256,
  window: int | None = None,
  sinks: int | None = None,
) -> Weighted:
  if weights not in ("int8", "int4"):
    raise ValueError(f"quantized({weights}): there are int8 and int4")
  bits = BITS[weights]
  if group < 1:
    raise ValueError(f"quantized: group={group!r}; it must be >= 1")
  config = target.checkpoint.config
  if config.num_experts:
    raise ValueError("quantized: a mixture of experts is not quantised")
  if config.is_quantized:
    raise ValueError(
      "quantized: the target's weights are integers already; it rounds those "
      "that are not"
    )
  positions = None
  if window is not None:
    positions = Sparse(window) if sinks is None else Sparse(window, sinks)
  elif sinks is not None:
    raise ValueError(f"quantized: sinks={sinks} needs a window")
  cost = drafter_cost.quantized(config, group, bits, positions)
  place = target.places and target.places.target
  small = model_params.in_groups(config, bits, group)
  if place:  # its devices share it
    held = memory_plan.weight_bytes(small, place)
    cost = dataclasses.replace(cost, weight_bytes=held)
  if target.abstract:
    params = lowering.weights(small, place, cut_groups=True)
  else:
    params = layouts.quantize(target.checkpoint.params, group, bits)
  drafter = drafters.quantized(target.model, shape=shape, positions=positions)
  return Weighted(drafter._replace(cost=cost), params)


def inspect_head(
  file: str, target: TransformerConfig
) -> tuple[str | pathlib.Path, HeadConfig]:
  """Returns where a head is, or a preset's name, and its config."""
  if file.startswith(PRESET):
    return file, head_presets.get(file.removeprefix(PRESET), target)
  path = saved.resolve(file)
  return path, saved.inspect(path, target)


def _head(
  kind: str | None,
  file: str,
  target: Target,
  shape: DraftShape,
  max_external_drafts: int = 0,
  weights: str | None = None,
) -> Weighted:
  form = weight_formats.parse(weights)
  if form and not form.is_integer:
    raise ValueError(f"{file}: weights={weights}; there are int8 and int4")
  config, preset = target.checkpoint.config, file.startswith(PRESET)
  if preset and not (target.abstract or target.random_weights):
    raise ValueError(f"head({file}) is a shape; --random_weights gives weights")
  path, head_config = inspect_head(file, config)
  if kind not in (None, head_config.kind):
    raise ValueError(
      f"{kind}({file}): that file holds a drafter of kind {head_config.kind}"
    )
  try:
    head_config.check(config)
  except ValueError as error:
    raise ValueError(f"{path} does not fit this target: {error}") from error
  levels, most = shape.spec.max_depth, head_config.most_levels
  if most is not None and levels > most:
    raise ValueError(
      f"k = {levels}; {path} drafts {most} tokens in a row at most"
    )
  place = target.places and target.places.target
  own_place = target.draft_place or (place and place.whole())
  if target.abstract or preset:
    # Which tokens it drafts makes no difference to costs.
    ids = np.arange(head_config.vocabulary) if head_config.vocabulary else None
    learned = saved.Learned(head_config, ids, None)
  else:
    trained = not target.random_weights
    learned = saved.load(path, target.checkpoint, trained, target.fingerprint)
  head = learned.draft_head(config, own_place)
  if target.abstract:
    draft = lowering.head_weights(
      head, target.checkpoint.params, own_place, config.dtype, form
    )
  else:
    net = head.init(jax.random.key(target.seed)) if preset else learned.net
    net = heads.in_dtype(net, config.dtype)
    draft = heads.weights_of(head, net, target.checkpoint.params)
    if form:
      draft = heads.quantize(draft, form)
    if own_place:
      draft = jax.device_put(draft, heads.shardings(head, draft, own_place))
    else:
      draft = layouts.pack(draft)
  drafter = drafters.from_head(
    head, target.model, shape, place, max_external_drafts
  )
  ways = own_place.ways("mlp") if own_place else 1
  cost = head_cost(head, config, form, ways)
  return Weighted(drafter._replace(cost=cost), draft)


_CONTEXT = (
  "target", "shape", "k", "acceptance", "leads", "max_external_drafts"
)  # fmt: skip


def without_k(call: Call) -> Call:
  """Returns a call without an argument k, which is its Setup's affair."""
  kwargs = {name: x for name, x in call.kwargs.items() if name != "k"}
  return call._replace(kwargs=kwargs)


def arguments_of(call: Call) -> dict[str, Any]:
  """Returns the arguments of a call of a drafter here, by name.

  layer_skip(FILE) has what the file says.
  """
  context = dict.fromkeys(_CONTEXT)
  bound = calls.bind(without_k(call), DRAFTERS[call.name], context)
  bound.apply_defaults()
  arguments = {
    name: x for name, x in bound.arguments.items() if name not in _CONTEXT
  }
  if call.name == "layer_skip" and arguments["file"] is not None:
    document = read_skip(arguments["file"])
    if arguments["threshold"] is not None:
      document["threshold"] = arguments["threshold"]
    arguments |= document
  return arguments


HEADS = ("head", *drafters.LEARNED)
DRAFTERS: Mapping[str, Callable] = {
  "none": lambda: decode.NO_DRAFTER,
  "early_exit": _early_exit,
  "layer_skip": _layer_skip,
  "lookup": _lookup,
  "model": draft_models.model,
  "pard": draft_models.pard,
  "quantized": _quantized,
  "recycling": _recycling,
  "sparse": _sparse,
  "suffix": _suffix,
  "translated": draft_models.translated,
  "head": functools.partial(_head, None),
} | {kind: functools.partial(_head, kind) for kind in drafters.LEARNED}
RULES: Mapping[str, Callable[..., AcceptanceRule]] = {
  name: getattr(acceptance, name) for name in acceptance.__all__
}


def _chains(count: int, k: int, siblings: str, shared: int = 0) -> DraftShape:
  if count * k > MAX_DRAFT:
    raise ValueError(f"chains: {count * k:,} tokens; at most {MAX_DRAFT:,}")
  return draft_shape.static(draft_tree.parallel(count, k, shared), siblings)


def _comb(k: int, siblings: str, first: int = 8, later: int = 4) -> DraftShape:
  if min(first, later) < 1 or first + (k - 1) * later > MAX_DRAFT:
    raise ValueError(
      f"comb: {first} and {later} siblings; each must be >= 1, and all {k} "
      f"levels have at most {MAX_DRAFT:,} tokens"
    )
  paths = [
    (*[0] * level, rank)
    for level in range(k)
    for rank in range(later if level else first)
  ]
  return draft_shape.static(draft_tree.from_paths(paths), siblings)


def _optimal(
  size: int,
  acceptance: Sequence[float] | Sequence[Sequence[float]],
  k: int,
  siblings: str,
) -> DraftShape:
  if not 1 <= size <= MAX_DRAFT:
    raise ValueError(f"optimal: {size:,} tokens; 1 to {MAX_DRAFT:,}")
  if not acceptance or not all(map(np.size, acceptance)):
    raise ValueError("optimal: give the acceptance of a node's first child ...")
  paths = draft_tree.optimal(trees.by_depth(acceptance, k), size)
  return draft_shape.static(draft_tree.from_paths(paths), siblings)


def _dynamic(size: int, k: int, top: int = 4) -> DraftShape:
  if max(size, top) > MAX_DRAFT:
    raise ValueError(f"dynamic: {size:,} tokens; at most {MAX_DRAFT:,}")
  return draft_shape.dynamic(top, k, size)


def _paths(file: str, siblings: str) -> DraftShape:
  try:
    text = pathlib.Path(file).read_text(encoding="utf-8")
    paths = json.loads(text)
  except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f"{file} is not JSON ({error})") from None
  if not (
    isinstance(paths, list)
    and all(isinstance(path, list) for path in paths)
    and all(isinstance(step, int) for path in paths for step in path)
  ):
    raise ValueError(f"{file} must hold a list of paths: [[0], [1], [0, 0]]")
  if not paths:
    raise ValueError(f"{file} holds no path: autoregressive decoding is k = 0")
  if max(len(paths), *map(len, paths)) > MAX_DRAFT:
    raise ValueError(f"{file} holds more than {MAX_DRAFT:,} paths or levels")
  return draft_shape.static(draft_tree.from_paths(paths), siblings)


SHAPES: Mapping[str, Callable[..., DraftShape]] = {
  "adaptive": draft_length.adaptive,
  "chain": draft_shape.chain,
  "chains": _chains,
  "comb": _comb,
  "dynamic": _dynamic,
  "entropy": draft_length.entropy,
  "optimal": _optimal,
  "paths": _paths,
}
