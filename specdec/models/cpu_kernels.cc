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

// Memory to ask for while sums are taken: two cache lines a step.
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
  while (state->done.load(std::memory_order_acquire) < count) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

// --- Products y[t, o] = sum_i x[t, i] * w[o, i], w in [out / 32, in, 32], of
// one x and several w. ---

struct Product {
  const void* weight;
  const float* scale;  // [blocks, groups, 32], or null
  const float* x;      // [tokens, in]
  float* y;            // [tokens, blocks * 32]
  int64_t tokens, in, blocks, groups;
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
      return ffi::Error::InvalidArgument(
          "a weight, a scale and an offset for each result");
    }
    const auto w = weight->dimensions();
    Product p{weight->untyped_data(), nullptr, x.typed_data(),
              (*y)->typed_data(),     xs[0],   w[1],
              w[0],                   1};
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
      case ffi::U8:
        products.push_back(Of<Nibble<false>>(p));
        break;
      default:
        return ffi::Error::InvalidArgument(
            "weights: float32, bfloat16, int8 or two of four bits a byte");
    }
  }
  Run(pool, std::move(products));
  return ffi::Error::Success();
}

// --- Attention of draft nodes to the slots of a KV cache that are in use. ---

struct Attention {
  const float* query;    // [B, T, heads * group, D]
  const void* keys;      // [B, heads, S, D]
  const void* values;    // [B, heads, S, D]
  const int32_t* length;  // [B] committed slots
  const uint8_t* seen;    // [B or 1, N, N]: node attends to node
  const int32_t* depth;   // [B or 1, N]
  const float* bias;      // [2 * reach + 1, heads * group], added to scores
  float* y;               // as query
  int64_t batch, heads, group, tokens, nodes, first, dim, slots, trees, window;
  int64_t reach;  // -1: no bias
  float scale, cap;

  int64_t Offset(int64_t b, int64_t h, int64_t r) const {
    const int64_t t = r / group, g = r % group;
    return (((b * tokens + t) * heads + h) * group + g) * dim;
  }
  int64_t LastSegment(int64_t b) const {  // one past it
    const int64_t used = std::min<int64_t>(slots, length[b] + nodes);
    return (used + kSegment - 1) / kSegment;
  }
  int64_t FirstSegment(int64_t b) const {
    return window ? std::max<int64_t>(0, length[b] + 1 - window) / kSegment : 0;
  }
  // How far a node's position is behind that of a slot in use.
  int64_t Distance(int64_t b, int64_t node, int64_t slot) const {
    const int64_t relative = slot - length[b], tree = trees > 1 ? b : 0;
    const int32_t* d = depth + tree * nodes;
    return d[node] - (relative < 0 ? relative : d[relative]);
  }
  bool Sees(int64_t b, int64_t node, int64_t slot) const {
    const int64_t relative = slot - length[b], tree = trees > 1 ? b : 0;
    if (relative >= 0 && !seen[(tree * nodes + node) * nodes + relative]) {
      return false;
    }
    return window == 0 || Distance(b, node, slot) < window;
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

// What queries `begin` .. `begin` + `rows` (at most 16 * kLanes) of a KV head
// get from one segment: the largest score, the sum of exponentials, the sum of
// values, in rows [2 + D] of `part`. `query` is [D, 32], scaled.
template <typename KV, int kLanes>
void Segment(const Attention& a, int64_t b, int64_t h, int64_t segment,
             const float* query, int64_t begin, int64_t rows, float* part) {
  const int64_t start = segment * kSegment, stride = a.dim + 2;
  const int64_t used = std::min<int64_t>(a.slots, a.length[b] + a.nodes);
  const int64_t count = std::min<int64_t>(kSegment, used - start);
  const int64_t offset = ((b * a.heads + h) * a.slots + start) * a.dim;
  const auto* keys = static_cast<const typename KV::Stored*>(a.keys) + offset;
  const auto* values =
      static_cast<const typename KV::Stored*>(a.values) + offset;

  // While keys are read, the second half of them and then the values are asked
  // for; while values are read, the next segment's keys.
  const int64_t row = a.dim * sizeof(*keys);
  alignas(64) float scores[kSegment][16 * kLanes];
  ForTiles(count, [&](int64_t first, int64_t slots) {
    WithRows(slots, [&](auto number) {
      Lanes sum[decltype(number)::value][kLanes] = {};
      const auto* next = first < kSegment / 2
                             ? keys + (2 * first + kTile) * a.dim
                             : values + (2 * first - kSegment) * a.dim;
      const Ahead ahead{next, 2 * slots * row / a.dim};
      Accumulate<Float32, KV>(query, kBlock, keys + first * a.dim, a.dim, 1,
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
    if (a.window == 0 && start + s < a.length[b]) continue;
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
  ForTiles(rows, [&](int64_t first, int64_t tile) {
    WithRows(tile, [&](auto number) {
      constexpr int kRows = decltype(number)::value;
      for (int64_t d = 0; d < a.dim; d += kBlock) {
        Lanes sum[kRows][2] = {};
        const Ahead ahead{keys + (kSegment + d / 2) * a.dim, row / 2};
        Accumulate<KV, Float32>(values + d, a.dim, &scores[0][first], 1,
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

// Joins the segments of one query, in their order: y [D].
void Join(const Attention& a, const float* part, int64_t segments,
          int64_t step, float* y) {
  float top = -kInfinity, total = 0;
  for (int64_t s = 0; s < segments; ++s) top = std::max(top, part[s * step]);
  std::fill(y, y + a.dim, 0.0f);
  for (int64_t s = 0; s < segments; ++s) {
    const float* p = part + s * step;
    if (p[0] == -kInfinity) continue;
    const float share = std::exp(p[0] - top);
    total += share * p[1];
    for (int64_t d = 0; d < a.dim; ++d) y[d] += share * p[2 + d];
  }
  for (int64_t d = 0; d < a.dim; ++d) y[d] /= total;
}

template <typename KV, typename Pool>
void Run(Pool& pool, const Attention& a) {
  const int64_t queries = a.group * a.tokens, stride = a.dim + 2;
  const int64_t tiles = (queries + kBlock - 1) / kBlock;
  std::vector<int64_t> before(a.batch + 1, 0);  // segments of earlier rows
  for (int64_t b = 0; b < a.batch; ++b) {
    before[b + 1] = before[b] + a.LastSegment(b) - a.FirstSegment(b);
  }
  const int64_t segments = before[a.batch], step = queries * stride;
  // Kept between calls: a page that is new to the process costs more to touch.
  thread_local std::vector<float> laid, partial;
  laid.assign(a.batch * a.heads * tiles * a.dim * kBlock, 0.0f);
  partial.resize(a.heads * segments * step);
  float* scaled = laid.data();   // [B, heads, tiles, D, 32]
  float* parts = partial.data();  // [heads, segments, queries, 2 + D]
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int64_t r = 0; r < queries; ++r) {
        const float* q = a.query + a.Offset(b, h, r);
        float* to = scaled + r % kBlock +
                    ((b * a.heads + h) * tiles + r / kBlock) * a.dim * kBlock;
        for (int64_t d = 0; d < a.dim; ++d) to[d * kBlock] = q[d] * a.scale;
      }
    }
  }
  const int64_t* rows = before.data();
  const int64_t bytes =
      2 * a.heads * segments * kSegment * a.dim * sizeof(typename KV::Stored);
  ForEach(pool, a.heads * segments, bytes, [=](int64_t task) {
    const int64_t h = task / segments, s = task % segments;
    const int64_t b = std::upper_bound(rows, rows + a.batch + 1, s) - rows - 1;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t count = std::min<int64_t>(kBlock, queries - i * kBlock);
      auto* run = count > 16 ? Segment<KV, 2> : Segment<KV, 1>;
      run(a, b, h, a.FirstSegment(b) + s - rows[b],
          scaled + ((b * a.heads + h) * tiles + i) * a.dim * kBlock, i * kBlock,
          count, parts + task * step + i * kBlock * stride);
    }
  });
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int64_t r = 0; r < queries; ++r) {
        Join(a, parts + (h * segments + rows[b]) * step + r * stride,
             rows[b + 1] - rows[b], step, a.y + a.Offset(b, h, r));
      }
    }
  }
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query,
                  ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::PRED> seen,
                  ffi::Buffer<ffi::S32> depth, ffi::Buffer<ffi::F32> bias,
                  ffi::ResultBuffer<ffi::F32> y,
                  int64_t first, int64_t window, float scale, float cap) {
  const auto q = query.dimensions(), k = keys.dimensions(),
             n = seen.dimensions();
  Attention a{query.typed_data(),
              keys.untyped_data(),
              values.untyped_data(),
              length.typed_data(),
              reinterpret_cast<const uint8_t*>(seen.typed_data()),
              depth.typed_data(),
              bias.typed_data(),
              y->typed_data(),
              q[0],
              k[1],
              q[2] / k[1],
              q[1],
              n[1],
              first,
              q[3],
              k[2],
              n[0],
              window,
              bias.element_count() ? bias.dimensions()[0] / 2 : -1,
              scale,
              cap};
  switch (keys.element_type()) {
    case ffi::F32:
      Run<Float32>(pool, a);
      return ffi::Error::Success();
    case ffi::BF16:
      Run<BFloat16>(pool, a);
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("a KV cache is float32 or bfloat16");
  }
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
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap"));
