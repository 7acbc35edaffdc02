// Matrix products and attention of a few tokens, at the speed of memory.
//
// All of it is sums over products of a scalar and 32 numbers that lie side by
// side, for up to kTile rows at once, whose sums stay in registers. A row's sums
// are taken in the same order whatever the number of rows, so that its result
// does not depend on its neighbours in any bit.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// A register of AVX-512; elsewhere the compiler splits it.
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));

constexpr int kBlock = 32;  // outputs of a block of weights: two Lanes
#if defined(__AVX512F__)
constexpr int kTile = 12;  // 24 sums in 32 registers
#else
constexpr int kTile = 3;  // AVX2: 12 sums in 16 registers
#endif
constexpr int kSegment = 96;              // cache slots of one task
constexpr int kPrefetch = 8192;           // bytes ahead
constexpr int64_t kChunkBytes = 1 << 16;  // least work worth a hand-over
constexpr int kSpins = 1 << 10;           // before a thread yields: some 20 us
constexpr int64_t kScratch = 1 << 20;     // floats of each kind of scratch
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Float32 {
  typedef float Stored;
  static float One(float x) { return x; }
  static Lanes Load(const float* p) {
    Lanes lanes;
    std::memcpy(&lanes, p, sizeof(lanes));
    return lanes;
  }
};

struct BFloat16 {
  typedef uint16_t Stored;
  static float One(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static Lanes Load(const uint16_t* p) {
    typedef uint16_t Narrow __attribute__((vector_size(32)));
    typedef uint32_t Wide __attribute__((vector_size(64)));
    Narrow bits;
    std::memcpy(&bits, p, sizeof(bits));
    return (Lanes)(__builtin_convertvector(bits, Wide) << 16);
  }
};

struct Int8 {
  typedef int8_t Stored;
  static Lanes Load(const int8_t* p) {
#if defined(__AVX512F__)  // GCC 12 would widen bytes one at a time
    return (Lanes)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    Lanes lanes;
    for (int i = 0; i < 16; ++i) lanes[i] = p[i];
    return lanes;
#endif
  }
};

// Two weights a byte: bits 0 to 3 of byte i are of output i of a block, bits 4
// to 7 of output i + 16; in two's complement or from 0 to 15.
template <bool kSigned>
struct Nibble {
  typedef uint8_t Stored;
  static Lanes Load(const uint8_t* p, int half) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    const IntLanes wide = (IntLanes)_mm512_cvtepi8_epi32(bytes);
#else
    IntLanes wide;
    for (int i = 0; i < 16; ++i) wide[i] = static_cast<int8_t>(p[i]);
#endif
    const IntLanes four = half ? wide >> 4 : (wide << 28) >> 28;
    return __builtin_convertvector(kSigned ? four : four & 15, Lanes);
  }
};

// Elements that hold 32 weights, and the lanes of half of them.
template <typename W>
constexpr int kStored = kBlock;
template <bool kSigned>
constexpr int kStored<Nibble<kSigned>> = kBlock / 2;

template <typename W>
inline Lanes LoadHalf(const typename W::Stored* w, int half) {
  if constexpr (kStored<W> < kBlock) {
    return W::Load(w, half);
  } else {
    return W::Load(w + 16 * half);
  }
}

// Memory to prefetch while sums are computed: two cache lines a step.
struct Ahead {
  const void* next;
  int64_t pace;  // bytes from one step to the next
};

// sum[r] += x[r * row + i * step] * w[i * stride + lane], for i = 0 .. n - 1.
template <typename W, typename X, int kRows, int kLanes>
inline void Accumulate(const typename W::Stored* w, int64_t stride,
                       const typename X::Stored* x, int64_t row, int64_t step,
                       int64_t n, Ahead ahead, Lanes (&sum)[kRows][kLanes]) {
  const char* next = static_cast<const char*>(ahead.next);
  for (int64_t i = 0; i < n; ++i, w += stride, next += ahead.pace) {
    __builtin_prefetch(next);
    __builtin_prefetch(next + 64);
    Lanes weight[kLanes];
    for (int l = 0; l < kLanes; ++l) weight[l] = LoadHalf<W>(w, l);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const float scalar = X::One(x[r * row + i * step]);
      for (int l = 0; l < kLanes; ++l) sum[r][l] += weight[l] * scalar;
    }
  }
}

// Calls f(first, rows) for tiles of at most kTile of `count` rows.
template <typename F>
inline void ForTiles(int64_t count, F f) {
  const int64_t tiles = (count + kTile - 1) / kTile;
  for (int64_t i = 0; i < tiles; ++i) {  // of nearly equal sizes
    const int64_t first = count * i / tiles;
    f(first, count * (i + 1) / tiles - first);
  }
}

template <int kRows = kTile, typename F>
inline void WithRows(int64_t rows, F f) {
  if (rows == kRows) return f(std::integral_constant<int, kRows>());
  if constexpr (kRows > 1) WithRows<kRows - 1>(rows, f);
}

// Runs work(i) for every i < count on the caller and on XLA's own threads. No
// thread waits for one that has not begun: the caller can finish all alone.
template <typename Pool, typename Work>
void ForEach(Pool& pool, int64_t count, int64_t bytes, Work work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t worth = (bytes + kChunkBytes - 1) / kChunkBytes;
  const int64_t helpers =
      std::min({count, worth, static_cast<int64_t>(pool.num_threads())}) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  auto state = std::make_shared<State>();
  state->next.store(0, std::memory_order_release);  // after the caller's writes
  auto run = [state, count, work] {
    int64_t finished = 0;
    for (int64_t i; (i = state->next.fetch_add(1)) < count; ++finished) work(i);
    state->done.fetch_add(finished, std::memory_order_release);
  };
  // Helpers that spin until the next product comes were tried: the work between
  // products got so much slower that a pass took an eighth longer.
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([run] { run(); });
  run();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count;) {
    if (spins == kSpins) {  // a helper may need this processor
      std::this_thread::yield();
      continue;
    }
    ++spins;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

// Memory of one call. The next call gets it too, since a page that is new to
// the process costs more to touch, unless it is large.
class Scratch {
 public:
  Scratch() {
    std::lock_guard<std::mutex> lock(Mutex());
    if (Idle().empty()) return;
    kept_ = std::move(Idle().back());
    Idle().pop_back();
  }
  ~Scratch() {
    if (kept_.size > 4 * kScratch) return;
    std::lock_guard<std::mutex> lock(Mutex());
    Idle().push_back(std::move(kept_));
  }
  float* Floats(int64_t count) {  // of any value
    if (count > kept_.size) {
      kept_.floats.reset();
      kept_ = {std::unique_ptr<float[]>(new float[count]), count};
    }
    return kept_.floats.get();
  }

 private:
  struct Kept {
    std::unique_ptr<float[]> floats;
    int64_t size = 0;
  };
  static std::mutex& Mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::vector<Kept>& Idle() {  // as many as calls ran at once
    static auto* idle = new std::vector<Kept>;
    return *idle;
  }
  Kept kept_;
};

// --- Products y[t, o] = sum_i x[t, i] * w[o, i], w in [out / 32, in, 32], of
// one x and several w. ---

struct Product {
  const void* weight = nullptr;
  const float* scale = nullptr;  // [blocks, groups, 32], or null
  const float* x = nullptr;      // [tokens, in]
  float* y = nullptr;            // [tokens, blocks * 32]
  int64_t tokens = 0, in = 0, blocks = 0, groups = 1;
  const float* offset = nullptr;  // as scale: w = scale * weight + offset
  const float* sums = nullptr;    // [tokens, groups] of x, with an offset
  void (*block)(const Product&, int64_t) = nullptr;
  int64_t bytes = 0;     // of the weights of a block
  int64_t together = 1;  // blocks of one task
};

template <typename W>
void Block(const Product& p, int64_t block) {
  typedef typename W::Stored Stored;
  const int64_t width = p.in / p.groups;
  const Stored* w =
      static_cast<const Stored*>(p.weight) + block * p.in * kStored<W>;
  const auto ahead = [](const Stored* from) {
    return Ahead{from + kPrefetch / sizeof(Stored),
                 kStored<W> * sizeof(Stored)};
  };
  ForTiles(p.tokens, [&](int64_t first, int64_t rows) {
    WithRows(rows, [&](auto number) {
      constexpr int kRows = decltype(number)::value;
      const float* x = p.x + first * p.in;
      Lanes total[kRows][2] = {};
      if (p.scale == nullptr) {
        Accumulate<W, Float32>(w, kStored<W>, x, p.in, 1, p.in, ahead(w),
                               total);
      }
      for (int64_t g = 0; p.scale != nullptr && g < p.groups; ++g) {
        Lanes sum[kRows][2] = {};
        const Stored* part = w + g * width * kStored<W>;
        Accumulate<W, Float32>(part, kStored<W>, x + g * width, p.in, 1, width,
                               ahead(part), sum);
        const float* s = p.scale + (block * p.groups + g) * kBlock;
        const Lanes low = Float32::Load(s), high = Float32::Load(s + 16);
        for (int r = 0; r < kRows; ++r) {
          total[r][0] += sum[r][0] * low;
          total[r][1] += sum[r][1] * high;
        }
        if (p.offset == nullptr) continue;
        const float* o = p.offset + (block * p.groups + g) * kBlock;
        const Lanes first_half = Float32::Load(o);
        const Lanes second_half = Float32::Load(o + 16);
        for (int r = 0; r < kRows; ++r) {
          const float inputs = p.sums[(first + r) * p.groups + g];
          total[r][0] += first_half * inputs;
          total[r][1] += second_half * inputs;
        }
      }
      for (int r = 0; r < kRows; ++r) {
        std::memcpy(p.y + (first + r) * p.blocks * kBlock + block * kBlock,
                    total[r], sizeof(total[r]));
      }
    });
  });
}

// Sums of x over every group of inputs, [tokens, groups].
std::vector<float> GroupSums(const Product& p) {
  std::vector<float> sums(p.tokens * p.groups, 0.0f);
  const int64_t width = p.in / p.groups;
  for (size_t i = 0; i < sums.size(); ++i) {
    for (int64_t j = 0; j < width; ++j) sums[i] += p.x[i * width + j];
  }
  return sums;
}

template <typename W>
Product Of(Product p) {  // with weights of this type
  p.block = Block<W>;
  p.bytes = p.in * kStored<W> * sizeof(typename W::Stored);
  return p;
}

// Multiplies by all of them as if their blocks were those of one.
template <typename Pool>
void Run(Pool& pool, std::vector<Product> products) {
  std::vector<std::vector<float>> sums;  // kept until the work is done
  std::vector<int64_t> before = {0};     // tasks of earlier products
  int64_t bytes = 0;
  for (Product& p : products) {
    if (p.offset != nullptr) {
      sums.push_back(GroupSums(p));
      p.sums = sums.back().data();
    }
    p.together = std::max<int64_t>(1, kChunkBytes / p.bytes);
    before.push_back(before.back() + (p.blocks + p.together - 1) / p.together);
    bytes += p.blocks * p.bytes;
  }
  ForEach(pool, before.back(), bytes, [&products, &before](int64_t task) {
    const auto next = std::upper_bound(before.begin(), before.end(), task);
    const int64_t i = next - before.begin() - 1;
    const Product& p = products[i];
    const int64_t first = (task - before[i]) * p.together;
    const int64_t end = std::min(p.blocks, first + p.together);
    for (int64_t b = first; b < end; ++b) p.block(p, b);
  });
}

typedef ffi::Span<const int64_t> Shape;

bool Is(Shape shape, std::initializer_list<int64_t> sizes) {
  return std::equal(shape.begin(), shape.end(), sizes.begin(), sizes.end());
}

ffi::Error Refused(const std::string& sentence) {
  return ffi::Error::InvalidArgument(sentence);
}

// What is wrong with a matrix and its scales, which is nothing after the checks
// of cpu_kernels.py; null: nothing.
const char* Mistake(Shape x, ffi::AnyBuffer weight, Shape scale, Shape offset,
                    Shape y) {
  const Shape w = weight.dimensions();
  if (x.size() != 2 || w.size() != 3 || w[1] != x[1] || w[1] == 0) {
    return "a matrix is [out / 32, in, 32 or 16], and inputs [N, in]";
  }
  const ffi::DataType type = weight.element_type();
  const bool whole =
      type == ffi::F32 || type == ffi::BF16 || type == ffi::S8;
  const bool halves = type == ffi::S8 || type == ffi::U8;
  if (!(w[2] == kBlock && whole) && !(w[2] == kBlock / 2 && halves)) {
    return "weights are float32, bfloat16 or int8, 32 a block, or two a byte, "
           "16 bytes a block";
  }
  if (!Is(y, {x[0], w[0] * kBlock})) return "a result is [N, out]";
  const auto count = [](Shape shape) {
    return shape.size() == 3 ? shape[0] * shape[1] * shape[2] : -1;
  };
  const bool groups = count(scale) > 0 && w[1] % scale[1] == 0;
  if (count(scale) != 0 && !(groups && Is(scale, {w[0], scale[1], kBlock}))) {
    return "scales are [out / 32, groups that divide in, 32]";
  }
  if (count(offset) != 0 && !(groups && Is(offset, {w[0], scale[1], kBlock}))) {
    return "offsets are as the scales";
  }
  return nullptr;
}

ffi::Error Project(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                   ffi::RemainingArgs matrices, ffi::RemainingRets results) {
  const auto xs = x.dimensions();
  std::vector<Product> products;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto weight = matrices.get<ffi::AnyBuffer>(3 * i);
    const auto scale = matrices.get<ffi::Buffer<ffi::F32>>(3 * i + 1);
    const auto offset = matrices.get<ffi::Buffer<ffi::F32>>(3 * i + 2);
    auto y = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!weight || !scale || !offset || !y) {
      return Refused("a weight, a scale and an offset for each result");
    }
    const char* mistake = Mistake(xs, *weight, scale->dimensions(),
                                  offset->dimensions(), (*y)->dimensions());
    if (mistake != nullptr) return Refused(mistake);
    const auto w = weight->dimensions();
    Product p;
    p.weight = weight->untyped_data();
    p.x = x.typed_data();
    p.y = (*y)->typed_data();
    p.tokens = xs[0];
    p.in = w[1];
    p.blocks = w[0];
    if (scale->element_count() > 0) {
      p.scale = scale->typed_data();
      p.groups = scale->dimensions()[1];
    }
    if (offset->element_count() > 0) p.offset = offset->typed_data();
    const bool nibbles = w[2] < kBlock;
    switch (weight->element_type()) {
      case ffi::F32:
        products.push_back(Of<Float32>(p));
        break;
      case ffi::BF16:
        products.push_back(Of<BFloat16>(p));
        break;
      case ffi::S8:
        products.push_back(nibbles ? Of<Nibble<true>>(p) : Of<Int8>(p));
        break;
      default:  // U8
        products.push_back(Of<Nibble<false>>(p));
    }
  }
  Run(pool, std::move(products));
  return ffi::Error::Success();
}

// --- Attention of draft nodes to the slots of a KV cache that are in use. ---

struct Attention {
  const float* query = nullptr;     // [B, T, heads * group, D]
  const void* keys = nullptr;       // [B, heads, S, D]
  const void* values = nullptr;     // [B, heads, S, D]
  const float* key_scale = nullptr;    // [B, heads, S] of int8; or null
  const float* value_scale = nullptr;  // as key_scale
  const int32_t* length = nullptr;  // [B] committed slots
  const uint8_t* seen = nullptr;    // [trees, N, N]: node attends to node
  const int32_t* depth = nullptr;   // [depths, N]
  const float* bias = nullptr;  // [2 * reach + 1, heads * group], on scores
  const float* sink_logits = nullptr;  // [heads * group], on softmax; or null
  float* y = nullptr;           // as query
  int64_t batch = 1, heads = 1, group = 1, tokens = 1, dim = 0, slots = 0;
  int64_t nodes = 1, first = 0;     // N = first + T
  int64_t trees = 1, depths = 1;    // 1 for all rows, or B
  int64_t window = 0, reach = -1;   // 0: no window; -1: no bias
  int64_t sinks = 0;                // first slots, seen outside of the window
  int64_t chunk = 0;                // only slots since a multiple of it; 0: all
  float scale = 1.0f, cap = 0.0f;  // 0: no cap

  int64_t Offset(int64_t b, int64_t h, int64_t r) const {
    const int64_t t = r / group, g = r % group;
    return (((b * tokens + t) * heads + h) * group + g) * dim;
  }
  int64_t Used(int64_t b) const {  // slots, whatever `length` says
    return std::clamp<int64_t>(length[b] + nodes, 0, slots);
  }
  int64_t LastSegment(int64_t b) const {  // one past it
    return (Used(b) + kSegment - 1) / kSegment;
  }
  int64_t FirstSegment(int64_t b) const {
    int64_t first = 0;
    if (window != 0) first = std::max<int64_t>(0, length[b] + 1 - window);
    if (chunk != 0) first = std::max(first, length[b] / chunk * chunk);
    return std::min(first / kSegment, LastSegment(b));
  }
  // Segments of the sinks, ahead of the first.
  int64_t SinkSegments(int64_t b) const {
    return std::min((sinks + kSegment - 1) / kSegment, FirstSegment(b));
  }
  int64_t NumSegments(int64_t b) const {
    return SinkSegments(b) + LastSegment(b) - FirstSegment(b);
  }
  // The i-th of the segments that are read.
  int64_t SegmentAt(int64_t b, int64_t i) const {
    return i < SinkSegments(b) ? i : FirstSegment(b) + i - SinkSegments(b);
  }
  // How far a slot in use lies before a node, in positions.
  int64_t Distance(int64_t b, int64_t node, int64_t slot) const {
    const int64_t relative = slot - length[b];
    const int32_t* d = depth + (depths > 1 ? b : 0) * nodes;
    return d[node] - (relative < 0 ? relative : d[relative]);
  }
  // How many positions back a node sees, its own included.
  int64_t Near(int64_t b, int64_t node) const {
    const int64_t near =
        window != 0 ? window : std::numeric_limits<int64_t>::max();
    if (chunk == 0) return near;
    const int32_t* d = depth + (depths > 1 ? b : 0) * nodes;
    return std::min(near, (length[b] + d[node]) % chunk + 1);
  }
  bool Unbounded() const { return window == 0 && chunk == 0; }
  bool Sees(int64_t b, int64_t node, int64_t slot) const {
    const int64_t relative = slot - length[b], tree = trees > 1 ? b : 0;
    if (relative >= 0 && !seen[(tree * nodes + node) * nodes + relative]) {
      return false;
    }
    return Unbounded() || slot < sinks ||
           Distance(b, node, slot) < Near(b, node);
  }
  float Bias(int64_t b, int64_t h, int64_t row, int64_t slot) const {
    const int64_t distance = Distance(b, first + row / group, slot);
    const int64_t near = std::clamp(distance, -reach, reach);
    return bias[(near + reach) * heads * group + h * group + row % group];
  }
};

// exp(x) for x <= 0 to 2 units in the last place (Cephes' polynomial).
inline Lanes Exp(Lanes x) {
  const Lanes clamped = x < -87.0f ? Lanes{} - 87.0f : x;
  const Lanes n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Lanes r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const IntLanes power = __builtin_convertvector(n, IntLanes) << 23;
  y = (Lanes)((IntLanes)y + power);
  return x < -87.0f ? Lanes{} : y;
}

// Returns `count` rows of dim numbers as floats: in place, or, of int8, times
// their scales in the thread's own buffer, which the next call overwrites.
template <typename KV>
const auto* Widened(const typename KV::Stored* rows, const float* scale,
                    int64_t count, int64_t dim) {
  if constexpr (std::is_same_v<KV, Int8>) {
    thread_local std::vector<float> buffer;
    buffer.resize(kSegment * dim);
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t d = 0; d < dim; d += 16) {
        const Lanes wide = Int8::Load(rows + s * dim + d) * scale[s];
        std::memcpy(buffer.data() + s * dim + d, &wide, sizeof(wide));
      }
    }
    return static_cast<const float*>(buffer.data());
  } else {
    return rows;
  }
}

// Attends queries `begin` .. `begin` + `rows` (at most 16 * kLanes) of a KV head
// to one segment. Writes rows [2 + D] of `part`: the largest score, the sum of
// exponentials, the weighted sum of values. `query` is [D, 32], scaled.
template <typename KV, int kLanes>
void Segment(const Attention& a, int64_t b, int64_t h, int64_t segment,
             const float* query, int64_t begin, int64_t rows, float* part) {
  const int64_t start = segment * kSegment, stride = a.dim + 2;
  const int64_t count = std::min<int64_t>(kSegment, a.Used(b) - start);
  const int64_t slot = (b * a.heads + h) * a.slots + start;
  const auto stored = [&](const void* from, const float* scale) {
    const auto* rows =
        static_cast<const typename KV::Stored*>(from) + slot * a.dim;
    return Widened<KV>(rows, scale + (scale ? slot : 0), count, a.dim);
  };
  // What is read: int8 has been widened.
  using Read = std::conditional_t<std::is_same_v<KV, Int8>, Float32, KV>;
  constexpr bool kIsWidened = std::is_same_v<KV, Int8>;
  const auto* keys = stored(a.keys, a.key_scale);
  // One buffer holds the keys, and then the values.
  const auto* values = kIsWidened ? keys : stored(a.values, a.value_scale);

  // While keys are read, the second half of them and then the values are
  // prefetched; while values are read, the next segment's keys. What was widened
  // is in the cache, and its own start stands for what comes next.
  const int64_t row = a.dim * sizeof(*keys);
  alignas(64) float scores[kSegment][16 * kLanes];
  ForTiles(count, [&](int64_t first, int64_t slots) {
    WithRows(slots, [&](auto number) {
      Lanes sum[decltype(number)::value][kLanes] = {};
      const auto* next = kIsWidened ? keys
                         : first < kSegment / 2
                             ? keys + (2 * first + kTile) * a.dim
                             : values + (2 * first - kSegment) * a.dim;
      const Ahead ahead{next, 2 * slots * row / a.dim};
      Accumulate<Float32, Read>(query, kBlock, keys + first * a.dim, a.dim, 1,
                                a.dim, ahead, sum);
      std::memcpy(scores[first], sum, sizeof(sum));
    });
  });
  if (a.cap > 0) {
    for (int64_t s = 0; s < count; ++s) {
      for (float& x : scores[s]) x = a.cap * std::tanh(x / a.cap);
    }
  }
  if (a.reach >= 0) {
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t r = 0; r < rows; ++r) {
        scores[s][r] += a.Bias(b, h, begin + r, start + s);
      }
    }
  }
  for (int64_t s = 0; s < count; ++s) {
    if (a.Unbounded() && start + s < a.length[b]) continue;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t node = a.first + (begin + r) / a.group;
      if (!a.Sees(b, node, start + s)) scores[s][r] = -kInfinity;
    }
  }

  alignas(64) float tops[16 * kLanes], sums[16 * kLanes];
  for (int l = 0; l < 16 * kLanes; l += 16) {
    Lanes top = Lanes{} - kInfinity, sum = {};
    for (int64_t s = 0; s < count; ++s) {
      const Lanes x = Float32::Load(scores[s] + l);
      top = x > top ? x : top;
    }
    const Lanes shift = top > -kInfinity ? top : Lanes{};
    for (int64_t s = 0; s < count; ++s) {
      const Lanes x = Exp(Float32::Load(scores[s] + l) - shift);
      sum += x;
      std::memcpy(scores[s] + l, &x, sizeof(x));
    }
    std::memcpy(tops + l, &top, sizeof(top));
    std::memcpy(sums + l, &sum, sizeof(sum));
  }
  if constexpr (kIsWidened) {
    values = stored(a.values, a.value_scale);
  }
  ForTiles(rows, [&](int64_t first, int64_t tile) {
    WithRows(tile, [&](auto number) {
      constexpr int kRows = decltype(number)::value;
      for (int64_t d = 0; d < a.dim; d += kBlock) {
        Lanes sum[kRows][2] = {};
        const Ahead ahead{
            keys + (kIsWidened ? 0 : (kSegment + d / 2) * a.dim), row / 2};
        Accumulate<Read, Float32>(values + d, a.dim, &scores[0][first], 1,
                                  16 * kLanes, count, ahead, sum);
        for (int r = 0; r < kRows; ++r) {
          std::memcpy(part + (first + r) * stride + 2 + d, sum[r],
                      sizeof(sum[r]));
        }
      }
    });
  });
  for (int64_t r = 0; r < rows; ++r) {
    part[r * stride] = tops[r];
    part[r * stride + 1] = sums[r];
  }
}

// Softmax of a query over the segments so far, relative to the largest score.
struct Softmax {
  float top = -kInfinity, total = 0.0f;

  // Adds segments of the query, in their order, to y [D]. The order is all that
  // the bits depend on: not how many segments one call adds.
  void Add(const float* part, int64_t segments, int64_t step, int64_t dim,
           float* y) {
    for (int64_t s = 0; s < segments; ++s, part += step) {
      if (part[0] == -kInfinity) continue;
      const bool higher = part[0] > top;
      const float decay = higher ? std::exp(top - part[0]) : 1.0f;
      const float share = higher ? 1.0f : std::exp(part[0] - top);
      if (higher) top = part[0];
      total = total * decay + share * part[1];
      for (int64_t d = 0; d < dim; ++d) y[d] = y[d] * decay + share * part[2 + d];
    }
  }
};

// Attends rows `from` .. `end` of the batch. Scratch holds their queries, laid
// out, and a wave of segments of all KV heads, whose results are then added.
template <typename KV, typename Pool>
void RunRows(Pool& pool, const Attention& a, int64_t from, int64_t end,
             Scratch& scratch) {
  const int64_t queries = a.group * a.tokens, stride = a.dim + 2;
  const int64_t tiles = (queries + kBlock - 1) / kBlock, tile = a.dim * kBlock;
  const int64_t step = queries * stride, pairs = (end - from) * a.heads;
  std::vector<int64_t> before = {0};  // segments of earlier rows
  for (int64_t b = from; b < end; ++b) {
    before.push_back(before.back() + a.NumSegments(b));
  }
  const int64_t segments = before.back();
  // Four tasks a thread, at least.
  const int64_t least = (4 * pool.num_threads() + a.heads - 1) / a.heads;
  const int64_t wave = std::min(
      segments, std::max<int64_t>(least, kScratch / std::max<int64_t>(1, a.heads * step)));
  // [rows, heads, tiles, D, 32], then [heads, wave, queries, 2 + D].
  float* const laid =
      scratch.Floats(pairs * tiles * tile + a.heads * wave * step);
  float* const parts = laid + pairs * tiles * tile;
  std::vector<Softmax> softmax(pairs * queries);
  // Calls f(query, its softmax, its offset in query and y) for all of tile i.
  const auto for_queries = [&](int64_t i, auto f) {
    const int64_t pair = i / tiles, first = i % tiles * kBlock;
    const int64_t b = from + pair / a.heads, h = pair % a.heads;
    for (int64_t r = first; r < std::min(queries, first + kBlock); ++r) {
      f(r, softmax[pair * queries + r], a.Offset(b, h, r));
    }
  };

  const int64_t laid_bytes = pairs * tiles * tile * sizeof(float);
  ForEach(pool, pairs * tiles, laid_bytes, [&](int64_t i) {
    float* const to = laid + i * tile;
    std::fill(to, to + tile, 0.0f);
    const float* sinks =
        a.sink_logits ? a.sink_logits + i / tiles % a.heads * a.group : nullptr;
    for_queries(i, [&](int64_t r, Softmax& sum, int64_t at) {
      if (sinks) sum = {sinks[r % a.group], 1.0f};
      for (int64_t d = 0; d < a.dim; ++d) {
        to[d * kBlock + r % kBlock] = a.query[at + d] * a.scale;
      }
      std::fill_n(a.y + at, a.dim, 0.0f);
    });
  });
  for (int64_t start = 0; start < segments; start += wave) {
    const int64_t some = std::min(wave, segments - start);
    const int64_t bytes =
        2 * a.heads * some * kSegment * a.dim * sizeof(typename KV::Stored);
    ForEach(pool, a.heads * some, bytes, [&](int64_t task) {
      const int64_t h = task / some, s = start + task % some;
      const int64_t i =
          std::upper_bound(before.begin(), before.end(), s) - before.begin() - 1;
      const float* query = laid + (i * a.heads + h) * tiles * tile;
      float* part = parts + task * step;
      for (int64_t first = 0; first < queries; first += kBlock) {
        const int64_t count = std::min<int64_t>(kBlock, queries - first);
        auto* run = count > 16 ? Segment<KV, 2> : Segment<KV, 1>;
        run(a, from + i, h, a.SegmentAt(from + i, s - before[i]),
            query + first * a.dim, first, count, part + first * stride);
      }
    });
    const int64_t parts_bytes = a.heads * some * step * sizeof(float);
    ForEach(pool, pairs * tiles, parts_bytes / 16, [&](int64_t i) {
      const int64_t b = i / tiles / a.heads, h = i / tiles % a.heads;
      const int64_t first = std::max(start, before[b]);
      const int64_t count = std::min(start + some, before[b + 1]) - first;
      const float* part = parts + (h * some + first - start) * step;
      for_queries(i, [&](int64_t r, Softmax& sum, int64_t at) {
        sum.Add(part + r * stride, count, step, a.dim, a.y + at);
      });
    });
  }
  for (int64_t i = 0; i < pairs * tiles; ++i) {
    for_queries(i, [&](int64_t, Softmax& sum, int64_t at) {
      for (int64_t d = 0; d < a.dim; ++d) a.y[at + d] /= sum.total;
    });
  }
}

template <typename KV, typename Pool>
void Run(Pool& pool, const Attention& a) {
  const int64_t tiles = (a.group * a.tokens + kBlock - 1) / kBlock;
  const int64_t floats = std::max<int64_t>(1, a.heads * tiles * a.dim * kBlock);
  const int64_t rows = std::max<int64_t>(1, kScratch / floats);
  Scratch scratch;
  for (int64_t b = 0; b < a.batch; b += rows) {
    RunRows<KV>(pool, a, b, std::min(a.batch, b + rows), scratch);
  }
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query,
                  ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::Buffer<ffi::F32> key_scale,
                  ffi::Buffer<ffi::F32> value_scale,
                  ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::PRED> seen,
                  ffi::Buffer<ffi::S32> depth, ffi::Buffer<ffi::F32> bias,
                  ffi::Buffer<ffi::F32> sink_logits,
                  ffi::ResultBuffer<ffi::F32> y,
                  int64_t first, int64_t window, int64_t sinks,
                  int64_t chunk, float scale, float cap) {
  const Shape q = query.dimensions(), k = keys.dimensions(),
              n = seen.dimensions(), depths = depth.dimensions(),
              biases = bias.dimensions();
  // What cpu_kernels.py has checked, once more: a mistake would read memory of
  // others.
  if (q.size() != 4 || k.size() != 4 || q[0] != k[0] || q[3] != k[3] ||
      k[1] == 0 || q[2] % k[1] != 0 || q[3] % kBlock != 0 ||
      !Is(values.dimensions(), {k[0], k[1], k[2], k[3]}) ||
      !Is(y->dimensions(), {q[0], q[1], q[2], q[3]}) ||
      !Is(length.dimensions(), {q[0]})) {
    return Refused(
        "queries are [B, T, heads, D], D a multiple of 32, keys and values [B, "
        "KV heads, S, D], lengths [B]");
  }
  const bool is_int8 = keys.element_type() == ffi::S8;
  for (const Shape& scale : {key_scale.dimensions(), value_scale.dimensions()}) {
    if (is_int8 ? !Is(scale, {k[0], k[1], k[2], 1}) : !Is(scale, {0})) {
      return Refused("scales of int8 are [B, KV heads, S, 1]");
    }
  }
  const int64_t nodes = first + q[1];
  if (n.size() != 3 || !Is(n, {n[0] == 1 ? 1 : q[0], nodes, nodes}) ||
      depths.size() != 2 || !Is(depths, {depths[0] == 1 ? 1 : q[0], nodes}) ||
      first < 0 || window < 0 || sinks < 0 || chunk < 0) {
    return Refused(
        "ancestors are [B or 1, N, N] and depths [B or 1, N], N = first + T");
  }
  if (biases.size() != 2 || biases[1] != q[2] ||
      (biases[0] != 0 && biases[0] % 2 == 0)) {
    return Refused("a bias is [2 R + 1, heads]");
  }
  const Shape logits = sink_logits.dimensions();
  if (!Is(logits, {0}) && !Is(logits, {q[2]})) {
    return Refused("sink logits are [heads]");
  }
  Attention a;
  a.query = query.typed_data();
  a.keys = keys.untyped_data();
  a.values = values.untyped_data();
  if (is_int8) {
    a.key_scale = key_scale.typed_data();
    a.value_scale = value_scale.typed_data();
  }
  a.length = length.typed_data();
  a.seen = reinterpret_cast<const uint8_t*>(seen.typed_data());
  a.depth = depth.typed_data();
  a.bias = bias.typed_data();
  a.sink_logits = logits[0] > 0 ? sink_logits.typed_data() : nullptr;
  a.y = y->typed_data();
  a.batch = q[0];
  a.tokens = q[1];
  a.heads = k[1];
  a.group = q[2] / k[1];
  a.dim = q[3];
  a.slots = k[2];
  a.nodes = nodes;
  a.first = first;
  a.trees = n[0];
  a.depths = depths[0];
  a.window = window;
  a.sinks = sinks;
  a.chunk = chunk;
  a.reach = biases[0] > 0 ? biases[0] / 2 : -1;
  a.scale = scale;
  a.cap = cap;
  if (keys.element_type() == ffi::F32 && values.element_type() == ffi::F32) {
    Run<Float32>(pool, a);
  } else if (keys.element_type() == ffi::BF16 &&
             values.element_type() == ffi::BF16) {
    Run<BFloat16>(pool, a);
  } else if (is_int8 && values.element_type() == ffi::S8) {
    Run<Int8>(pool, a);
  } else {
    return Refused("keys and values are float32, bfloat16 or int8, both");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_project, Project,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_attend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<int64_t>("chunk")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap"));
