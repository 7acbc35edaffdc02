"""Names from users and files are printed literally in figures."""

import xml.etree.ElementTree

import numpy as np
import pytest
from matplotlib.text import Text

import documents
from specdec.benchmark import metrics, sweeps
from specdec.report import (
  canvas,
  heatmaps,
  plots,
  sweep_page,
  training,
  training_runs,
)

NAMES = {
  "mathtext": r"$\frac$ a",
  "two dollars": "$1 or $2",
  "three dollars": r"\$x$ $",
  "controls": "\x1b]0;x\x07\x00\x9b\u202e",
  "lines": "one\ntwo\r\n\nthree",
  "empty": "",
  "blank": " \n ",
  "underscore": "_nolegend_",
  "long": 30_000 * "longest",
  "many words": 9_000 * "long word ",
  "percent": "50% {x} %s \\",
}


def run(name, k=2, batch=1):
  comparison = {"shape": name, "rule": name, "siblings": "none"}
  return documents.run(name, k, batch) | {
    "comparison": comparison | {"lossless": True},
    "drafter": {"name": name, "temperature": 0.0, "shape": "chain"},
  }


def sweep(name):
  lines = [
    {
      "run": run("all", k, batch),
      "point": {"target": name, "draft": draft, "batch": batch, "k": k},
      "prediction": {"speedup": 1.4, "round_seconds": 0.1},
      "observed": {"prefix_acceptance": [0.5] * k},
      "drafter": name,
      "rounds": 3,
      "load": None,
      "caveats": [name],
    }
    for draft in (name, "other")
    for batch in (1, 2)
    for k in (1, 2)
  ]
  return sweeps.Read(lines, [], [name])


def joint_kind(name):
  one = metrics.Estimate(1.0, 0.1)
  runs = (training_runs.JointRun(name, 0, 1, 1.0, 1.0, name, {}),)
  return training_runs.Kind(name, one, one, {0: 1.0}, one, runs)


ONE = metrics.Estimate(1.0, 0.1)
FIGURES = {
  "groups": lambda n: plots.by_group([run(n), run("all")], n, [n]),
  "groups over k": lambda n: plots.by_group([run(n), run(n, 3)], n, [n]),
  "speed over k": lambda n: plots.over_k({n: [run(n)]}, n, [n]),
  "sizes": lambda n: plots.over_sizes([run(n)], n, [n]),
  "drafters": lambda n: plots.over_drafters([run(n)], n, [n]),
  "heatmap": lambda n: heatmaps.speedups(
    {n: np.ones((2, 2))}, [n, "b"], [1, 2], ("draft", "k"), n
  ),
  "chips": lambda n: heatmaps.over_batch({n: [(1.5, 2)]}, [1], n),
  "roofline": lambda n: heatmaps.roofline(
    {n: (1e9, 1e12)}, {n: [(1.0, 1e9, "1")]}, n
  ),
}
PLOTS = {
  "training": lambda n, p: training.plot_curves(
    [
      training_runs.Curve(n, (10, 20), (1.5, 1.6), (0.5, 0.6), (0.5, 0.6), 2),
      training_runs.Curve("b", (10,), (1.5,), (0.5,), (0.5,), 2),
    ],
    p,
    n,
  ),
  "joint": lambda n, p: training.plot_joint([joint_kind(n)], p),
}


# Every plot with the worst names, every name in one plot; the rest is slow.
WORST = ("mathtext", "controls", "many words")


@pytest.mark.parametrize(
  "plot, name",
  [
    pytest.param(
      *(plot, name),
      marks=() if plot == "groups" or name in WORST else pytest.mark.slow,
    )
    for plot in (*FIGURES, *PLOTS)
    for name in NAMES
  ],
)
def test_any_name_can_be_drawn(plot, name, tmp_path):
  path = tmp_path / "plot.svg"
  if plot in FIGURES:
    canvas.save(FIGURES[plot](NAMES[name]), path)
  else:
    PLOTS[plot](NAMES[name], path)
  xml.etree.ElementTree.parse(path)  # a browser refuses what is no XML


@pytest.mark.parametrize("name", WORST)
def test_any_name_can_be_on_a_sweep_s_page(name, tmp_path):
  read = sweep(NAMES[name])
  page = sweep_page.render(read, None)
  assert not set(page) & set("\x00\x07\x1b\x9b\u202e")
  for figure in sweep_page.figures(read.lines).values():
    canvas.save(figure, tmp_path / "plot.svg")
    xml.etree.ElementTree.parse(tmp_path / "plot.svg")


@pytest.mark.parametrize("name", ["mathtext", "two dollars", "percent"])
def test_a_name_is_drawn_letter_by_letter(name):
  text = Text(text=canvas.label(NAMES[name]))
  shown, is_formula = text._preprocess_math(text.get_text())
  assert (shown, is_formula) == (NAMES[name], False)


def test_every_name_is_in_the_legend():
  for name in NAMES.values():
    figure, [axes] = canvas.figure(3, "", (), 1)
    axes.plot([1, 2], label=canvas.label(name))
    canvas.legend(axes)
    figure.draw_without_rendering()
    assert len(axes.get_legend().get_texts()) == 1
