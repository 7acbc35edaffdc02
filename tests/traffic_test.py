"""Counts traffic and collectives of a hand-counted program."""

from specdec.compiled import hlo, traffic

# A weight of 2 x 128 bf16 from main memory, one brought on-chip beforehand; a
# cache of 64 x 8 f32 written in place, three times; both kinds of collectives.
TEXT = """\
HloModule jit_step, is_scheduled=true

%fused_update (param_0: f32[64,8], param_1: f32[1,8], param_2: s32[]) -> f32[64,8] {
  %param_0 = f32[64,8]{1,0:T(8,128)} parameter(0)
  %param_1 = f32[1,8]{1,0:T(8,128)} parameter(1)
  %param_2 = s32[]{:T(128)} parameter(2)
  %bitcast.1 = f32[64,8]{1,0:T(8,128)} bitcast(%param_0)
  %zero = s32[] constant(0)
  ROOT %update = f32[64,8]{1,0:T(8,128)} dynamic-update-slice(%bitcast.1, %param_1, %param_2, %zero)
}

%fused_read (p.0: bf16[2,128], p.1: bf16[2,128], p.2: f32[64,8]) -> f32[4,8] {
  %p.0 = bf16[2,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[2,128]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %p.2 = f32[64,8]{1,0:T(8,128)} parameter(2)
  %sum = bf16[2,128]{1,0} add(%p.0, %p.1)
  ROOT %part = f32[4,8]{1,0:T(8,128)} slice(%p.2), slice={[0:4], [0:8]}
}

%body (arg: (f32[64,8], s32[])) -> (f32[64,8], s32[]) {
  %arg = (f32[64,8]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %cache = f32[64,8]{1,0:T(8,128)} get-tuple-element(%arg), index=0
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=1
  %new = f32[1,8]{1,0:T(8,128)S(1)} constant({...})
  %written = f32[64,8]{1,0:T(8,128)} fusion(%cache, %new, %i), kind=kLoop, calls=%fused_update, metadata={op_name="jit(step)/write"}
  ROOT %out = (f32[64,8]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%written, %i)
}

%cond (arg.1: (f32[64,8], s32[])) -> pred[] {
  %arg.1 = (f32[64,8]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  ROOT %go = pred[]{:T(512)} constant(true)
}

ENTRY %main (a: bf16[2,128], b: bf16[2,128], c: f32[64,8], d: s32[]) -> f32[64,8] {
  %a = bf16[2,128]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[2,128]{1,0:T(8,128)(2,1)} parameter(1)
  %c = f32[64,8]{1,0:T(8,128)} parameter(2)
  %d = s32[]{:T(128)} parameter(3)
  %copy-start = (bf16[2,128]{1,0:T(8,128)(2,1)S(1)}, bf16[2,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b)
  %copy-done = bf16[2,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %read = f32[4,8]{1,0:T(8,128)S(1)} fusion(%a, %copy-done, %c), kind=kOutput, calls=%fused_read
  %all-reduce.1 = f32[4,8]{1,0:T(8,128)S(1)} all-reduce(%read), channel_id=1, replica_groups={{0,1}}, to_apply=%cond, metadata={op_name="jit(step)/sum"}
  %all-gather-start = (f32[4,8]{1,0:S(1)}, f32[8,8]{1,0:S(1)}) all-gather-start(%all-reduce.1), channel_id=2, dimensions={0}
  %all-gather-done = f32[8,8]{1,0:S(1)} all-gather-done(%all-gather-start)
  %start = (f32[64,8]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%c, %d)
  %loop = (f32[64,8]{1,0:T(8,128)}, s32[]{:T(128)}) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %result = f32[64,8]{1,0:T(8,128)} get-tuple-element(%loop), index=0
}
"""  # noqa: E501


def test_main_memory_is_counted_and_nothing_else():
  touched = {t.name: t for t in traffic.touches(hlo.Program(TEXT))}
  weight = 8 * 128 * 2  # padded to a tile
  tile = 8 * 128 * 4
  assert touched["copy-start"].read == weight  # it lands on-chip
  assert touched["copy-start"].written == 0
  # One weight, and the four rows of the cache that are looked at.
  assert touched["read"].read == weight + tile
  assert touched["read"].written == 0
  write = touched["written"]
  assert (write.read, write.written, write.times) == (4, tile, 3)  # its index
  assert write.source == "jit(step)/write"
  assert set(touched) == {"copy-start", "read", "written"}


def test_what_the_last_run_has_fetched_counts_once():
  def read(text):
    return sum(t.read for t in traffic.touches(hlo.Program(text)))

  first, last = "copy-start(%b)", "  ROOT %result"
  marked = TEXT.replace(first, first + ", cross_program_prefetch_index=0")
  kind = "(bf16[2,128]{1,0:T(8,128)(2,1)S(1)}, bf16[2,128]{1,0:T(8,128)(2,1)})"
  again = f"  %copy-start.1 = {kind} {first}\n{last}"
  size = 8 * 128 * 2  # of b, in whole tiles
  assert read(TEXT.replace(last, again)) == read(TEXT) + size
  assert read(marked.replace(last, again)) == read(TEXT) == read(marked)


def test_loops_of_unknown_length_count_as_asked():
  text = TEXT.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
  named = text.replace("while(%start), ", "while(%start), OP ").replace(
    "OP ", 'metadata={op_name="jit(step)/cache_blocks/while"}, '
  )
  for unknown, expected in (
    ({}, 1), ({"": 0}, 0), ({"": 5}, 5),
    ({"cache_blocks": 9, "": 5}, 9), ({"other": 7}, 1),
  ):  # fmt: skip
    touched = traffic.touches(hlo.Program(named), unknown)
    counts = {t.name: t.times for t in touched}
    assert counts.get("written", 0) == expected


def test_a_collective_in_several_fusions_counts_once():
  """The pieces of one have its channel; another channel is another one."""
  inside = "  %all-gather.{} = f32[8,8]{{1,0}} all-gather(%p), channel_id={}"
  called = (("one", 7), ("two", 7), ("three", 8))
  text = "\n".join(
    f"%{name} (p: f32[4,8]) -> f32[8,8] {{\n"
    "  %p = f32[4,8]{1,0} parameter(0)\n"
    f"{inside.format(name, channel)}\n}}\n"
    for name, channel in called
  )
  text += "ENTRY %main (a: f32[4,8]) -> f32[8,8] {\n"
  text += "  %a = f32[4,8]{1,0} parameter(0)\n"
  for name, _ in called:
    text += f"  %run.{name} = f32[8,8]{{1,0}} fusion(%a), calls=%{name}\n"
  found = traffic.exchanges(hlo.Program(text + "}\n"))
  assert traffic.by_kind(found) == {"all-gather": (2.0, 512.0)}


# A gather of 8 x 512 f32 by four chips that runs along with the passes of a
# loop: each fusion hands on its ends and shows a piece of it.
ALONG = """\
HloModule jit_step, is_scheduled=true

%begin (p: f32[8,128]) -> (f32[8,128], f32[8,512], s32[2]) {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %all-gather.1 = f32[8,512]{1,0:T(8,128)} all-gather(%p), channel_id=7, dimensions={1}
  ROOT %custom-call.1 = (f32[8,128]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}, s32[2]{0:S(4)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%piece (q.0: f32[8,128], q.1: f32[8,512], q.2: f32[8,256]) -> (f32[8,256], f32[8,128], f32[8,512], f32[8,512]) {
  %q.2 = f32[8,256]{1,0:T(8,128)} parameter(2)
  %own = f32[8,256]{1,0:T(8,128)} negate(%q.2)
  %q.0 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %q.1 = f32[8,512]{1,0:T(8,128)} parameter(1)
  %all-gather.2 = f32[8,512]{1,0:T(8,128)} all-gather(%q.0), channel_id=7, dimensions={1}
  ROOT %all = (f32[8,256]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}) tuple(%own, %q.0, %q.1, %all-gather.2)
}

%finish (r.0: f32[8,128], r.1: f32[8,512]) -> f32[8,512] {
  %r.0 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %r.1 = f32[8,512]{1,0:T(8,128)} parameter(1)
  %all-gather.3 = f32[8,512]{1,0:T(8,128)} all-gather(%r.0), channel_id=7, dimensions={1}
  ROOT %custom-call.2 = f32[8,512]{1,0:T(8,128)} custom-call(%r.0, %r.1, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%body (arg: (f32[8,128], f32[8,512], f32[8,256])) -> (f32[8,128], f32[8,512], f32[8,256]) {
  %arg = (f32[8,128]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) parameter(0)
  %from = f32[8,128]{1,0:T(8,128)} get-tuple-element(%arg), index=0
  %to = f32[8,512]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %x = f32[8,256]{1,0:T(8,128)} get-tuple-element(%arg), index=2
  %run = (f32[8,256]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}) fusion(%from, %to, %x), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {})}, calls=%piece
  %x.1 = f32[8,256]{1,0:T(8,128)} get-tuple-element(%run), index=0
  %from.1 = f32[8,128]{1,0:T(8,128)} get-tuple-element(%run), index=1
  %to.1 = f32[8,512]{1,0:T(8,128)} get-tuple-element(%run), index=2
  ROOT %out = (f32[8,128]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) tuple(%from.1, %to.1, %x.1)
}

%cond (arg.1: (f32[8,128], f32[8,512], f32[8,256])) -> pred[] {
  %arg.1 = (f32[8,128]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) parameter(0)
  ROOT %go = pred[]{:T(512)} constant(true)
}

ENTRY %main (a: f32[8,128], b: f32[8,256]) -> f32[8,512] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %b = f32[8,256]{1,0:T(8,128)} parameter(1)
  %start = (f32[8,128]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}, s32[2]{0:S(4)}) fusion(%a), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%begin
  %a.1 = f32[8,128]{1,0:T(8,128)} get-tuple-element(%start), index=0
  %g.1 = f32[8,512]{1,0:T(8,128)} get-tuple-element(%start), index=1
  %given = (f32[8,128]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) tuple(%a.1, %g.1, %b)
  %loop = (f32[8,128]{1,0:T(8,128)}, f32[8,512]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) while(%given), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %a.2 = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=0
  %g.2 = f32[8,512]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  ROOT %done = f32[8,512]{1,0:T(8,128)} fusion(%a.2, %g.2), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%finish
}
"""  # noqa: E501


def test_a_collective_that_runs_along_moves_its_bytes_once():
  row = 8 * 128 * 4
  found = traffic.touches(hlo.Program(ALONG))
  assert [(t.name, t.read, t.written, t.times) for t in found] == [
    ("start", row, 4 * row, 1),
    ("run", 2 * row, 2 * row, 3),
  ]


def test_a_parameter_that_is_copied_out_counts():
  """As a fusion's result that lies in no operand."""
  aliased = "{{1}: (0, {}), {2}: (1, {}), {3}: (1, {})}"
  text = ALONG.replace(f" output_to_operand_aliasing={aliased},", "")
  assert text != ALONG
  run = {t.name: t for t in traffic.touches(hlo.Program(text))}["run"]
  row = 8 * 128 * 4
  assert (run.read, run.written) == (7 * row, (7 + 4) * row)


def test_gathered_finds_whole_weights():
  def one(kind, *shape):
    return traffic.Exchange(kind, (shape,), 1.0, 1.0, "")

  shared_out = {(64, 32), (48, 32)}
  whole = one("all-gather", 1, 32, 64)
  others = one("all-gather", 64, 16), one("all-reduce", 64, 32)
  assert traffic.gathered([whole, *others], shared_out) == [whole]


def test_collectives_by_kind():
  exchanges = traffic.exchanges(hlo.Program(TEXT))
  assert [(x.kind, x.shape, x.bytes) for x in exchanges] == [
    ("all-reduce", ((4, 8),), 128.0),
    ("all-gather", ((8, 8),), 256.0),
  ]
  assert traffic.by_kind(exchanges) == {
    "all-gather": (1.0, 256.0),
    "all-reduce": (1.0, 128.0),
  }
  assert exchanges[0].source == "jit(step)/sum"
  assert traffic.exchanges(hlo.Program("HloModule nothing")) == []
