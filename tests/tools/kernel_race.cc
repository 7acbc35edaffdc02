// Runs the kernels from two threads at once over a pool of three, for a
// sanitizer to watch, and compares each result with that of one thread alone:
//   g++ -std=c++17 -O1 -g -march=native -fsanitize=thread -isystem \
//     $(python -c "import jax; print(jax.ffi.include_dir())") \
//     tests/tools/kernel_race.cc -o /tmp/kernel_race && /tmp/kernel_race
// (XLA's own pool is compiled without one, which reports races of its own.)

#include "../../specdec/models/cpu_kernels.cc"

#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <queue>
#include <random>
#include <thread>

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

std::vector<float> Random(int64_t count, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = normal(generator);
  return x;
}

std::vector<float> Multiply(Pool& pool, int seed) {
  const int64_t tokens = 1 + seed % 14, in = 512, blocks = 12;
  // What is read ahead must exist nowhere: buffers end where their data ends.
  const auto weight = Random(blocks * in * kBlock, seed);
  const auto x = Random(tokens * in, seed + 1);
  const auto scale = Random(blocks * 4 * kBlock, seed + 2);
  std::vector<float> y(tokens * blocks * kBlock);
  std::vector<float> again(y.size());
  Product p{weight.data(), seed % 2 ? scale.data() : nullptr,
            x.data(),      y.data(),
            tokens,        in,
            blocks,        4};
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
  Product p{weight.data(), scale.data(), x.data(), y.data(),
            tokens,        in,           blocks,   groups};
  p.offset = offset.data();
  Run(pool, {seed % 2 ? Of<Nibble<true>>(p) : Of<Nibble<false>>(p)});
  return y;
}

std::vector<float> Attend(Pool& pool, int seed) {
  const int64_t batch = 2, heads = 2, group = 3, dim = 64, slots = 700;
  const int64_t tokens = 1 + seed % 9, nodes = tokens + seed % 3;
  const auto query = Random(batch * tokens * heads * group * dim, seed);
  const auto keys = Random(batch * heads * slots * dim, seed + 1);
  const auto values = Random(batch * heads * slots * dim, seed + 2);
  const int32_t length[] = {static_cast<int32_t>(slots - nodes), 5};
  std::vector<uint8_t> seen(nodes * nodes);
  std::vector<int32_t> depth(nodes);
  for (int i = 0; i < nodes; ++i) {
    depth[i] = i;
    for (int j = 0; j <= i; ++j) seen[i * nodes + j] = 1;
  }
  std::vector<float> y(query.size());
  Run<Float32>(pool, Attention{query.data(), keys.data(), values.data(), length,
                               seen.data(), depth.data(), y.data(), batch, heads,
                               group, tokens, nodes, nodes - tokens, dim, slots,
                               1, seed % 2 ? 90 : 0, 0.125f, 0.0f});
  return y;
}

int main() {
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
