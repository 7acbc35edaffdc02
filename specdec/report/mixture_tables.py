"""Tables of mixtures of experts: what passes read, and what rounds gain."""

from collections.abc import Callable, Mapping

from specdec.benchmark.target import config_of
from specdec.report import at_rate
from specdec.report.tables import estimate, listed, markdown
from specdec.roofline import chips, shapes
from specdec.roofline.cost import Deployment, experts_touched


def of_experts(counts: Mapping, show: Callable = listed) -> str:
  """Formats what count_experts.py counted, beside the formula.

  Args:
    show: `listed` or `markdown`.
  """
  count, chosen = counts["experts"], counts["experts_per_token"]
  best = counts["correlation"]

  def formula(name: str) -> Callable[[dict], str]:
    def cell(row: dict) -> str:
      r = 1.0 if best[name] is None else best[name]
      touched = experts_touched(count, chosen, row["tokens"], r)
      return f"{estimate(name)(row)} / {touched:.2f}"

    return cell

  def fit(name: str) -> str:
    return "any r" if best[name] is None else f"r = {best[name]:.2f}"

  columns = {
    "tokens": "{[tokens]}",
    f"of one text / {fit('of_one_text')}": formula("of_one_text"),
    f"of as many texts / {fit('of_many_texts')}": formula("of_many_texts"),
    "independent": "{[independent]:.2f}",
  }
  title = (
    f"experts of {count} that are touched, {chosen} a token; the busiest has "
    f"{counts['busiest']:.0%} of the choices"
  )
  return f"{title}\n\n{show(counts['touched'], columns)}"


def experts(documents: Mapping, name: str) -> str:
  """Formats the experts that passes touch, from count_experts.py."""
  return of_experts(documents[name]["expert_counts"], markdown)


def mixture_batches(documents: Mapping, name: str) -> str:
  """Formats rounds of a mixture by batch, of a bench.py whose drafts cost
  nothing, and the bytes that passes of independent tokens read.

  Speedups are at the rate of its synthetic acceptance.
  """
  document = documents[name]
  k = document["runs"][0]["k"]
  tokens = at_rate.tokens_of(document["settings"], k)
  config = config_of(document["settings"]["target"], "float32")
  priced = Deployment(
    shapes.of_config(config),
    chips.get("v5e"),  # counts do not depend on the chip
    weights="float32",
    kv="float32",
    compute="bfloat16",
    correlation=1.0,
  )
  seconds = {
    (x["batch"], x["tokens"]): x["seconds"]["median"]
    for x in document["passes"]
  }
  chosen = config.num_experts, config.experts_per_token

  def touched(tokens: int) -> str:
    return f"{priced.experts_touched(*chosen, tokens):.1f}"

  def ratios(run: Mapping) -> tuple[float, float]:
    """Returns verification over a pass of one token: measured, by bytes."""
    batch, nodes = run["batch"], run["nodes"]
    one, many = (
      priced.cost(batch, tokens, run["context"]).bytes for tokens in (1, nodes)
    )
    return seconds[batch, nodes] / seconds[batch, 1], many / one

  def speedup(run: Mapping) -> str:
    _, ratio = ratios(run)
    return f"{at_rate.speedup(run, tokens)} / {tokens / ratio:.2f}"

  columns = {
    "rows": "{[batch]}",
    f"experts of {chosen[0]}, 1 token": lambda run: touched(run["batch"]),
    "verification": lambda run: touched(run["batch"] * run["nodes"]),
    "its time over 1 token's, measured / by bytes": lambda run: " / ".join(
      f"{ratio:.2f}" for ratio in ratios(run)
    ),
    "tokens/pass": estimate("acceptance", "tokens_per_pass"),
    f"speedup at {tokens:.2f} tokens/pass, measured / by bytes": speedup,
  }
  return markdown(document["runs"], columns)
