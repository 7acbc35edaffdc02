"""Renders a sweep as one HTML page: curves, heatmaps, a sortable table.

Invariant: the page is one file without network requests, and all text from
files passes `escape`.
"""

import base64
import hashlib
import importlib.resources
import io
import string
import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure

from specdec.benchmark import metrics, sweeps
from specdec.report import sweep_plots
from specdec.report.page import escape

# Inches, for the 358 pixels between a phone's margins: a figure's smallest text
# (8.5 points) is then 9 pixels high, usual text 11.
_WIDTH = 4.6
_SCRIPT = """
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table");
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th"))
      other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[head.cellIndex].dataset.value;
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const x = key(a), y = key(b), order = x - y;
      return (up ? 1 : -1) * (isNaN(order) ? x.localeCompare(y) : order);
    });
    table.tBodies[0].append(...rows);
  });
}
"""
_COLUMNS = (
  "setting", "batch", "k", "tokens a round", "predicted", "measured", "error",
  "measured / predicted", "round, ms", "predicted, ms", "tokens/s", "load",
)  # fmt: skip


def figures(lines: Sequence[dict]) -> dict[str, Figure]:
  """Returns the page's figures by name."""
  evaluated = [line for line in lines if line["run"]["k"]] or list(lines)
  drawn = {"scatter": sweep_plots.scatter(evaluated, "")}
  for i, (name, group) in enumerate(sweeps.by_setting(lines).items()):
    drawn[f"over_k_{i}"] = sweep_plots.over_k(group, name)
    if len({line["run"]["batch"] for line in group}) > 1:
      figure = sweep_plots.heatmap(group, "batch", name, "batch, rows")
      drawn[f"heatmap_{i}"] = figure
  for i, (name, group) in enumerate(sweeps.by_drafter(lines).items()):
    figure = sweep_plots.heatmap(group, "drafter", name, "drafter")
    drawn[f"drafters_{i}"] = figure
  drawn["prefix_acceptance"] = sweep_plots.prefix_acceptance(evaluated, "")
  return drawn


def render(sweep: sweeps.Read, header: dict | None) -> str:
  """Renders the page.

  Args:
    sweep: points, broken lines and failures read from a sweep's folder.
    header: command, machine and versions of the sweep.
  """
  lines = sweep.lines
  evaluated = [line for line in lines if line["run"]["k"]]
  parts = [_head(header), _paragraph(sweeps.band(lines))]
  if evaluated and len(evaluated) < len(lines):
    parts.append(
      _paragraph(f"Without k = 0, which predicts 1: {sweeps.band(evaluated)}")
    )
  parts += [_caveats(lines), _crossovers(lines)]
  drawn = figures(lines)
  parts.append("<h2>Measured against predicted</h2>")
  parts.append(_image(drawn.pop("scatter"), "measured over predicted"))
  parts.append("<h2>Acceptance by position</h2>")
  parts.append(
    _image(drawn.pop("prefix_acceptance"), "prefix acceptance by position")
  )
  parts.append("<h2>Setting by setting</h2>")
  for name, group in sweeps.by_setting(lines).items():
    parts.append(_paragraph(f"{name}: {sweeps.band(group)}"))
  parts += [_image(figure, name) for name, figure in drawn.items()]
  parts += ["<h2>Every point</h2>", _table(lines), _left_out(sweep)]
  frame = importlib.resources.files("specdec.report") / "sweep_page.html"
  digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
  return string.Template(frame.read_text(encoding="utf-8")).substitute(
    title="Predicted and measured",
    body="\n".join(part for part in parts if part),
    script=_SCRIPT,
    script_hash=f"sha256-{digest}",
  )


def _paragraph(text) -> str:
  return f"<p>{escape(str(text))}.</p>"


def _head(header: dict | None) -> str:
  if not header:
    return ""
  machine, versions = header["machine"], header["versions"]
  pairs = {
    "machine": f"{machine['device']}, {machine['cpu_cores']} cores",
    "date": header["date"],
    "jax": versions["jax"],
    "commit": versions["commit"] or "-",
    "command": header["command"],
  }
  return "<dl>{}</dl>".format(
    "".join(
      f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
      for name, value in pairs.items()
    )
  )


def _caveats(lines: Sequence[dict]) -> str:
  texts = sorted({text for line in lines for text in line["caveats"]})
  return "".join(f'<p class="off">warning: {escape(x)}</p>' for x in texts)


def _crossovers(lines: Sequence[dict]) -> str:
  paragraphs = []
  for name, group in sweeps.by_setting(lines).items():
    if len({line["run"]["batch"] for line in group}) > 1:
      predicted, measured = sweeps.crossover(group)
      text = (
        f"{name}: the batch from which on no k gains is "
        f"{predicted or 'above all tried'} as predicted, "
        f"{measured or 'above all tried'} as measured."
      )
      paragraphs.append(f"<p>{escape(text)}</p>")
  return "".join(paragraphs)


def _narrow(figure: Figure) -> None:
  """Resizes a figure to a phone's width, legends below the panels."""
  height = figure.get_figheight()
  for axes in figure.axes:
    if legend := axes.get_legend():
      legend.set_loc("upper left")
      legend.set_bbox_to_anchor((0, -0.2), axes.transAxes)
      lines = "\n".join(text.get_text() for text in legend.get_texts())
      height += 0.18 * (1 + lines.count("\n"))
  before = figure.get_suptitle()
  title = textwrap.fill(before, 42)
  height += 0.2 * (title.count("\n") - before.count("\n"))
  figure.set_size_inches(_WIDTH, height)
  figure.suptitle(title, fontsize=11)


def _image(figure: Figure, text: str) -> str:
  buffer = io.BytesIO()
  _narrow(figure)
  figure.savefig(buffer, format="svg", transparent=True)
  data = base64.b64encode(buffer.getvalue()).decode()
  return (
    f'<figure><img alt="{escape(text)}" '
    f'src="data:image/svg+xml;base64,{data}"></figure>'
  )


def _table(lines: Sequence[dict]) -> str:
  head = "".join(
    f"<th><button>{escape(name)}</button></th>" for name in _COLUMNS
  )
  rows = []
  for name, group in sweeps.by_setting(lines).items():
    for line in group:
      rows.append(_row(name, line))
  return (
    f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
    f"<tbody>{''.join(rows)}</tbody></table></div>"
  )


def _row(name: str, line: dict) -> str:
  run, prediction = line["run"], line["prediction"]
  speed = run["speed"]
  gain = metrics.Estimate(**speed["speedup"])
  ratio = sweeps.ratio(line)
  values = [
    (name, name),
    (run["batch"], f"{run['batch']}"),
    (run["k"], f"{run['k']}"),
    _number(run["acceptance"]["tokens_per_pass"]["value"], ".2f"),
    _number(prediction["speedup"], ".2f"),
    _number(gain.value, ".2f"),
    _number(gain.error or 0, ".2f"),
    _number(ratio, ".2f"),
    _number(1e3 * speed["seconds"] / line["rounds"], ".2f"),
    _number(1e3 * prediction["round_seconds"], ".2f"),
    _number(speed["tokens_per_second"], ".1f"),
    _number(line["load"] or 0, ".2f"),
  ]
  cells = []
  for column, (key, text) in zip(_COLUMNS, values):
    off = column.startswith("measured /") and not 0.9 <= ratio <= 1.1
    kind = ' class="off"' if off else ""
    key, text = escape(str(key)), escape(text)
    cells.append(f'<td{kind} data-value="{key}">{text}</td>')
  return f"<tr>{''.join(cells)}</tr>"


def _number(value: float, form: str) -> tuple[float, str]:
  return value, format(value, form)


def _left_out(sweep: sweeps.Read) -> str:
  texts = [f"skipped: {text}" for text in sweep.broken]
  texts += [f"failed: {x['point']}: {x['error']}" for x in sweep.failed]
  return "".join(f'<p class="note">{escape(text)}</p>' for text in texts)
