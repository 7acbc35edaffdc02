"""Figures contain all data; Figure objects are inspected, not drawn."""

import inspect

import numpy as np
import pytest

from documents import run
from specdec.report import canvas, plots


def over_k(groups, ks=(1, 2, 4)):
  return [run(g, k, tokens=1 + 0.2 * k) for g in groups for k in ks]


def entry(batch, tokens):
  median = 4e-3 * batch * tokens
  return {
    "batch": batch,
    "tokens": tokens,
    "seconds": {"median": median, "quartiles": [0.95 * median, 1.2 * median]},
    "roof_seconds": 2e-3,
  }


def lines(axes):
  """Label -> line with error bars, or without."""
  return {c.get_label(): c.lines[0] for c in axes.containers}


def test_bars_begin_at_zero_and_print_their_values_with_all_at_the_bottom():
  runs = [run("all", tokens=2.5), run("coding", tokens=3.25, speedup=0.9)]
  left, right = plots.by_group(runs, "").axes
  assert [t.get_text() for t in left.get_yticklabels()] == ["coding", "all"]
  assert left.get_ylim()[0] > left.get_ylim()[1]
  assert not any(t.get_text() for t in right.get_yticklabels())
  for axes, values in ((left, (3.25, 2.5)), (right, (0.9, 1.4))):
    assert axes.get_xlim()[0] == 0
    assert [p.get_width() for p in axes.patches] == list(values)
    assert [t.get_text() for t in axes.texts] == [f"{v:.2f}" for v in values]


def test_lines_differ_without_colour_and_all_is_last_black_and_thick():
  groups = ["all", *(f"group {i}" for i in range(14))]
  for axes in plots.by_group(over_k(groups, (4, 1, 2)), "").axes:
    drawn = lines(axes)
    assert list(drawn) == [*groups[1:], "all"]
    overall = drawn.pop("all")
    assert overall.get_color() == "black"
    widest = max(line.get_linewidth() for line in drawn.values())
    assert overall.get_linewidth() > 1.5 * widest
    marks = {x.get_marker() + x.get_linestyle() for x in drawn.values()}
    assert len(marks) == len(drawn)
    assert all(tick == round(tick) for tick in axes.get_xticks())
    np.testing.assert_array_equal(overall.get_xdata(), [1, 2, 4])  # in order
    tokens = "tokens" in axes.get_ylabel()
    expected = [1.2, 1.4, 1.8] if tokens else [1.4] * 3
    np.testing.assert_allclose(overall.get_ydata(), expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ks", [(4, 4, 4), (2, 3, 4)])
def test_missing_values_and_errors_are_left_out(ks):
  for speedup in (None, 1.4):
    runs = [
      run("all", ks[0], error=None),
      run("all" if ks[1] != 4 else "b", ks[1], tokens=None, speedup=speedup),
      run("c", ks[2], speedup=speedup, error=None),
    ]
    runs[1]["acceptance"]["tokens_per_pass"]["error"] = None
    figure = plots.by_group(runs, "")
    figure.draw_without_rendering()
    if ks[1] == 4:
      assert sum(t.get_text() != "" for t in figure.axes[0].texts) == 2
    else:
      drawn = lines(figure.axes[0])["all"].get_ydata()
      np.testing.assert_array_equal(drawn, [2.1, np.nan])
  nothing = [run(k=k, tokens=None, speedup=None, error=None) for k in set(ks)]
  plots.by_group(nothing, "").draw_without_rendering()


def test_each_batch_size_is_a_line():
  runs = [run(k=k, batch=b) for k in (1, 2) for b in (1, 4)]
  axes = plots.by_group(runs, "").axes[0]
  assert list(lines(axes)) == ["all, batch 1", "all, batch 4"]


@pytest.mark.parametrize(
  "plot, points",
  [
    (plots.by_group, []),
    (plots.by_group, [run(), run()]),
    (plots.by_group, [run(k=1), run(), run()]),
    (plots.over_k, {}),
    (plots.over_k, {"a": []}),
    (plots.over_k, {"a": [run("b"), run("c")]}),
    (plots.passes, [entry(1, 2), entry(1, 2)]),
  ],
)
def test_nothing_or_two_points_at_one_place_is_refused(plot, points):
  with pytest.raises(
    ValueError, match=r"nothing|several points at one (k|tok)"
  ):
    plot(points, "")


def test_passes_show_milliseconds_quartiles_and_the_roof():
  entries = [entry(b, n) for b in (1, 4) for n in (1, 2, 4, 8)]
  [axes] = plots.passes(entries, "A title").axes
  drawn = lines(axes)
  labels = [label.split(":")[0] for label in drawn]
  assert labels == ["batch 1", "batch 4", "roof"]
  line = drawn["batch 4"]
  np.testing.assert_allclose(line.get_ydata(), [16, 32, 64, 128])
  [bars] = axes.containers[1].lines[2]
  np.testing.assert_allclose(bars.get_segments()[0], [[1, 15.2], [1, 19.2]])
  [roof] = (
    x
    for x in axes.lines
    if x.get_linestyle() == "--" and x.get_color() == line.get_color()
  )
  np.testing.assert_allclose(roof.get_ydata(), [2] * 4)
  assert "milliseconds" in axes.get_ylabel()


def test_the_global_state_of_pyplot_is_left_alone():
  assert "pyplot" not in inspect.getsource(plots) + inspect.getsource(canvas)
