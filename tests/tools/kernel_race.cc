// Runs the kernels from two threads at once over a pool of three, for a
// sanitizer to watch, and compares each result with that of one thread alone:
//   g++ -std=c++17 -O1 -g -march=native -fsanitize=thread -isystem \
//     $(python -c "import jax; print(jax.ffi.include_dir())") \
//     tests/tools/kernel_race.cc -o /tmp/kernel_race && /tmp/kernel_race
// With an argument it shows whether a call that waits for a helper leaves the
// only processor to others.
// (XLA's own pool is compiled without one, which reports races of its own.)

#include "../../specdec/models/cpu_kernels.cc"

#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <queue>
#include <random>
#include <thread>

#include <sched.h>
#include <time.h>

class Pool {
 public:
  explicit Pool(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { Serve(); });
  }
  ~Pool() {
    for (size_t i = 0; i < threads_.size(); ++i) Schedule(nullptr);
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return threads_.size() + 1; }
  void Schedule(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push(std::move(task));
    ready_.notify_one();
  }

 private:
  void Serve() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop();
      lock.unlock();
      if (!task) return;
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable ready_;
  std::queue<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
};

uint16_t Upper(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits >> 16;
}

std::vector<float> Random(int64_t count, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = normal(generator);
  return x;
}

Product Tokens(int64_t tokens, int64_t in, int64_t blocks, const void* weight,
               const std::vector<float>& x, std::vector<float>& y) {
  Product p;
  p.weight = weight;
  p.x = x.data();
  p.y = y.data();
  p.tokens = tokens;
  p.in = in;
  p.blocks = blocks;
  return p;
}

std::vector<float> Multiply(Pool& pool, int seed) {
  const int64_t tokens = 1 + seed % 14, in = 512, blocks = 12;
  // What is read ahead must exist nowhere: buffers end where their data ends.
  const auto weight = Random(blocks * in * kBlock, seed);
  const auto x = Random(tokens * in, seed + 1);
  const auto scale = Random(blocks * 4 * kBlock, seed + 2);
  std::vector<float> y(tokens * blocks * kBlock);
  std::vector<float> again(y.size());
  Product p = Tokens(tokens, in, blocks, weight.data(), x, y);
  if (seed % 2) p.scale = scale.data(), p.groups = 4;
  Product twin = p;
  twin.y = again.data();
  Run(pool, {Of<Float32>(p), Of<Float32>(twin)});
  return y == again ? y : std::vector<float>();
}

std::vector<float> MultiplyNibbles(Pool& pool, int seed) {
  const int64_t tokens = 1 + seed % 14, in = 512, blocks = 24, groups = 16;
  const auto random = Random(blocks * in * kBlock / 2, seed);
  std::vector<uint8_t> weight(random.size());
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<int>(64 * random[i]);
  const auto x = Random(tokens * in, seed + 1);
  const auto scale = Random(blocks * groups * kBlock, seed + 2);
  const auto offset = Random(scale.size(), seed + 3);
  std::vector<float> y(tokens * blocks * kBlock);
  Product p = Tokens(tokens, in, blocks, weight.data(), x, y);
  p.scale = scale.data();
  p.groups = groups;
  p.offset = offset.data();
  Run(pool, {seed % 2 ? Of<Nibble<true>>(p) : Of<Nibble<false>>(p)});
  return y;
}

// Trees, windows, biases, caps, waves of segments and bfloat16 caches.
std::vector<float> Attend(Pool& pool, int seed) {
  const int64_t tokens = seed % 8 ? 1 + seed % 9 : 100, slots = 900;
  Attention a;
  a.batch = 2;
  a.heads = 2;
  a.group = seed % 8 ? 3 : 12;
  a.dim = 64;
  a.slots = slots;
  a.tokens = tokens;
  a.first = seed % 3;
  a.nodes = a.first + tokens;
  a.trees = seed % 4 > 0 ? a.batch : 1;
  a.depths = seed % 4 > 1 ? a.batch : 1;
  a.window = seed % 2 ? 90 : 0;
  a.reach = seed % 3 ? 4 : -1;
  a.cap = seed % 5 ? 0.0f : 20.0f;
  a.scale = 0.125f;
  const auto query = Random(a.batch * tokens * a.heads * a.group * a.dim, seed);
  const int64_t cached = a.batch * a.heads * slots * a.dim;
  const auto keys = Random(cached, seed + 1), values = Random(cached, seed + 2);
  const auto bias = Random(9 * a.heads * a.group, seed + 3);
  std::vector<uint16_t> short_keys(cached), short_values(cached);
  for (int64_t i = 0; i < cached; ++i) {
    short_keys[i] = Upper(keys[i]);
    short_values[i] = Upper(values[i]);
  }
  const int32_t length[] = {static_cast<int32_t>(slots - a.nodes), 5};
  std::vector<uint8_t> seen(a.trees * a.nodes * a.nodes);
  std::vector<int32_t> depth(a.depths * a.nodes);
  std::mt19937 generator(seed);
  for (int64_t row = 0; row < std::max(a.trees, a.depths); ++row) {
    for (int64_t n = 0; n < a.nodes; ++n) {
      const int64_t parent = n ? generator() % n : -1;
      if (row < a.depths) {
        int32_t* d = &depth[row * a.nodes];
        d[n] = n ? d[parent] + 1 : 0;
      }
      if (row < a.trees) {
        uint8_t* s = &seen[row * a.nodes * a.nodes];
        for (int64_t m = 0; n && m < n; ++m) {
          s[n * a.nodes + m] = s[parent * a.nodes + m];
        }
        s[n * a.nodes + n] = 1;
      }
    }
  }
  std::vector<float> y(query.size());
  a.query = query.data();
  a.length = length;
  a.seen = seen.data();
  a.depth = depth.data();
  a.bias = bias.data();
  a.y = y.data();
  if (seed % 7 == 0) {
    a.keys = short_keys.data();
    a.values = short_values.data();
    Run<BFloat16>(pool, a);
  } else {
    a.keys = keys.data();
    a.values = values.data();
    Run<Float32>(pool, a);
  }
  return y;
}

double Used(clockid_t clock) {  // seconds of a thread
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Waits for a helper that sleeps, beside a thread that works, all on one
// processor. Returns the seconds it took of the processor, over the worker's.
double Wait() {
  cpu_set_t allowed, one;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  CPU_ZERO(&one);
  for (int i = 0; CPU_COUNT(&one) == 0; ++i) {
    if (CPU_ISSET(i, &allowed)) CPU_SET(i, &one);
  }
  sched_setaffinity(0, sizeof(one), &one);  // threads begun here inherit it
  Pool pool(1);
  std::atomic<bool> over{false};
  std::atomic<double> worked{0};
  std::thread worker([&] {
    while (!over) worked = Used(CLOCK_THREAD_CPUTIME_ID);
  });
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> helped{false};
  const double before = Used(CLOCK_THREAD_CPUTIME_ID);
  ForEach(pool, 2, 2 * kChunkBytes, [&](int64_t) {
    if (std::this_thread::get_id() == caller) {
      while (!helped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
      helped = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
    }
  });
  const double waited = Used(CLOCK_THREAD_CPUTIME_ID) - before;
  over = true;
  worker.join();
  return waited / worked;
}

int main(int count, char**) {
  if (count > 1) {
    std::printf("%.2f\n", Wait());
    return 0;
  }
  Pool pool(3), alone(0);
  std::atomic<int> wrong{0};
  const auto check = [&](int from) {
    for (int seed = from; seed < from + 40; ++seed) {
      wrong += Multiply(pool, seed) != Multiply(alone, seed);
      wrong += MultiplyNibbles(pool, seed) != MultiplyNibbles(alone, seed);
      wrong += Attend(pool, seed) != Attend(alone, seed);
    }
  };
  std::thread other(check, 100);
  check(0);
  other.join();
  std::printf("%d of 240 results differ\n", wrong.load());
  return wrong > 0;
}
