"""Traces for XProf and TensorBoard, of a block or of some training steps."""

import contextlib

import jax

WAIT, COUNT = 10, 5  # steps of a call before those that are traced, and these


def trace(folder: str | None) -> contextlib.AbstractContextManager:
  """Returns a context that writes a trace into `folder`; None: none."""
  return jax.profiler.trace(folder) if folder else contextlib.nullcontext()


class Steps:
  """Traces COUNT steps of a training run, WAIT after its first."""

  def __init__(self, folder: str | None, first: int):
    self._folder, self._first = folder, first + WAIT
    self._stack = contextlib.ExitStack()

  def before(self, step: int, state: object) -> None:
    """Begins or ends the trace, once what came before the step has run."""
    if self._folder and step in (self._first, self._first + COUNT):
      jax.block_until_ready(state)
      self._stack.close()
      if step == self._first:
        self._stack.enter_context(trace(self._folder))

  def close(self) -> None:
    """Ends a trace that is shorter, of a run that ended."""
    self._stack.close()
