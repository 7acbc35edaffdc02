"""Figures contain all data; texts lie inside the figure and off the data.

Inspects laid-out Figure objects without drawing, unless a file is tested.
"""

import inspect

import numpy as np
import pytest
from PIL import Image

from specdec.report import plots

GROUPS = ("all", "coding", "translation", "retrieval-augmented generation")
CAVEATS = ("the text is meaningless", "the machine was busy " + 20 * "very ")


def run(group="all", k=4, batch=1, tokens=2.1, speedup=1.4, error=0.05):
  return {
    "group": group,
    "k": k,
    "batch": batch,
    "acceptance": {"tokens_per_pass": {"value": tokens, "error": error}},
    "speed": {"speedup": {"value": speedup, "error": error}},
    "identity": None,
  }


def over_k(groups, ks=(1, 2, 4)):
  return [run(g, k, tokens=1 + 0.2 * k) for g in groups for k in ks]


def entry(batch, tokens, median=4e-3):
  return {
    "batch": batch,
    "tokens": tokens,
    "context": 128,
    "seconds": {
      "median": median * tokens,
      "least": 0.9 * median * tokens,
      "quartiles": [0.95 * median * tokens, 1.2 * median * tokens],
      "repeats": 9,
    },
    "bytes": 40e6,
    "bytes_per_second": 1e10,
    "roof_seconds": 2e-3,
  }


ENTRIES = [entry(b, n, 4e-3 * b) for b in (1, 4) for n in (1, 2, 4, 8)]


def laid_out(figure):
  figure.draw_without_rendering()
  return figure


def words(figure):
  return " ".join(" ".join(t.get_text() for t in figure.texts).split())


def lines(axes):
  """Label -> line with error bars, or without."""
  return {c.get_label(): c.lines[0] for c in axes.containers}


FIGURES = {
  "bars": plots._by_group([run(g) for g in GROUPS], "A title", CAVEATS),
  "over k": plots._by_group(over_k(GROUPS), "A title", CAVEATS),
  "many": plots._by_group(
    over_k([f"number {i} of many groups" for i in range(16)]),
    "A title " * 20,
    (),
  ),
  "passes": plots._passes(ENTRIES, "A title"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_everything_is_in_the_figure_and_no_legend_on_data(name):
  figure = laid_out(FIGURES[name])
  assert words(figure).startswith("A title")
  paper = figure.bbox.padded(1)
  for axes in figure.axes:
    assert axes.get_xlabel() and (name == "bars" or axes.get_ylabel())
    box = axes.get_tightbbox()
    assert paper.contains(*box.min) and paper.contains(*box.max)
    assert min(axes.get_window_extent().size) > 200
  for text in figure.texts:
    box = text.get_window_extent()
    assert paper.contains(*box.min) and paper.contains(*box.max)
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in figure.axes)
  if name != "bars":
    box = figure.axes[-1].get_legend().get_window_extent()
    assert paper.contains(*box.min) and paper.contains(*box.max)
    assert not any(
      box.overlaps(axes.get_window_extent()) for axes in figure.axes
    )


@pytest.mark.parametrize("name", ("bars", "over k"))
def test_caveats_are_printed_whole(name):
  for caveat in CAVEATS:
    assert f"warning: {caveat.strip()}" in words(FIGURES[name])


def test_bars_say_their_values_from_zero_with_all_at_the_bottom():
  figure = plots._by_group(
    [run("all", tokens=2.5), run("coding", tokens=3.25, speedup=0.9)], "", ()
  )
  left, right = laid_out(figure).axes
  assert [t.get_text() for t in left.get_yticklabels()] == ["coding", "all"]
  assert left.get_ylim()[0] > left.get_ylim()[1]
  assert not any(t.get_text() for t in right.get_yticklabels())
  for axes, values in ((left, (3.25, 2.5)), (right, (0.9, 1.4))):
    assert axes.get_xlim()[0] == 0
    assert [p.get_width() for p in axes.patches] == list(values)
    assert [t.get_text() for t in axes.texts] == [f"{v:.2f}" for v in values]
    for text in axes.texts:
      assert text.get_window_extent().x1 < axes.get_window_extent().x1
  assert "per target pass" in left.get_xlabel()
  assert "autoregressive decoding, times" in right.get_xlabel()


def test_lines_are_told_apart_and_all_is_last_black_and_thick():
  groups = ["all", *(f"group {i}" for i in range(14))]
  left, right = plots._by_group(over_k(groups), "", ()).axes
  for axes in (left, right):
    drawn = lines(axes)
    assert list(drawn) == [*groups[1:], "all"]
    everything = drawn.pop("all")
    assert everything.get_color() == "black"
    widest = max(line.get_linewidth() for line in drawn.values())
    assert everything.get_linewidth() > 1.5 * widest
    marks = {
      line.get_marker() + line.get_linestyle() for line in drawn.values()
    }
    assert len(marks) == len(drawn)  # without their colours
    assert all(tick == round(tick) for tick in axes.get_xticks())
    np.testing.assert_array_equal(everything.get_xdata(), [1, 2, 4])
  np.testing.assert_allclose(lines(left)["all"].get_ydata(), [1.2, 1.4, 1.8])


def test_points_are_in_order_of_k():
  figure = plots._over_k(
    {"a": [run(k=3, tokens=3), run(k=1, tokens=1)]}, "", ()
  )
  line = lines(figure.axes[0])["a"]
  np.testing.assert_array_equal(line.get_xydata(), [[1, 1], [3, 3]])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ks", [(4, 4, 4), (2, 3, 4)])
def test_missing_values_and_errors_are_left_out(ks):
  for empty in (None, 1.4):
    runs = [
      run("all", ks[0], error=None),
      run("all" if ks[1] != 4 else "b", ks[1], tokens=None, speedup=empty),
      run("c", ks[2], speedup=empty, error=None),
    ]
    runs[1]["acceptance"]["tokens_per_pass"]["error"] = None
    figure = laid_out(plots._by_group(runs, "", ()))
    if ks[1] == 4:
      assert len(figure.axes[0].texts) == 2
    else:
      drawn = lines(figure.axes[0])["all"].get_ydata()
      np.testing.assert_array_equal(drawn, [2.1, np.nan])
  nothing = [run(k=k, tokens=None, speedup=None, error=None) for k in set(ks)]
  laid_out(plots._by_group(nothing, "", ()))


def test_batches_are_not_mixed_up():
  runs = [run(k=k, batch=b) for k in (1, 2) for b in (1, 4)]
  axes = plots._by_group(runs, "", ()).axes[0]
  assert list(lines(axes)) == ["all, batch 1", "all, batch 4"]


def test_what_cannot_be_drawn_is_refused():
  for runs in ([], [run(), run()], [run(k=1), run(), run()]):
    with pytest.raises(ValueError, match=r"nothing|several points at one k"):
      plots._by_group(runs, "", ())
  for curves in ({}, {"a": []}, {"a": [run("b"), run("c")]}):
    with pytest.raises(ValueError, match=r"nothing|several points at one k"):
      plots._over_k(curves, "", ())
  with pytest.raises(ValueError, match="'batch 1' has several points at one"):
    plots._passes([entry(1, 2), entry(1, 2)], "")


def test_passes_show_milliseconds_quartiles_and_the_roof():
  [axes] = laid_out(FIGURES["passes"]).axes
  drawn = lines(axes)
  assert [label.split(":")[0] for label in drawn] == [
    "batch 1",
    "batch 4",
    "roof",
  ]
  line = drawn["batch 4"]
  np.testing.assert_allclose(line.get_ydata(), [16, 32, 64, 128])
  [bars] = axes.containers[1].lines[2]
  np.testing.assert_allclose(bars.get_segments()[0], [[1, 15.2], [1, 19.2]])
  roofs = [
    other
    for other in axes.lines
    if other.get_linestyle() == "--" and other.get_color() == line.get_color()
  ]
  np.testing.assert_allclose(roofs[0].get_ydata(), [2] * 4)
  low, high = axes.get_xlim()
  ticks = [t.get_text() for t in axes.get_xticklabels()]
  shown = [t for t, x in zip(ticks, axes.get_xticks()) if low <= x <= high]
  assert shown == ["1", "2", "4", "8"]
  assert "milliseconds" in axes.get_ylabel()


def test_files_are_as_wide_as_a_page(tmp_path):
  plots.by_group([run(g) for g in GROUPS], tmp_path / "bars.png", "t", CAVEATS)
  plots.speed_over_k({"a": over_k(["all"])}, str(tmp_path / "k.png"), "t")
  plots.passes(ENTRIES, tmp_path / "passes.png", "t")
  for name in ("bars", "k", "passes"):
    with Image.open(tmp_path / f"{name}.png") as image:
      assert image.width == 1245 and 300 < image.height < 1000
      assert len(image.convert("RGB").getcolors(1 << 20)) > 10
  plots.by_group([run()], tmp_path / "bars.svg", "t")
  assert "<svg" in (tmp_path / "bars.svg").read_text()


def test_the_global_state_is_left_alone():
  assert "pyplot" not in inspect.getsource(plots)
