"""The text of one row as it grows, cut where a stop string begins.

Invariant: what was shown is never taken back; text that may be the beginning of
a stop string is held until that is decided.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tqdm import tqdm

from specdec.benchmark import runs
from specdec.benchmark.batches import Batch, Completed, NewTokens
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.round_trace import Round, Tracer
from specdec.checkpoints import TextStream, Tokenizer
from specdec.types import ACCEPTED
from specdec.utils.terminal import Painter


class Token(NamedTuple):
  """One new token and where it came from."""

  id: int
  text: str  # what it adds; '' where a later token completes its character
  origin: int  # types.ACCEPTED .. BASELINE
  log_prob: float  # DecodeState.log_probs
  draft_log_prob: float  # DecodeState.draft_log_probs


# Takes a round and the tokens that it committed.
Watch = Callable[[Round, Sequence[Token]], None]


class Answer:
  """New tokens of one row.

  Attributes:
    ids: the tokens, up to the one that completed a stop string.
    text: what they say, without the stop string; '' without a tokenizer.
    tokens: those that `text` is made of, the last one perhaps cut; without a
      tokenizer a token's text is its number and a space.
    stopped: whether a stop string came.
    rounds: that wrote it, where they are recorded.
  """

  def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()):
    self.ids: list[int] = []
    self.text = ""
    self.tokens: list[Token] = []
    self.stopped = False
    self.rounds: Sequence[Round] = ()
    self._stops = tuple(stops)
    self._stream = TextStream(tokenizer) if tokenizer else None
    self._shown = 0  # tokens

  def push(self, new: NewTokens) -> None:
    """Takes further tokens; those after a stop string are dropped."""
    for index, origin, *log_probs in zip(*new):
      if self.stopped:
        return
      text = self._stream.push([index]) if self._stream else f"{index} "
      self.ids.append(int(index))
      token = Token(int(index), text, int(origin), *map(float, log_probs))
      self.tokens.append(token)
      if self._stream:
        self._take(text)

  def finish(self) -> None:
    """No more tokens will come: gives out the bytes that were held back."""
    if self._stream is None or self.stopped:
      return
    text = self._stream.finish()
    if text:  # of the last token, which could not complete a character
      self._shown = min(self._shown, len(self.tokens) - 1)
      self.tokens.append(self.tokens.pop()._replace(text=text))
      self._take(text)

  def show(self, painter: Painter, ended: bool = True) -> None:
    """Prints what is certain and was not printed yet; all of it once ended."""
    certain = ended or self.stopped
    keep = 0 if certain else max(map(len, self._stops), default=1) - 1
    waiting = sum(len(token.text) for token in self.tokens[self._shown :])
    while self._shown < len(self.tokens):
      token = self.tokens[self._shown]
      waiting -= len(token.text)
      if waiting < keep:
        break
      sys.stdout.write(painter.paint(token.text, token.origin))
      self._shown += 1
    sys.stdout.flush()

  def _take(self, text: str) -> None:
    """Adds the last token's text, and cuts all of it at a stop string."""
    self.text += text
    hits = [at for stop in self._stops if (at := self.text.find(stop)) >= 0]
    if not hits:
      return
    excess = len(self.text) - min(hits)
    self.text, self.stopped = self.text[: min(hits)], True
    while excess:
      token = self.tokens.pop()
      kept = token.text[: max(len(token.text) - excess, 0)]
      excess -= len(token.text) - len(kept)
      if kept:
        self.tokens.append(token._replace(text=kept))


def rounds_of(tokens: Iterable[Token]) -> list[list[Token]]:
  """Splits tokens into rounds: accepted tokens, then one from the target.

  The last round may lack the latter, cut off by EOS, the length limit or a stop
  string.
  """
  split: list[list[Token]] = []
  ended = True
  for token in tokens:
    if ended:
      split.append([])
    split[-1].append(token)
    ended = token.origin != ACCEPTED
  return split


def decode_answers(
  decoder: Decoder,
  batch: Batch,
  tokenizer: Tokenizer | None,
  stops: Sequence[str] = (),
  painter: Painter | None = None,
  tracer: Tracer | None = None,
  watch: Watch | None = None,
) -> tuple[Completed, list[Answer]]:
  """Returns a batch decoded up to stop strings, its texts cut there, and an
  answer for each row; a painter prints row 0 as it comes, or after its rounds,
  of which `watch` is told. They need a tracer."""
  answers = [Answer(tokenizer, stops) for _ in batch.rows]

  def push(row: int, new: NewTokens) -> bool:
    before = len(answers[row].tokens)
    answers[row].push(new)
    if painter and row == 0:
      if not watch:
        answers[0].show(painter, ended=False)
      elif added := answers[0].tokens[before:]:
        watch(tracer.rounds[0][-1], added)
    return answers[row].stopped

  completed = decoder.decode(batch, push, run=tracer)
  if tracer:
    for answer, rounds in zip(answers, tracer.rounds):
      answer.rounds = rounds
  for answer in answers:
    answer.finish()
  if painter:
    if watch:
      print()
    answers[0].show(painter)
  return completed._replace(texts=[x.ids for x in answers]), answers


def stream_answers(
  decoder: Decoder,
  batches: Iterable[Batch],
  tokenizer: Tokenizer | None,
  stops: Sequence[str],
  beginnings: Sequence[str],
  painter: Painter,
  traced: bool = False,
  watch: Watch | None = None,
) -> tuple[list[Answer], list[str]]:
  """Decodes batches, prints their answers, the first one as it comes, and
  returns them with a sentence for each that ends where a distribution is not
  finite. Raises ValueError where that leaves no answer a token.

  Args:
    beginnings: texts to print ahead of the answers that continue them. Answers
      are numbered if there are several.
    traced: records the rounds, which is slower.
    watch: takes the rounds of the first answer as they come.
  """
  answers, faults, batches = [], [], [*batches]
  several = sum(len(batch.numbers) for batch in batches) > 1

  def begin():
    if several:
      space = "\n" if answers else ""
      print(painter.dim(f"{space}--- prompt {len(answers) + 1}"))
    if beginnings:
      end = "\n" if watch else ""
      print(painter.dim(beginnings[len(answers)]), end=end)

  for batch in batches:
    if not answers:
      begin()
    completed, part = decode_answers(
      decoder,
      batch,
      tokenizer,
      stops,
      None if answers else painter,
      Tracer(decoder) if traced or watch else None,
      watch,
    )
    faults += completed.faults
    for answer in part:
      if answers:
        begin()
        answer.show(painter)
      answers.append(answer)
  if faults and not any(answer.ids for answer in answers):
    raise ValueError(faults[0])
  return answers, faults


def compare_to_stop(
  decoders: Mapping[str, Decoder],
  batches: Sequence[Batch],
  tokenizer: Tokenizer | None,
  stops: Sequence[str],
  pairs: int,
  quiet: bool,
) -> runs.Comparison:
  """Times ways of decoding in turns, at least so many batches, each text up to
  a stop string: in pieces if there are any, else by one program."""

  def way(decoder: Decoder) -> Callable[[Batch], Completed]:
    if not stops:
      return lambda batch: decoder.complete(batch, strict=False)
    return lambda batch: decode_answers(decoder, batch, tokenizer, stops)[0]

  ways = {name: way(decoder) for name, decoder in decoders.items()}
  repeats = -(-pairs // len(batches))
  timed = runs.interleave(ways, batches, repeats)
  total = len(batches) * repeats
  timed = [*tqdm(timed, "timing", total, unit="pair", disable=quiet)]
  return runs.Comparison(dict(decoders), list(batches), timed)
