"""Suffix decoding: drafts what most often followed the end of the text.

Oliaro et al. (arXiv:2411.04975). The longest suffix of the text that stood
before, in this text or in a corpus of earlier ones, has places where it stood;
what followed there votes on each draft token. Where lookup takes the latest
place and k tokens, this drafts as long as the places agree, and no longer than
`factor` times what matched; a tree holds what they disagree about. Invariant: a
draft is a function of committed text and corpus only, so it is deterministic
(`log_probs` None) and any rule may evaluate it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec import draft_length, draft_shape
from specdec.drafters import suffix_index, text_match
from specdec.types import NO_COST, Array, Context, Draft, Drafter
from specdec.utils.constructors import cached

PLACES = 32  # at most so many vote; the share of a token is right to 1 / PLACES
_LONGEST = 64  # tokens of a match


class Followed(NamedTuple):
  """What followed the places of a match in one row."""

  tokens: Array  # [PLACES, D]; -1: the text had ended
  used: Array  # [PLACES] bool
  matched: Array  # [] length of the match


class CandidateTree(NamedTuple):
  """A tree of N nodes in the order in which they were added."""

  tokens: Array  # [N]; of node 0 nothing
  parents: Array  # [N]
  depth: Array  # [N]
  count: Array  # [] nodes in use, the root included
  score: Array  # [] sum of their probabilities: tokens expected to be accepted


def _in_text(tokens, length, most: int, depth: int) -> Followed:
  """The latest places of the longest match in the text itself."""
  matched = text_match.match_lengths(tokens, length, most)
  longest = jnp.maximum(jnp.max(matched), 0)
  position = jnp.arange(tokens.shape[0])
  ends = jnp.where((matched == longest) & (longest > 0), position, -1)
  ends = jax.lax.top_k(ends, min(PLACES, tokens.shape[0]))[0]
  ends = jnp.pad(ends, (0, PLACES - ends.shape[0]), constant_values=-1)
  # As lookup: what reaches the end of the text goes on from its beginning.
  period = jnp.maximum(length - 1 - ends, 1)[:, None]
  after = tokens[(ends + 1)[:, None] + jnp.arange(depth)[None] % period]
  return Followed(after, ends >= 0, longest)


def _build_tree(
  followed: Followed, limit: Array, nodes: int, children: int, min_prob: float
) -> CandidateTree:
  """Adds the likeliest continuation to a tree until none is likely enough.

  The probability of a node is the share of places that go on to it: the product
  of count(child) / count(parent) along its path.

  Args:
    limit: [] deepest level.
    nodes: N.
    children: most children of a node.
  """
  total = jnp.maximum(jnp.sum(followed.used), 1)
  place = jnp.arange(PLACES)

  def candidates(places, depth):
    """Tokens and counts [children] of what may follow these places [PLACES]."""
    last = followed.tokens.shape[1] - 1
    token = followed.tokens[:, jnp.minimum(depth, last)]
    voting = places & (token >= 0) & (depth < limit)
    same = (token[:, None] == token[None]) & voting[:, None] & voting[None]
    # Of equal counts the first place's is taken first, the latest text's.
    is_first = voting & ~jnp.any(same & (place[None] < place[:, None]), axis=1)
    votes = jnp.where(is_first, jnp.sum(same, axis=1), 0)
    chosen = jax.lax.top_k(votes, children)
    return token[chosen[1]], chosen[0]

  def add(node, carry):
    tree, alive, tokens, votes = carry
    best = jnp.argmax(votes)  # [N * children], the first of equals
    parent, token, count = best // children, tokens[best], votes[best]
    depth = tree.depth[parent]
    likely = (count > 0) & (count >= min_prob * total)
    last = followed.tokens.shape[1] - 1
    reached = followed.tokens[:, jnp.minimum(depth, last)] == token
    reached &= alive[parent] & likely
    slots = node * children + jnp.arange(children)
    ours, theirs = candidates(reached, depth + 1)
    votes = votes.at[best].set(0).at[slots].set(theirs)
    tree = CandidateTree(
      tree.tokens.at[node].set(jnp.maximum(token, 0)),
      tree.parents.at[node].set(jnp.where(likely, parent, node - 1)),
      tree.depth.at[node].set(depth + 1),
      tree.count + likely,
      tree.score + jnp.where(likely, count / total, 0.0),
    )
    return tree, alive.at[node].set(reached), tokens.at[slots].set(ours), votes

  zeros = jnp.zeros(nodes, jnp.int32)
  empty = CandidateTree(zeros, zeros - 1, zeros, jnp.int32(1), jnp.float32(0))
  first = candidates(followed.used, jnp.int32(0))
  waiting = jnp.zeros((2, nodes * children), jnp.int32)
  tokens, votes = waiting.at[:, :children].set(jnp.stack(first))
  alive = jnp.zeros((nodes, PLACES), bool).at[0].set(followed.used)
  return jax.lax.fori_loop(1, nodes, add, (empty, alive, tokens, votes))[0]


def _in_level_order(tree: CandidateTree) -> tuple[Array, Array]:
  """Tokens and parents [N] of a tree, level by level; unused nodes last."""
  node = jnp.arange(tree.tokens.shape[0])
  depth = jnp.where(node < tree.count, tree.depth, len(node))
  order = jnp.argsort(depth, stable=True)
  place = jnp.zeros_like(order).at[order].set(node)
  parents = tree.parents[order]
  parents = jnp.where(parents < 0, -1, place[jnp.maximum(parents, 0)])
  parents = jnp.where((node > 0) & (node >= tree.count), 0, parents)
  return tree.tokens[order], parents.astype(jnp.int32)


@cached
def suffix(
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
  corpus: bool = False,
  max_match: int = 16,
  min_match: int = 1,
  factor: float = 1.0,
  min_prob: float = 0.1,
  children: int = 4,
) -> Drafter:
  """Copies what followed the longest match, for as long as that is likely.

  A round reads, per row, its text once for each of max_match tokens, and of the
  corpus 2 max_match windows of max_match tokens a trip of a bisection, then
  PLACES windows of k tokens: kilobytes.

  Args:
    k: most draft tokens a round, short for shape=draft_shape.chain(k).
    shape: a chain, or draft_shape.dynamic, whose size and depth bound the tree.
      A chain that decides its length does so by the match, within these bounds.
    corpus: Params.draft is a suffix_index.SuffixIndex of earlier texts. Text
      and corpus are asked, and the draft of which more is expected is taken.
    max_match: longest match looked for.
    min_match: shortest match worth a draft; below it nothing is drafted.
    factor: draft tokens in a row per token of the match.
    min_prob: least probability of a draft token, by the text or corpus.
    children: most children of a node of a tree.

  Raises:
    ValueError: both or neither of k and shape are given, k < 0, the shape is a
      static tree or reads distributions, or another argument is out of range.
  """
  shape = draft_shape.resolve(k, shape)
  spec, policy = shape.spec, shape.policy
  if not spec.chain and (
    spec.parents is not None or spec.siblings != "deterministic"
  ):
    raise ValueError(
      "suffix drafts chains, and trees that the text shapes: give k, "
      "shape=chain(k) or shape=dynamic(...)"
    )
  draft_length.check_certainty(policy, "suffix")
  for name, x in (
    ("min_match", min_match),
    ("max_match", max_match),
    ("children", children),
  ):
    if type(x) is not int:
      raise ValueError(f"{name} = {x!r}; it must be an integer")
  if not 1 <= min_match <= max_match <= _LONGEST:
    raise ValueError(
      f"min_match = {min_match} and max_match = {max_match}; they must satisfy "
      f"1 <= min_match <= max_match <= {_LONGEST}"
    )
  if not 0 < factor <= _LONGEST:
    raise ValueError(f"factor = {factor}; it must be in (0, {_LONGEST}]")
  if not 0 <= min_prob <= 1:
    raise ValueError(f"min_prob = {min_prob}; it must be in 0..1")
  if not 1 <= children <= PLACES:
    raise ValueError(f"children = {children}; it must be in 1..{PLACES}")
  size, depth, chain = spec.max_nodes, spec.max_depth, spec.chain
  if depth > suffix_index.DEPTH - _LONGEST:
    raise ValueError(
      f"k = {depth}; suffix drafts at most {suffix_index.DEPTH - _LONGEST} "
      "tokens in a row"
    )
  # Rounds of no draft, of a short one, of a whole one. Of a tree that moves KV
  # about, XLA on CPU would copy the cache from one width to the next (rule 9).
  widths = tuple(sorted({1, (size + 1) // 2, size})) if chain else (size,)
  widths = widths if policy is None else spec.widths
  spec = spec._replace(widths=widths, siblings="deterministic", name="suffix")
  widest = 1 if chain else children

  def built(followed: Followed) -> CandidateTree:
    limit = jnp.floor(factor * followed.matched).astype(jnp.int32)
    limit = jnp.where(followed.matched < min_match, 0, limit)
    limit = jnp.minimum(limit, depth)
    return _build_tree(followed, limit, size, widest, min_prob)

  def draft_row(tokens, length, index):
    followed = _in_text(tokens, length, max_match, depth)
    matched, tree = followed.matched, built(followed)
    if corpus:
      match = suffix_index.longest_match(index, tokens, length, max_match)
      after, used = suffix_index.continuations(index, *match, PLACES, depth)
      other = built(Followed(after, used, match[0]))
      better = other.score > tree.score
      tree = jax.tree.map(lambda x, y: jnp.where(better, x, y), other, tree)
      matched = jnp.where(better, match[0], matched)
    return *_in_level_order(tree), tree.count, matched

  def propose(params, draft_state, context: Context):
    if depth == 0:
      return draft_shape.pending_only(context), draft_state
    index = params.draft if corpus else None
    if corpus and not isinstance(index, suffix_index.SuffixIndex):
      raise ValueError(
        "suffix(corpus=True) needs an index of suffixes as Params.draft; "
        f"it was given {type(index).__name__}"
      )
    tokens, parents, count, matched = jax.vmap(draft_row, (0, 0, None))(
      *text_match.with_source(context), index
    )
    tokens = jnp.concatenate([context.pending, tokens[:, 1:]], axis=1)
    certainty = None
    if policy is not None:
      most = draft_length.CLASSES - 1
      certainty = jnp.clip(matched - min_match, 0, most)
      decided, certainty = draft_length.count_levels(
        policy, context, depth, certainty, count > 1
      )
      count = jnp.minimum(count, decided)
    parents = None if chain else parents
    return Draft(tokens, parents, None, count, certainty=certainty), draft_state

  return Drafter(spec, lambda *_: None, propose, lambda *_: None, NO_COST)
