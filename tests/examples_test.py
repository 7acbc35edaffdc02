"""A drafter and a rule in one file each, used without editing another."""

import pathlib

import pytest

from specdec.benchmark.setup import Setup

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SHORT = dict(target="stdlib-1m", prompt_size=32, max_new_tokens=16, batch=2)
PROMPTS = ["for i in range(n):\n  x = x + i\nfor i in", "import os\nimport"]
BIGRAM = f"{EXAMPLES / 'bigram.py'}:bigram"
RECENT = f"{EXAMPLES / 'recent.py'}:recent"
NUCLEUS = f"{EXAMPLES / 'nucleus.py'}:nucleus"


def completed(**settings):
  decoder = Setup(**SHORT, **settings).load()
  [batch] = decoder.encode(PROMPTS)
  return decoder.complete(batch), decoder, batch


@pytest.mark.parametrize(
  "settings",
  [
    dict(drafter=f"{BIGRAM}(smoothing=1.0)", k=2, shape="chains(2)"),
    dict(drafter=RECENT, k=3),
    dict(drafter=RECENT, k=3, shape="adaptive(costs=[1, 1, 1, 1])"),
  ],
)
def test_coupled_text_is_the_baselines(settings):
  ours, decoder, batch = completed(**settings, temperature=1.0)
  baseline = decoder.baseline().complete(batch)
  assert ours.texts == baseline.texts
  assert ours.stats.drafted.sum() > 0


def test_the_rule_is_greedy_when_cold_and_says_that_it_is_lossy():
  ours, decoder, batch = completed(drafter=RECENT, acceptance=NUCLEUS)
  assert ours.stats.accepted.sum() > 0  # text that repeats itself
  assert ours.texts == decoder.baseline().complete(batch).texts
  rule = decoder.rule
  assert not rule.lossless and "nucleus of mass 0.8" in rule.caveat
  with pytest.raises(ValueError, match="mass = 2"):
    Setup(**SHORT, acceptance=f"{NUCLEUS}(mass=2)")


@pytest.mark.parametrize(
  "settings, sentence",
  [
    (dict(drafter=f"{BIGRAM}s"), r"no function bigrams?; .*bigram"),
    (dict(drafter=f"{BIGRAM}(order=3)"), r"it is bigram\(text=None"),
    (dict(drafter=RECENT, acceptance="kseq"), "deterministic"),
    (dict(drafter=RECENT, shape="entropy(limit=0.4)"), "recent drafts without"),
    (dict(drafter=RECENT, shape="chains(2)"), "recent drafts chains"),
  ],
)
def test_what_does_not_fit_is_refused(settings, sentence):
  with pytest.raises(ValueError, match=sentence):
    Setup(**SHORT, **settings).load()
