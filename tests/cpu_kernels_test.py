"""The C++ kernels compute what XLA computes, each row in bits of its own."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.models import attention, cpu_kernels
from specdec.types import Sparse

needs_kernels = pytest.mark.skipif(
  not cpu_kernels.available(), reason="no C++ compiler, or switched off"
)
DTYPES = jnp.float32, jnp.bfloat16, jnp.int8


@pytest.mark.skipif(
  os.environ.get("SPECDEC_KERNELS") == "off" or not shutil.which("g++"),
  reason="no compiler, or switched off",
)
def test_a_compiler_builds_the_kernels_with_this_jax():
  """Else the tests below would be skipped, and products go through XLA."""
  assert cpu_kernels.available()


@pytest.mark.skipif(
  os.environ.get("SPECDEC_KERNELS") == "off", reason="switched off"
)
def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch, capsys):
  compiler = tmp_path / "compiler"
  compiler.write_text("#!/bin/sh\necho 'no such architecture' >&2\nexit 1\n")
  compiler.chmod(0o755)
  monkeypatch.setenv("CXX", str(compiler))
  assert not cpu_kernels.available.__wrapped__()
  printed = " ".join(capsys.readouterr().err.split())
  assert f"{compiler} failed: no such architecture)" in printed
  assert "Name another compiler by CXX" in printed


@pytest.mark.skipif(
  os.environ.get("SPECDEC_KERNELS") == "off", reason="switched off"
)
@pytest.mark.parametrize(
  "named, reason",
  [
    ("no-such-compiler -m64", "'no-such-compiler') matrix"),
    ("'g++", """(CXX is "'g++": No closing quotation)"""),
  ],
)
def test_a_compiler_that_is_not_there_is_named(
  named, reason, monkeypatch, capsys
):
  monkeypatch.setenv("CXX", named)
  assert not cpu_kernels.available.__wrapped__()
  printed = " ".join(capsys.readouterr().err.split())
  assert reason.replace(") matrix", ");") in printed
  assert "Name another compiler by CXX, or unset it" in printed


@needs_kernels
def test_a_compiler_may_have_options(tmp_path, monkeypatch):
  monkeypatch.setenv("CXX", f"{shutil.which('env')} -u NOTHING g++")
  monkeypatch.setenv("CXXFLAGS", "-O0")
  assert cpu_kernels._build(tmp_path).parent == tmp_path


@pytest.mark.parametrize("switch", ["0", "false", "OFF"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(switch, monkeypatch):
  monkeypatch.setenv("SPECDEC_KERNELS", switch)
  with pytest.raises(ValueError, match=f"is '{switch}'; it must be on or off"):
    cpu_kernels.available.__wrapped__()


def random(seed: int, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
  x = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(np.round(40 * x) if dtype == jnp.int8 else x, dtype)


@needs_kernels
@pytest.mark.parametrize("num_tokens", [1, 5, 12, 13, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [None, 1, 3])
def test_products_equal_those_of_float64(num_tokens, dtype, groups):
  weight, x = random(0, (9, 96, 32), dtype), random(1, (num_tokens, 96))
  scale = None if groups is None else random(2, (9, groups, 32))
  (y,) = jax.jit(cpu_kernels.project)(x, (weight, scale))
  wide = np.float64(weight.astype(jnp.float32))
  if groups:
    wide *= np.repeat(np.float64(scale), 96 // groups, axis=1)
  expected = np.einsum("ti,bio->tbo", np.float64(x), wide)
  expected = expected.reshape(num_tokens, -1)
  np.testing.assert_allclose(y, expected, atol=2e-6 * abs(expected).max())


def nibbles(dtype, blocks=5, inputs=576, groups=18):
  """Random bytes, scales and offsets, and the weights [out, in] they mean."""
  rng = np.random.default_rng(0)
  raw = rng.integers(0, 256, (blocks, inputs, 16)).astype(np.uint8)
  scale = random(2, (blocks, groups, 32))
  offset = random(3, scale.shape) if dtype == jnp.uint8 else None
  four = np.concatenate([raw & 15, raw >> 4], axis=2).astype(np.float64)
  if dtype == jnp.int8:
    four -= 16 * (four > 7)
  width = inputs // groups
  four *= np.repeat(scale, width, axis=1)
  if offset is not None:
    four += np.repeat(offset, width, axis=1)
  return (jnp.asarray(raw).view(dtype), scale, offset), four


@needs_kernels
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_products_of_two_weights_a_byte(dtype, num_tokens):
  matrix, wide = nibbles(dtype)
  x = random(1, (num_tokens, 576))
  (y,) = jax.jit(cpu_kernels.project)(x, matrix)
  expected = np.einsum("ti,bio->tbo", np.float64(x), wide)
  expected = expected.reshape(num_tokens, -1)
  np.testing.assert_allclose(y, expected, atol=2e-6 * abs(expected).max())


@needs_kernels
@pytest.mark.parametrize("dtype", [*DTYPES, "int4", "uint4"])
def test_a_token_s_product_does_not_depend_on_the_others(dtype):
  x = random(1, (29, 576))
  if isinstance(dtype, str):
    matrix, _ = nibbles({"int4": jnp.int8}.get(dtype, jnp.uint8))
  else:
    matrix = (random(0, (5, 576, 32), dtype),)
  (together,) = cpu_kernels.project(x, matrix)
  for count in range(1, 29):
    (some,) = cpu_kernels.project(x[29 - count :], matrix)
    np.testing.assert_array_equal(some, together[29 - count :])


@needs_kernels
def test_several_matrices_give_the_bits_of_each():
  """Of several sizes and types, more than one thread's work."""
  x = random(1, (7, 576))
  matrices = [
    (random(2, (40, 576, 32)), None),
    (random(3, (3, 576, 32), jnp.bfloat16), None),
    (random(4, (90, 576, 32), jnp.int8), random(5, (90, 9, 32))),
    (random(6, (1, 576, 32)), random(7, (1, 1, 32))),
    nibbles(jnp.uint8)[0],
    nibbles(jnp.int8, blocks=80)[0],
  ]
  together = jax.jit(cpu_kernels.project)(x, *matrices)
  alone = [cpu_kernels.project(x, matrix)[0] for matrix in matrices]
  chex.assert_trees_all_equal(together, alone)


@needs_kernels
def test_products_in_loops_and_threads():
  """More work than one thread's, called again and again inside a program."""
  weight, x = random(0, (40, 1024, 32)) / 32, random(1, (4, 1024))

  @jax.jit
  def chain(x):
    def body(_, x):
      return jnp.tanh(cpu_kernels.project(x, (weight, None))[0][:, :1024])

    return jax.lax.fori_loop(0, 50, body, x)

  first = chain(x)
  for _ in range(20):
    np.testing.assert_array_equal(chain(x), first)


@pytest.mark.parametrize(
  "scales, sentence",
  [
    (((1, 1, 32),), "scales .2, groups that divide 6, 32. were"),
    (((2, 4, 32),), "not .2, 4, 32."),
    (((2, 3, 32), (2, 2, 32)), "not .2, 2, 32."),
    ((None, (2, 3, 32)), "an offset goes with a scale"),
  ],
)
def test_scales_of_other_weights_are_refused(scales, sentence):
  scales = [x if x is None else jnp.zeros(x) for x in scales]
  with pytest.raises(ValueError, match=sentence):
    cpu_kernels.project(jnp.zeros((1, 6)), (jnp.zeros((2, 6, 32)), *scales))


@pytest.mark.parametrize("x", [(4,), (2, 3)])
def test_shapes_are_refused_in_a_sentence(x):
  with pytest.raises(ValueError, match=r"inputs \[N, in\] were expected"):
    cpu_kernels.project(jnp.zeros(x), (jnp.zeros((2, 4, 32)), None))


@pytest.mark.parametrize(
  "dtype, block, sentence",
  [
    (jnp.float32, 16, "not 16 of float32"),
    (jnp.bfloat16, 16, "not 16 of bfloat16"),
    (jnp.uint8, 32, "not 32 of uint8"),
    (jnp.int8, 64, "16 of int8, uint8; 32 of float32, bfloat16, int8; not 64"),
  ],
)
def test_blocks_of_other_types_are_refused(dtype, block, sentence):
  """Of float32 with 16 outputs a block the kernel would read 32."""
  weight = jnp.ones((2, 64, block), dtype)
  with pytest.raises(ValueError, match=sentence):
    cpu_kernels.project(jnp.ones((1, 64)), (weight,))


NOTHING = np.zeros((0, 1, 32), np.float32)


@needs_kernels
@pytest.mark.parametrize(
  "shapes, results, sentence",
  [
    (((1, 64), (2, 64, 16)), 64, "weights are float32, bfloat16 or int8"),
    (((1, 64), (2, 32, 32)), 64, "a matrix is .out / 32, in, 32 or 16."),
    (((1, 64), (2, 64, 32)), 32, r"a result is \[N, out\]"),
    (((1, 64), (2, 64, 32), (1, 1, 32)), 64, "scales are .out / 32, groups"),
    (((1, 64), (2, 64, 32), (2, 3, 32)), 64, "scales are .out / 32, groups"),
    (
      ((1, 64), (2, 64, 32), (2, 2, 32), (2, 1, 32)),
      64,
      "offsets are as the scales",
    ),
  ],
)
def test_the_library_refuses_what_it_would_read_past(shapes, results, sentence):
  """Whoever calls it, and not by `project`."""
  buffers = [np.ones(shape, np.float32) for shape in shapes]
  buffers += [NOTHING] * (4 - len(buffers))
  result = [jax.ShapeDtypeStruct((1, results), jnp.float32)]
  with pytest.raises(Exception, match=sentence):
    jax.ffi.ffi_call("specdec_project", result)(*buffers)


# Batch, tokens, first, heads, KV heads, head dim, slots, window, cap, tree.
ATTENTION = [
  (1, 1, 0, 9, 3, 64, 512, None, None, False),
  (1, 8, 0, 9, 3, 64, 512, None, None, False),
  (3, 5, 2, 4, 2, 32, 300, None, None, True),
  (2, 6, 0, 4, 1, 256, 300, 40, None, True),
  (2, 40, 0, 4, 2, 64, 700, None, 50.0, False),
  (2, 7, 0, 4, 2, 96, 1100, 300, None, False),
]


def attention_case(case, dtype=jnp.float32):
  batch, tokens, first, heads, kv_heads, dim, slots, window, cap, tree = case
  nodes = first + tokens
  query = 2 * random(0, (batch, tokens, heads, dim))
  keys = random(1, (batch, kv_heads, slots, dim), dtype)
  values = random(2, (batch, kv_heads, slots, dim), dtype)
  rng = np.random.default_rng(3)
  length = jnp.asarray(rng.integers(0, slots - nodes, batch), jnp.int32)
  parents = None
  if tree:
    rows = [
      [-1, *(rng.integers(0, i) for i in range(1, nodes))] for _ in range(batch)
    ]
    parents = jnp.asarray(rows, jnp.int32)
  view = attention.view(length, parents, first, tokens, window)
  return query, keys, values, view, cap


def dense(query, keys, values, view, cap, sink_logits=None):
  """Attention by definition in float64, over every slot."""
  group = query.shape[2] // keys.shape[1]
  keys, values = (
    np.repeat(np.float64(x.astype(jnp.float32)), group, axis=1)
    for x in (keys, values)
  )
  x = np.einsum("bthd,bhsd->bhts", np.float64(query), keys) / 8
  x = x if cap is None else cap * np.tanh(x / cap)
  if view.bias is not None:
    x = x + np.float64(view.bias_of(jnp.arange(keys.shape[2])))
  mask = np.asarray(view.mask_of(jnp.arange(keys.shape[2])))
  x = np.where(mask[:, None], x, -np.inf)
  if sink_logits is not None:
    sink = np.float64(sink_logits)[None, :, None, None]
    x = np.concatenate([x, np.broadcast_to(sink, (*x.shape[:3], 1))], axis=-1)
    values = np.pad(values, ((0, 0), (0, 0), (0, 1), (0, 0)))
  x = np.exp(x - x.max(-1, keepdims=True))
  y = np.einsum("bhts,bhsd->bthd", x / x.sum(-1, keepdims=True), values)
  return y.reshape(*query.shape[:2], -1)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["kernel", "xla"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_equals_its_definition(case, dtype, on_mesh):
  *arrays, view, cap = attention_case(case, dtype)
  attend = functools.partial(attention.attend, scale=1 / 8, on_mesh=on_mesh)
  y = jax.jit(lambda *arrays: attend(*arrays, view, cap=cap))(*arrays)
  # The weights of bfloat16 values are rounded too, by XLA.
  rounded = on_mesh and dtype == jnp.bfloat16
  np.testing.assert_allclose(
    y, dense(*arrays, view, cap), atol=2e-2 if rounded else 2e-5
  )


@pytest.mark.parametrize("on_mesh", [False, True], ids=["kernel", "xla"])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_with_a_bias_by_relative_position(case, on_mesh):
  *arrays, view, cap = attention_case(case)
  reach, heads = 30, arrays[0].shape[2]
  bias = jax.random.normal(jax.random.key(5), (2 * reach + 1, heads))
  view = view._replace(bias=2 * bias)
  attend = functools.partial(attention.attend, scale=1 / 8, on_mesh=on_mesh)
  y = jax.jit(lambda *arrays: attend(*arrays, view, cap=cap))(*arrays)
  np.testing.assert_allclose(y, dense(*arrays, view, cap), atol=2e-5)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["kernel", "xla"])
@pytest.mark.parametrize("chunk, near", [(7, None), (130, None), (130, 40)])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_to_chunks(case, chunk, near, on_mesh):
  """And to a part of each, as drafters.sparse reads them."""
  *arrays, view, cap = attention_case(case)
  view = view._replace(window=None)
  slots = jnp.arange(arrays[1].shape[2])
  whole, position = view.mask_of(slots), view.positions[:, :, None]
  of_slot = position - view.distance(slots)
  seen = whole & (of_slot // chunk == position // chunk)
  view = view._replace(chunk=chunk)
  if near is not None:
    view = view.sparse(Sparse(near))
    seen &= view.distance(slots) < near
  np.testing.assert_array_equal(view.mask_of(slots), seen)
  attend = functools.partial(attention.attend, scale=1 / 8, on_mesh=on_mesh)
  y = jax.jit(lambda *arrays: attend(*arrays, view, cap=cap))(*arrays)
  np.testing.assert_allclose(y, dense(*arrays, view, cap), atol=2e-5)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["kernel", "xla"])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_with_another_logit_in_the_softmax(case, on_mesh):
  *arrays, view, cap = attention_case(case)
  logits = 8 + 3 * random(5, arrays[0].shape[2:3])
  attend = functools.partial(attention.attend, scale=1 / 8, on_mesh=on_mesh)
  y = jax.jit(
    lambda *arrays: attend(*arrays, view, cap=cap, sink_logits=logits)
  )(*arrays)
  expected = dense(*arrays, view, cap, logits)
  np.testing.assert_allclose(y, expected, atol=2e-5)
  assert np.abs(expected - dense(*arrays, view, cap)).max() > 0.1


@pytest.mark.parametrize("on_mesh", [False, True], ids=["kernel", "xla"])
@pytest.mark.parametrize("sinks", [1, 130])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_to_the_first_and_the_last_positions(case, sinks, on_mesh):
  *arrays, view, cap = attention_case(case)
  slots = arrays[1].shape[2]
  whole = view.mask_of(jnp.arange(slots))
  window = 20 if view.window is None else view.window
  view = view.sparse(Sparse(20, sinks))
  seen = view.mask_of(jnp.arange(slots))
  sinks = 0 if window != 20 else sinks  # of layers without a window
  for mask, distance, every in zip(
    seen, view.distance(jnp.arange(slots)), whole
  ):
    near = np.asarray(distance) < min(20, window)
    near[:, :sinks] = True
    np.testing.assert_array_equal(mask, near & every)
  attend = functools.partial(attention.attend, scale=1 / 8, on_mesh=on_mesh)
  y = jax.jit(lambda *arrays: attend(*arrays, view, cap=cap))(*arrays)
  np.testing.assert_allclose(y, dense(*arrays, view, cap), atol=2e-5)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["kernel", "xla"])
def test_what_lies_between_the_first_and_the_last_positions_is_not_read(
  on_mesh,
):
  query = random(0, (2, 1, 4, 64))
  keys, values = random(1, (2, 2, 2048, 64)), random(2, (2, 2, 2048, 64))
  view = attention.view(jnp.array([2000, 1900]), None, 0, 1)
  view = view.sparse(Sparse(300))
  attend = functools.partial(attention.attend, scale=1 / 8, on_mesh=on_mesh)
  between = slice(512, 1536)
  spoiled = (x.at[:, :, between].set(jnp.nan) for x in (keys, values))
  chex.assert_trees_all_equal(
    attend(query, *spoiled, view), attend(query, keys, values, view)
  )


def test_the_bias_of_a_tree_by_hand():
  """Six committed slots; node 3, a grandchild, is at position 8."""
  parents = jnp.array([[-1, 0, 0, 1]])
  view = attention.view(jnp.array([6]), parents, 0, 4)
  distance = view.distance(jnp.array([4, 5, 6, 7, 8, 9]))
  np.testing.assert_array_equal(distance[0, 3], [4, 3, 2, 1, 1, 0])
  bias = jnp.arange(5.0)[:, None] - 2  # of heads, the distance up to 2
  biases = view._replace(bias=bias).bias_of(jnp.array([4, 8, 9]))
  np.testing.assert_array_equal(biases[0, 0, 3], [2, 1, 0])
  np.testing.assert_array_equal(biases[0, 0, 0], [2, -1, -2])


@pytest.mark.parametrize("on_mesh", [False, True], ids=["kernel", "xla"])
def test_attention_to_a_source_sees_all_of_it_and_no_more(on_mesh):
  query = random(0, (3, 5, 4, 32))
  keys, values = random(1, (3, 4, 9, 32)), random(2, (3, 4, 9, 32))
  view = attention.source_view(jnp.array([9, 1, 4]), 5)
  mask = view.mask_of(jnp.arange(9))
  np.testing.assert_array_equal(mask.sum(-1), [[9] * 5, [1] * 5, [4] * 5])
  y = attention.attend(query, keys, values, view, scale=1 / 8, on_mesh=on_mesh)
  expected = dense(query, keys, values, view, None)
  np.testing.assert_allclose(y, expected, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("window", [None, 100])
def test_attention_of_a_node_does_not_depend_on_rows_later_nodes_or_slots(
  window,
):
  query = random(0, (3, 5, 4, 64))
  keys, values = random(1, (3, 2, 1300, 64)), random(2, (3, 2, 1300, 64))
  length = jnp.array([3, 1200, 600], jnp.int32)
  view = attention.view(length, None, 0, 5, window)
  together = attention.attend(query, keys, values, view, scale=0.125)
  for row in range(3):
    for count in range(1, 6):
      rows = slice(row, row + 1)
      slots = slice(int(length[row]) + count)
      alone = attention.attend(
        query[rows, :count],
        keys[rows, :, slots],
        values[rows, :, slots],
        attention.view(length[rows], None, 0, count, window),
        scale=0.125,
      )
      np.testing.assert_array_equal(alone, together[rows, :count])


@needs_kernels
def test_attention_of_a_node_does_not_depend_on_how_many_nodes_share_scratch():
  """Of 64 nodes a wave is 26 segments, of one all of them."""
  query = random(0, (2, 64, 9, 64))
  keys, values = random(1, (2, 3, 4300, 64)), random(2, (2, 3, 4300, 64))
  length = jnp.array([4236, 2900], jnp.int32)
  view = attention.view(length, None, 0, 64)
  together = attention.attend(query, keys, values, view, scale=0.125)
  expected = dense(query, keys, values, view, None)
  np.testing.assert_allclose(together, expected, atol=2e-5)
  for node in (0, 37, 63):
    alone = attention.attend(
      query[:, node : node + 1],
      keys,
      values,
      attention.view(length + node, None, 0, 1),
      scale=0.125,
    )
    np.testing.assert_array_equal(alone[:, 0], together[:, node])


def kernel_arguments(batch=2, nodes=5, heads=4, dim=32, slots=40):
  """Of cpu_kernels.attend: a tree a row."""
  view = attention.view(
    jnp.arange(7, 7 + batch, dtype=jnp.int32),
    jnp.array([[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]])[:batch, :nodes],
    0,
    nodes,
  )
  return {
    "query": random(0, (batch, nodes, heads, dim)),
    "keys": random(1, (batch, 2, slots, dim)),
    "values": random(2, (batch, 2, slots, dim)),
    "length": view.length,
    "ancestors": view.ancestors,
    "depth": view.depth,
    "bias": random(3, (7, heads)),
  }


@needs_kernels
def test_rows_may_share_depths_or_ancestors_alone():
  arrays = kernel_arguments()
  for name, other in (("depth", "ancestors"), ("ancestors", "depth")):
    shared = arrays[name][:1]
    repeated = jnp.broadcast_to(shared, arrays[name].shape)
    assert np.any(arrays[other][0] != arrays[other][1])
    np.testing.assert_array_equal(
      cpu_kernels.attend(**arrays | {name: shared}, window=4),
      cpu_kernels.attend(**arrays | {name: repeated}, window=4),
    )


def without_one(x, axis):
  return jax.lax.slice_in_dim(x, 0, x.shape[axis] - 1, axis=axis)


CHANGES = [
  ({"values": lambda x: x.astype(jnp.bfloat16)}, "expected: float32 .2, 2, 40"),
  ({"values": lambda x: without_one(x, 2)}, "values float32 .2, 2, 39, 32. do"),
  (
    {"keys": lambda x: x.astype(jnp.float16)},
    "bfloat16 or float32 or int8 .2, 2, 40",
  ),
  ({"keys": lambda x: x[:1], "values": lambda x: x[:1]}, "keys float32 .1, 2"),
  (
    dict.fromkeys(("query", "keys", "values"), lambda x: x[..., :24]),
    "D a multiple of 32, .* not .2, 5, 4, 24. and .2, 2, 40, 24.",
  ),
  ({"query": lambda x: x[:, :, :3]}, "3 query heads are not a multiple of 2"),
  ({"length": lambda x: x[:1]}, "length int32 .1. do not go with"),
  ({"ancestors": lambda x: without_one(x, 2)}, "expected: bool .1, 5, 5. or"),
  (
    {"depth": lambda x: without_one(x, 1)},
    "depth int32 .2, 4. .*expected: int",
  ),
  ({"bias": lambda x: without_one(x, 0)}, "expected: float32 .5, 4."),
  ({"bias": lambda x: without_one(x, 1)}, "expected: float32 .7, 4."),
  ({"first": lambda _: 1}, "queries .2, 5, 4, 32. from node 1 on"),
]


@pytest.mark.parametrize("changes, sentence", CHANGES)
def test_attention_refuses_arrays_that_do_not_go_together(changes, sentence):
  arrays = kernel_arguments() | {"first": 0}
  changed = {name: change(arrays[name]) for name, change in changes.items()}
  with pytest.raises(ValueError, match=sentence):
    cpu_kernels.attend(**arrays | changed)


@needs_kernels
@pytest.mark.parametrize("changes, _", CHANGES)
def test_the_library_refuses_them_too(changes, _, monkeypatch):
  monkeypatch.setattr(cpu_kernels, "_check_attention", lambda *_: None)
  arrays = kernel_arguments() | {"first": 0}
  changed = {name: change(arrays[name]) for name, change in changes.items()}
  with pytest.raises(
    Exception, match=r"queries are|ancestors are|a bias is|and values are"
  ):
    cpu_kernels.attend(**arrays | changed)


@needs_kernels
@pytest.mark.parametrize("length", [-1000, -3, 41, 10000])
def test_a_length_outside_the_cache_harms_no_other_row(length):
  arrays = kernel_arguments()
  expected = cpu_kernels.attend(**arrays, window=9)
  lengths = jnp.array([length, arrays["length"][1]], jnp.int32)
  y = cpu_kernels.attend(**arrays | {"length": lengths}, window=9)
  np.testing.assert_array_equal(y[1], expected[1])


@needs_kernels
def test_scratch_does_not_grow_with_the_cache():
  """Sums over all 167 segments at once would be 51 MB."""
  code = """if True:
    import jax, jax.numpy as jnp
    from specdec.models import attention

    def resident():
      pages = open("/proc/self/statm").read().split()[1]
      return int(pages) * 4096 / 2**20

    query, keys = jnp.ones((1, 128, 9, 64)), jnp.ones((1, 3, 16384, 64))
    values, view = keys + 1, attention.view
    attend = jax.jit(lambda length, *arrays: attention.attend(
      *arrays, view(length, None, 0, 128), scale=1.0))
    arrays = query, keys, values
    attend(jnp.array([1]), *arrays).block_until_ready()
    before = resident()
    attend(jnp.array([16000]), *arrays).block_until_ready()
    print(resident() - before)
  """
  assert float(_run(code).stdout) < 16


@needs_kernels
def test_slots_past_the_nodes_are_not_read():
  *arrays, view, _ = attention_case((1, 3, 0, 4, 2, 32, 700, None, None, False))
  used = int(view.length[0]) + 3
  expected = attention.attend(*arrays, view, scale=1.0)
  query, keys, values = arrays
  y = attention.attend(
    query,
    keys.at[:, :, used:].set(jnp.nan),
    values.at[:, :, used:].set(jnp.nan),
    view,
    scale=1.0,
  )
  np.testing.assert_array_equal(y, expected)


@chex.assert_max_traces(n=1)
def _attend(query, keys, values, length):
  view = attention.view(length, None, 0, query.shape[1], 600)
  return attention.attend(query, keys, values, view, scale=1 / 8, on_mesh=True)


def test_one_trace_reads_the_blocks_of_any_length():
  """Slots no row has reached, or the window has left, are not multiplied."""
  query, slots = random(0, (2, 3, 4, 32)), 5 * attention.BLOCK
  keys, values = random(1, (2, 2, slots, 32)), random(2, (2, 2, slots, 32))
  attend = jax.jit(_attend)
  for length in ([0, 7], [700, 900], [2100, 2500]):
    length = jnp.array(length, jnp.int32)
    view = attention.view(length, None, 0, 3, 600)
    first, end = (int(i) * attention.BLOCK for i in view.blocks(slots))
    assert first <= max(0, int(length.min()) - 599)
    assert length.max() + 3 <= end <= length.max() + 3 + attention.BLOCK
    unread = jnp.ones(slots, bool).at[first:end].set(False)[:, None]
    y = attend(
      query,
      jnp.where(unread, jnp.nan, keys),
      jnp.where(unread, jnp.nan, values),
      length,
    )
    expected = dense(query, keys, values, view, None)
    np.testing.assert_allclose(y, expected, atol=5e-6)


@pytest.mark.parametrize("slots", [40, 5 * attention.BLOCK])
def test_a_value_may_be_a_part_of_its_key(slots):
  """As if the whole key were kept beside it, in one block and in several."""
  length = jnp.array([9, 30] if slots == 40 else [700, 2100], jnp.int32)
  view = attention.view(length, None, 0, 3, 600)
  query, value_query = random(0, (2, 3, 4, 8)), random(1, (2, 3, 4, 12))
  keys, values = random(2, (2, 1, slots, 8)), random(3, (2, 1, slots, 12))
  y = attention.attend(
    query, keys, values, view, scale=1 / 8, value_query=value_query
  )
  query = jnp.concatenate([query, value_query], axis=-1)
  keys = jnp.concatenate([keys, values], axis=-1)
  values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, 8)))
  expected = dense(query, keys, values, view, None)
  expected = expected.reshape(2, 3, 4, 20)[..., :12].reshape(2, 3, -1)
  np.testing.assert_allclose(y, expected, atol=5e-6)


def _run(code: str, **environment: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    check=True,
  )


def test_without_a_compiler_one_line_says_so(tmp_path):
  code = (
    "from specdec.models import cpu_kernels as k;"
    "print(k.available(), k.available())"
  )
  home = {"HOME": str(tmp_path), "CXX": ""}
  none = _run(code, PATH="", SPECDEC_KERNELS="on", **home)
  assert none.stdout == "False False\n"
  assert none.stderr.count("\n") == 1 and "Install g++" in none.stderr
  broken = _run(code, SPECDEC_KERNELS="on", HOME=str(tmp_path), CXX="false")
  assert broken.stdout == "False False\n" and broken.stderr.count("\n") == 1
  off = _run(code, PATH="", SPECDEC_KERNELS="off", **home)
  assert (off.stdout, off.stderr) == ("False False\n", "")


@pytest.mark.slow
@needs_kernels
def test_processes_that_build_at_once_share_one_library(tmp_path):
  code = "from specdec.models import cpu_kernels as k; assert k.available()"
  command = [sys.executable, "-c", code]
  environment = {**os.environ, "HOME": str(tmp_path)}
  several = [subprocess.Popen(command, env=environment) for _ in range(2)]
  assert [process.wait() for process in several] == [0, 0]
  assert len(list(tmp_path.glob(".cache/specdec/kernels/*.so"))) == 1


@needs_kernels
@pytest.mark.parametrize(
  "count", [20_000, *(pytest.param(x, marks=pytest.mark.slow) for x in (0, -1))]
)
def test_a_damaged_library_is_built_again(count, tmp_path, monkeypatch):
  monkeypatch.setenv("CXXFLAGS", "-O0")
  library = cpu_kernels._build(tmp_path)
  whole = library.read_bytes()
  library.write_bytes(whole[:count] if count >= 0 else whole + b"x")
  assert cpu_kernels._build(tmp_path) == library
  assert library.read_bytes() == whole
  library.with_suffix(".sha256").unlink()
  assert cpu_kernels._build(tmp_path) == library


def test_no_place_for_the_library_is_said_so(tmp_path, monkeypatch, capsys):
  (tmp_path / "home").write_text("a file")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  assert not cpu_kernels.available.__wrapped__()
  printed = " ".join(capsys.readouterr().err.split())
  assert "Set HOME to a folder that can be written" in printed

  def homeless(path):
    raise RuntimeError("Could not determine home directory.")

  monkeypatch.setattr(Path, "expanduser", homeless)
  assert not cpu_kernels.available.__wrapped__()
  assert "Could not determine home directory" in capsys.readouterr().err


def test_a_compiler_that_says_nothing_is_named(monkeypatch, capsys):
  monkeypatch.setenv("CXX", "false")
  assert not cpu_kernels.available.__wrapped__()
  assert "false failed: exit status 1" in capsys.readouterr().err


@needs_kernels
def test_kernels_are_mapped_like_any_function():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(3, 2, 16)), jnp.float32)
  weight = jnp.asarray(rng.normal(size=(1, 16, 32)), jnp.float32)
  [several] = jax.vmap(lambda x: cpu_kernels.project(x, (weight,)))(x)
  for part, alone in zip(several, x):
    [expected] = cpu_kernels.project(alone, (weight,))
    np.testing.assert_array_equal(part, expected)


@needs_kernels
def test_a_matrix_without_inputs_is_refused():
  weight = jnp.zeros((2, 0, 32))
  with pytest.raises(ValueError, match="in >= 1"):
    cpu_kernels.project(jnp.zeros((1, 0)), (weight,))


def compiled(folder: Path, *options: str) -> Path:
  """Compiles tools/kernel_race.cc, and the kernels with it."""
  source = Path(__file__).parent / "tools" / "kernel_race.cc"
  program = folder / "kernel_race"
  command = ["g++", "-std=c++17", "-march=native", "-w", *options]
  include = ["-isystem", jax.ffi.include_dir()]
  subprocess.run([*command, *include, source, "-o", program], check=True)
  return program


needs_gcc = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@needs_gcc
def test_a_call_that_waits_leaves_the_processor_to_others(tmp_path):
  program = compiled(tmp_path, "-O0")
  printed = subprocess.run([program, "wait"], capture_output=True, text=True)
  assert printed.returncode == 0 and float(printed.stdout) < 0.3


@needs_gcc
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_report_nothing(tmp_path, sanitizer):
  program = compiled(tmp_path, "-O1", "-g", f"-fsanitize={sanitizer}")
  result = subprocess.run([program], capture_output=True, text=True)
  assert result.stdout == "0 of 240 results differ\n"
  assert (result.returncode, result.stderr) == (0, "")
