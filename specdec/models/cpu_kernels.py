"""Matrix products and attention on CPU in C++, built at first use.

XLA's products reach two thirds of the memory bandwidth at one token, and eight
tokens cost twice as much as one; its attention reads every slot of a cache.
Those of cpu_kernels.cc read every weight once for up to twelve tokens, and the
slots that are in use. They are compiled for this machine with its C++
compiler ($CXX, g++ or clang++; about five seconds) into
~/.cache/specdec/kernels; without one, or with SPECDEC_KERNELS=off, products go
through XLA. $CXX may have options, as in 'ccache g++'; $CXXFLAGS is appended to
the compiler's options.

Attention also takes scratch outside XLA's memory, for its queries in another
layout and for sums over segments of slots: about 4 MB each, or what the queries
of one row and four tasks a thread need, if that is more. Up to 16 MB of it are
kept for the next call.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specdec.types import Int8Slots
from specdec.utils import terminal

_FLOATS = jnp.dtype("float32"), jnp.dtype("bfloat16")  # of activations
BLOCK = 32  # outputs of a block of a packed matrix, as in cpu_kernels.cc
_SOURCE = Path(__file__).with_suffix(".cc")
_OPTIONS = "-O3 -march=native -std=c++17 -shared -fPIC -w"
# Elements a block holds for an input -> their types: two weights a byte, or one
# an element.
_STORED = {
  BLOCK // 2: (jnp.int8, jnp.uint8),
  BLOCK: (jnp.float32, jnp.bfloat16, jnp.int8),
}


@functools.cache
def available() -> bool:
  """Builds and registers the kernels; False where that cannot be done.

  The reason is printed once, on stderr.

  Raises:
    ValueError: SPECDEC_KERNELS is neither on nor off.
  """
  switch = os.environ.get("SPECDEC_KERNELS") or "on"
  if switch not in ("on", "off"):
    raise ValueError(f"SPECDEC_KERNELS is {switch!r}; it must be on or off")
  if switch == "off":
    return False
  try:
    library = ctypes.cdll.LoadLibrary(str(_build()))
    for name in ("specdec_project", "specdec_attend"):
      handler = jax.ffi.pycapsule(getattr(library, name))
      jax.ffi.register_ffi_target(name, handler, platform="cpu")
  except (OSError, subprocess.SubprocessError) as error:
    reason, remedy = str(error), "Install g++ or clang++ for them"
    if isinstance(error, subprocess.CalledProcessError):
      lines = error.stderr.decode(errors="replace").strip().splitlines()
      lines = lines[:3] or [f"exit status {error.returncode}"]
      reason = f"{error.cmd[0]} failed: {'; '.join(lines)}"
      remedy = "Name another compiler by CXX"
    elif isinstance(error, _NoFolder):
      remedy = "Set HOME to a folder that can be written"
    elif os.environ.get("CXX"):
      remedy = "Name another compiler by CXX, or unset it"
    terminal.report(
      f"specdec: no C++ kernels on this CPU ({reason}); matrix products go "
      "through XLA, which takes about twice as long for eight tokens. "
      f"{remedy}, or set SPECDEC_KERNELS=off to hide this line",
      sys.stderr,
    )
    return False
  return True


class _NoFolder(OSError):
  """The folder of compiled kernels cannot be written."""


def _compiler() -> list[str]:
  """Returns the words of the command that compiles C++."""
  named = os.environ.get("CXX", "")
  try:
    words = shlex.split(named)
  except ValueError as error:
    raise OSError(f"CXX is {named!r}: {error}") from None
  if words:
    return words
  found = shutil.which("g++") or shutil.which("clang++")
  if found is None:
    raise FileNotFoundError("neither g++ nor clang++ is installed")
  return [found]


def _build(folder: str | Path = "~/.cache/specdec/kernels") -> Path:
  """Returns the library for this machine, compiled unless `folder` has it.

  A library that is not the one that was compiled, as after a full disk or a
  power failure, is compiled again: loading it could kill the process.

  Raises:
    OSError: no compiler, or `folder` cannot be written.
    CalledProcessError: the compiler refused the source.
  """
  compiler = _compiler()
  options = [*_OPTIONS.split(), *os.environ.get("CXXFLAGS", "").split()]
  # What -march=native means here, as macros, and who compiles.
  query = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
  macros = subprocess.run(query, capture_output=True, check=True).stdout
  key = hashlib.sha256(_SOURCE.read_bytes() + macros)
  key.update(" ".join([*options, jax.lib.__version__]).encode())
  name = f"{key.hexdigest()[:16]}.so"
  try:
    library = Path(folder).expanduser() / name
    if _is_whole(library):
      return library
    library.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(dir=library.parent)
  except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
    raise _NoFolder(f"{folder}: {error}") from error
  with scratch as place:
    built = Path(place) / name
    include = f"-isystem{jax.ffi.include_dir()}"
    command = [*compiler, *options, include, str(_SOURCE), "-o", str(built)]
    subprocess.run(command, capture_output=True, check=True)
    digest = built.with_suffix(".sha256")
    digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
    # Other processes see a whole file or none.
    built.replace(library)
    digest.replace(library.with_suffix(".sha256"))
  return library


def _is_whole(library: Path) -> bool:
  """Whether a library is there, as it was compiled."""
  digest = library.with_suffix(".sha256")
  if not (library.is_file() and digest.is_file()):
    return False
  content = hashlib.sha256(library.read_bytes()).hexdigest()
  return digest.read_text() == content


def multiplies(weight: jax.Array, x: jax.Array) -> bool:
  """Whether `project` takes these arrays, and the kernels can be had."""
  return (
    weight.ndim == 3
    and weight.dtype in _STORED.get(weight.shape[2], ())
    and x.dtype in (jnp.float32, jnp.bfloat16)
    and available()
  )


def attends(query: jax.Array, keys: jax.Array) -> bool:
  """Whether `attend` takes these heads, and the kernels can be had."""
  dim = query.shape[-1]
  return (
    jax.default_backend() == "cpu"
    and dim % 32 == 0
    and dim <= 256
    and query.dtype in _FLOATS
    and keys.dtype in {*_FLOATS, jnp.dtype("int8")}
    and available()
  )


def project(
  x: jax.Array, *matrices: tuple[jax.Array | None, ...]
) -> list[jax.Array]:
  """Multiplies activations by packed matrices, with float32 sums.

  The result for a token does not depend, in any bit, on the other tokens. One
  call for several matrices hands out their blocks as if they were one.

  Args:
    x: [N, in] in float32 or bfloat16.
    matrices: each a weight, and if it has them its scale and offset. A weight
      is [out / 32, in, 32] in float32, bfloat16 or int8; or [out / 32, in, 16]
      with two weights a byte, int8 if they are signed, else uint8. With a scale
      [out / 32, groups, 32] the sums over each group of in / groups consecutive
      inputs are multiplied by it; an offset is as scale, and is added to the
      weights after it. None for ones, and for zeros.

  Returns:
    [N, out] in float32, for each of the matrices.
  """
  nothing = jnp.zeros((0, 1, BLOCK), jnp.float32)
  buffers, results = [], []
  for weight, *scales in matrices:
    _check_matrix(weight, x)
    _check_scales(weight, *scales)
    blocks = len(weight)
    buffers.append(weight)
    for scale in (*scales, None, None)[:2]:
      buffers.append(nothing if scale is None else scale.astype(jnp.float32))
    shape = len(x), blocks * BLOCK
    results.append(jax.ShapeDtypeStruct(shape, jnp.float32))
  call = jax.ffi.ffi_call("specdec_project", results, vmap_method="sequential")
  return call(x.astype(jnp.float32), *buffers)


def _check_matrix(weight: jax.Array, x: jax.Array) -> None:
  """Refuses a matrix that is not packed, or not for inputs x."""
  if weight.ndim != 3 or x.ndim != 2 or x.shape[1] != weight.shape[1]:
    raise ValueError(
      f"a packed matrix [out / {BLOCK}, in, {BLOCK}] and inputs [N, in] were "
      f"expected, not {weight.shape} and {x.shape}"
    )
  if not x.shape[1]:
    raise ValueError("a matrix without inputs; in >= 1 is expected")
  if weight.dtype not in _STORED.get(weight.shape[2], ()):
    stored = "; ".join(
      f"{block} of {', '.join(jnp.dtype(x).name for x in dtypes)}"
      for block, dtypes in _STORED.items()
    )
    raise ValueError(
      f"a packed matrix has blocks of {stored}; not {weight.shape[2]} of "
      f"{weight.dtype}"
    )


def _check_scales(weight: jax.Array, scale=None, offset=None) -> None:
  """Refuses scales and offsets that are not those of the weight."""
  blocks, width, _ = weight.shape
  groups = 0 if scale is None else scale.shape[1]
  if scale is None and offset is not None:
    raise ValueError("an offset goes with a scale")
  for x in (scale, offset):
    if x is not None and (
      x.shape != (blocks, groups, BLOCK) or groups < 1 or width % groups
    ):
      raise ValueError(
        f"scales [{blocks}, groups that divide {width}, {BLOCK}] were "
        f"expected, not {x.shape}"
      )


def attend(
  query: jax.Array,
  keys: jax.Array | Int8Slots,
  values: jax.Array | Int8Slots,
  length: jax.Array,
  ancestors: jax.Array,
  depth: jax.Array,
  bias: jax.Array | None = None,
  sink_logits: jax.Array | None = None,
  *,
  first: int = 0,
  window: int | None = None,
  sinks: int = 0,
  chunk: int | None = None,
  scale: float = 1.0,
  cap: float | None = None,
) -> jax.Array:
  """Computes attention of draft nodes, reading only slots in use.

  Args:
    query: [B, T, heads, D] in float32 or bfloat16: nodes first .. first + T.
    keys, values: [B, KV heads, S, D] in float32 or bfloat16, or Int8Slots.
    length: [B] committed slots; slot length + n holds node n.
    ancestors: [B or 1, N, N] bool, N = first + T; node n attends to node m.
    depth: [B or 1, N] int32 of every node.
    bias: [2 R + 1, heads] float32, added to the (capped) scores by how far the
      slot lies before the node in positions, from -R to R; None: none.
    sink_logits: [heads], another term of each softmax; None: none.
    window: positions of the sliding window, a node's included.
    sinks: first slots that are seen outside of the window.
    chunk: nothing is seen before the last multiple of it; None: all is.
    scale: multiplies the scores, before they are capped.
    cap: bounds the scores by cap * tanh(score / cap).

  Returns:
    As query, in float32.

  Raises:
    ValueError: an array is of another shape or type.
  """
  scales = [jnp.zeros(0, jnp.float32)] * 2
  if isinstance(keys, Int8Slots):
    scales = [keys.scale, values.scale]
    keys, values = keys.values, values.values
  _check_attention(query, keys, values, length, ancestors, depth, bias, first)
  result = jax.ShapeDtypeStruct(query.shape, jnp.float32)
  if bias is None:
    bias = jnp.zeros((0, query.shape[2]), jnp.float32)
  if sink_logits is None:
    sink_logits = jnp.zeros(0, jnp.float32)
  elif sink_logits.shape != query.shape[2:3]:
    raise ValueError(
      f"sink_logits {list(sink_logits.shape)}; there are {query.shape[2]} heads"
    )
  call = jax.ffi.ffi_call("specdec_attend", result, vmap_method="sequential")
  return call(
    query.astype(jnp.float32),
    keys,
    values,
    *scales,
    length,
    ancestors,
    depth,
    bias,
    sink_logits.astype(jnp.float32),
    first=np.int64(first),
    window=np.int64(window or 0),
    sinks=np.int64(sinks),
    chunk=np.int64(chunk or 0),
    scale=np.float32(scale),
    cap=np.float32(cap or 0.0),
  )


def _check_attention(
  query, keys, values, length, ancestors, depth, bias, first
) -> None:
  """Refuses arguments of `attend` that the kernel would read past the end."""
  if query.ndim != 4 or keys.ndim != 4 or query.shape[3] % BLOCK:
    raise ValueError(
      f"queries [B, T, heads, D], D a multiple of {BLOCK}, and keys [B, KV "
      f"heads, S, D] were expected, not {query.shape} and {keys.shape}"
    )
  batch, num_tokens, num_heads, dim = query.shape
  num_kv_heads, slots = keys.shape[1:3]
  if num_kv_heads < 1 or num_heads % num_kv_heads:
    raise ValueError(
      f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads"
    )
  cache = batch, num_kv_heads, slots, dim
  nodes, rows = first + num_tokens, {1, batch}
  stored = {*_FLOATS, jnp.dtype("int8")}
  integers, booleans = {jnp.dtype("int32")}, {jnp.dtype("bool")}
  expected = {
    "keys": (keys, {cache}, stored),
    "values": (values, {cache}, {keys.dtype}),
    "length": (length, {(batch,)}, integers),
    "ancestors": (ancestors, {(n, nodes, nodes) for n in rows}, booleans),
    "depth": (depth, {(n, nodes) for n in rows}, integers),
  }
  if bias is not None:
    odd = len(bias) - 1 + len(bias) % 2
    expected["bias"] = bias, {(odd, num_heads)}, {jnp.dtype("float32")}
  for name, (x, shapes, dtypes) in expected.items():
    if x.shape not in shapes or x.dtype not in dtypes:
      raise ValueError(
        f"{name} {x.dtype} {list(x.shape)} do not go with queries "
        f"{list(query.shape)} from node {first} on and keys {keys.dtype} "
        f"{list(keys.shape)}; expected: "
        f"{' or '.join(sorted(x.name for x in dtypes))} "
        f"{' or '.join(str(list(x)) for x in sorted(shapes))}"
      )
