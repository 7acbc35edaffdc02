"""Tables of goodput.py: queues served by slot, under loads."""

from collections.abc import Callable, Mapping, Sequence

from specdec.benchmark.metrics import Estimate
from specdec.benchmark.runs import BASELINE
from specdec.report import tables
from specdec.report.tables import acceptance_length, estimate

LEAST = 0.97  # times the baseline, below which a way is said to lose
NEAR = 0.95  # times the best number, below which `adaptive` falls short


def listed(entries: Sequence[dict], form=tables.listed) -> str:
  """Formats a line for every batch, load and way."""
  columns = {
    "batch, load": _where,
    "way": "{0[name]}",
    "tokens/s": lambda x: f"{Estimate(**x['goodput']):.1f}",
    "x plain": estimate("speedup"),
    "x faster answered": estimate("latency_speedup"),
    "latency ms": _latency("latency", "mean"),
    "p90": _latency("latency", "p90"),
    "first token ms": _latency("first_token", "mean"),
    "occupancy": "{0[occupancy]:.2f}",
    "tokens/pass": estimate("acceptance", "tokens_per_pass"),
    "acceptance length": acceptance_length,
    "same text": _same,
  }
  return form(entries, columns)


def goodput(documents: Mapping, name: str) -> str:
  """Formats the same as a page has it, and says where a way loses."""
  entries = documents[name]["goodput"]
  losses = [
    f"{x['name']} at {_where(x)}"
    for x in entries
    if x["name"] != BASELINE and _gain(x) < LEAST
  ]
  lost = "; ".join(losses) or "nowhere"
  text = (
    f"- under {LEAST} times the baseline's goodput or, under a load below 1, "
    f"speed of answers (batch, load): {lost}"
  )
  if any(x["name"] == "adaptive" for x in entries):
    short = "; ".join(_short_of_best(entries)) or "nowhere"
    text += f"\n- adaptive under {NEAR} times the best number's: {short}"
  return f"{listed(entries, tables.markdown)}\n\n{text}"


def _short_of_best(entries: Sequence[dict]) -> list[str]:
  """Where `adaptive` gains less than the best k that was given as a number."""
  best: dict[str, float] = {}
  for entry in entries:
    if entry["name"].startswith("k = "):
      where = _where(entry)
      best[where] = max(best.get(where, 0.0), _gain(entry))
  return [
    _where(x)
    for x in entries
    if x["name"] == "adaptive" and _gain(x) < NEAR * best.get(_where(x), 0.0)
  ]


def _gain(entry: dict) -> float:
  """Goodput over the baseline's; below a load of 1, where every way answers
  what arrives, how many times faster it does."""
  load = entry["load"]
  below = load is not None and load < 1
  return entry["latency_speedup" if below else "speedup"]["value"]


def _where(entry: dict) -> str:
  load = entry["load"]
  return f"{entry['batch']}, {'all at once' if load is None else f'{load:g}'}"


def _latency(name: str, of: str) -> Callable[[dict], str]:
  return lambda entry: f"{1e3 * entry[name][of]:.0f}"


def _same(entry: dict) -> str:
  same = entry["same_texts"]
  return "-" if same is None else f"{same}/{entry['requests']}"
