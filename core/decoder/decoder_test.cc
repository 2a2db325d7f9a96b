#include "decoder/decoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "decoder/testing/reference.h"
#include "decoder/testing/tiny.h"
#include "testing/test.h"

namespace {
std::atomic<int64_t> allocations{0};
}

// Counts what the program allocates by `new`, thrown or not (std::stable_sort asks without). Not
// inlined: GCC would pair malloc with delete and warn.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* p = operator new(bytes, std::nothrow);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace cpumoe {
namespace {

using testing::expect;
using testing::Expected;
using testing::make_tiny;
using testing::Rng;
using testing::tiny_shapes;
using testing::TinyModel;
using testing::TinyShape;

const Machine& machine() {
  static const Machine m = probe_machine();
  return m;
}
Executor& executor(int threads) {
  static Executor one(machine(), {1}), two(machine(), {2}), five(machine(), {5});
  return threads == 1 ? one : threads == 2 ? two : five;
}

std::vector<int32_t> some_tokens(int64_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<int32_t> t;
  for (int64_t i = 0; i < count; ++i) t.push_back(int32_t(rng.below(67)));
  return t;
}

using Logits = std::vector<float>;

Logits run(Decoder& d, const std::vector<Segment>& segments, LogitsOf which) {
  size_t rows = segments.size();
  if (which == LogitsOf::all) {
    rows = 0;
    for (const Segment& s : segments) rows += s.tokens.size();
  }
  Logits out(rows * size_t(d.model().vocab), std::numeric_limits<float>::quiet_NaN());
  d.forward(segments, which, out.data());
  return out;
}

constexpr double kUseful = 0.05;  // a bound as large as the logits would prove nothing

double largest(const Expected& e) {
  double largest = 0;
  for (const testing::Row& r : e.logits) {
    for (const double v : r) largest = std::max(largest, std::fabs(v));
  }
  return largest;
}

// Rows [first, ...) of the expectation against logits.
void check_logits(const std::string& name, const Logits& got, const Expected& want, size_t first) {
  const size_t vocab = want.logits[0].size();
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double w = want.logits[first + i / vocab][i % vocab];
    worst = std::max(worst, std::fabs(got[i] - w));
    CHECK_MSG(std::fabs(got[i] - w) <= want.bound, name << " row " << first + i / vocab << " token "
                                                        << i % vocab << ": " << got[i] << " not "
                                                        << w << " +- " << want.bound);
  }
  if (std::getenv("CPUMOE_TEST_VERBOSE")) {
    std::printf("%s: error %.2g, bound %.2g, largest logit %.2g\n", name.c_str(), worst, want.bound,
                largest(want));
  }
  CHECK_MSG(want.bound < kUseful * largest(want), name << " bound " << want.bound);
}

// A prompt and its expectation. A router near a tie turns a rounding into another expert; prompts
// on which the disturbed references do so have a useless bound and are passed over.
struct Prompt {
  std::vector<int32_t> tokens;
  Expected want;
};
Prompt decisive_prompt(const TinyModel& m, int64_t count, double cache_roundoff, uint64_t seed) {
  for (int attempt = 0; attempt < 50; ++attempt, seed += 1000) {
    Prompt p{some_tokens(count, seed), {}};
    p.want = expect(m.spec, p.tokens, cache_roundoff);
    if (p.want.bound < kUseful * largest(p.want)) return p;
  }
  CHECK_MSG(false, m.name << ": no prompt is decisive");
  return {};
}

struct CacheCode {
  Code code;
  double roundoff;  // half a unit in the last place of its significand of 24, 11 or 8 bits
};
constexpr CacheCode kCaches[] = {{Code::f32, 0}, {Code::f16, 0x1p-11}, {Code::bf16, 0x1p-8}};

TEST(every_family_equals_float64_in_prefill_and_decode) {
  for (const TinyShape& shape : tiny_shapes()) {
    const TinyModel m = make_tiny(shape);
    for (const CacheCode& cache : kCaches) {
      const auto [tokens, want] = decisive_prompt(m, 14, cache.roundoff, 7);
      Decoder d(m.spec, machine().isa, executor(2));
      KvCache whole(m.spec, 32, cache.code), steps(m.spec, 32, cache.code);
      check_logits(m.name + " prefill", run(d, {{&whole, tokens}}, LogitsOf::all), want, 0);
      CHECK_EQ(whole.length(), 14);
      const std::span<const int32_t> all(tokens);
      const Logits start = run(d, {{&steps, all.subspan(0, 5)}}, LogitsOf::last);
      check_logits(m.name + " first part", start, want, 4);
      for (size_t t = 5; t < tokens.size(); ++t) {
        check_logits(m.name + " decode", run(d, {{&steps, all.subspan(t, 1)}}, LogitsOf::last),
                     want, t);
      }
      CHECK_EQ(steps.length(), 14);
    }
  }
}

TEST(ragged_batch_equals_separate_runs) {
  for (const TinyShape& shape : tiny_shapes()) {
    const TinyModel m = make_tiny(shape);
    Decoder d(m.spec, machine().isa, executor(2));
    const size_t lengths[] = {3, 17, 1, 9};
    std::vector<std::vector<int32_t>> prompts;
    std::vector<Expected> want;
    std::vector<std::unique_ptr<KvCache>> caches;
    std::vector<Segment> segments, steps;
    for (const size_t n : lengths) {
      const Prompt p = decisive_prompt(m, int64_t(n) + 1, 0, 20 + n);
      prompts.push_back(p.tokens);
      want.push_back(p.want);
      caches.push_back(std::make_unique<KvCache>(m.spec, 32, Code::f32));
    }
    for (size_t i = 0; i < 4; ++i) {
      const std::span<const int32_t> all(prompts[i]);
      segments.push_back({caches[i].get(), all.subspan(0, lengths[i])});
      steps.push_back({caches[i].get(), all.subspan(lengths[i], 1)});
    }
    const size_t vocab = size_t(m.spec.vocab);
    const Logits all = run(d, segments, LogitsOf::all);
    for (const auto& c : caches) c->truncate(0);
    const Logits last = run(d, segments, LogitsOf::last), next = run(d, steps, LogitsOf::last);
    size_t row = 0;
    for (size_t i = 0; i < 4; ++i) {
      const auto part = [&](const Logits& from, size_t first, size_t rows) {
        return Logits(from.begin() + long(first * vocab),
                      from.begin() + long((first + rows) * vocab));
      };
      check_logits(m.name + " all", part(all, row, lengths[i]), want[i], 0);
      check_logits(m.name + " last", part(last, i, 1), want[i], lengths[i] - 1);
      check_logits(m.name + " next", part(next, i, 1), want[i], lengths[i]);
      row += lengths[i];
    }
  }
}

// Long enough for several chunks, parallel element-wise steps and merged attention parts.
TEST(thread_counts_give_identical_bits) {
  for (const char* name : {"mixtral", "qwen2_moe", "window", "gpt_oss", "latent_low"}) {
    for (const TinyShape& shape : tiny_shapes()) {
      if (shape.name != std::string(name)) continue;
      const TinyModel m = make_tiny(shape);
      const std::vector<int32_t> prompt = some_tokens(1300, 3), other = some_tokens(40, 4);
      const std::vector<int32_t> step = {11};
      std::vector<Logits> first, second;
      for (const int threads : {1, 2, 5}) {
        Decoder d(m.spec, machine().isa, executor(threads));
        KvCache a(m.spec, 1400, Code::f16), b(m.spec, 64, Code::f16);
        first.push_back(run(d, {{&a, prompt}, {&b, other}}, LogitsOf::last));
        second.push_back(run(d, {{&b, step}, {&a, step}}, LogitsOf::last));
      }
      for (size_t i = 1; i < first.size(); ++i) {
        CHECK(first[i] == first[0]);
        CHECK(second[i] == second[0]);
      }
      for (const float v : second[0]) CHECK(std::isfinite(v));
    }
  }
}

// Chunks of a prompt, parts of the keys with a sink in one of them, blocks of latent rows. Dense
// feed-forward: of so many tokens some would route by a rounding.
TEST(long_context_equals_float64) {
  for (TinyShape shape : tiny_shapes()) {
    const std::string name = shape.name;
    if (name != "mixtral" && name != "gpt_oss" && name != "latent" && name != "pairs") continue;
    shape.layers = 1;
    if (name != "mixtral") shape.experts = 0;
    if (name == "gpt_oss") shape.window = 0;
    const TinyModel m = make_tiny(shape);
    const std::vector<int32_t> tokens = some_tokens(1101, 5);
    const Expected want = expect(m.spec, tokens, 0, 2);
    Decoder d(m.spec, machine().isa, executor(2));
    KvCache cache(m.spec, 1101, Code::f32);
    const std::span<const int32_t> all(tokens);
    check_logits(name + " chunks", run(d, {{&cache, all.subspan(0, 1100)}}, LogitsOf::all), want,
                 0);
    check_logits(name + " parts", run(d, {{&cache, all.subspan(1100)}}, LogitsOf::last), want,
                 1100);
  }
}

TEST(a_decode_step_allocates_nothing) {
  for (const TinyShape& shape : tiny_shapes()) {
    const TinyModel m = make_tiny(shape);
    Decoder d(m.spec, machine().isa, executor(2));
    KvCache cache(m.spec, 700, Code::f16);
    const std::vector<int32_t> prompt = some_tokens(600, 6), step = {3};
    Logits out(size_t(m.spec.vocab));
    const Segment first{&cache, prompt}, next{&cache, step};
    d.forward({&first, 1}, LogitsOf::last, out.data());
    for (int i = 0; i < 2; ++i) d.forward({&next, 1}, LogitsOf::last, out.data());
    const int64_t before = allocations.load();
    for (int i = 0; i < 20; ++i) d.forward({&next, 1}, LogitsOf::last, out.data());
    CHECK_EQ(allocations.load() - before, 0);
  }
}

TEST(truncate_forgets) {
  const TinyModel m = make_tiny(tiny_shapes()[2]);
  Decoder d(m.spec, machine().isa, executor(2));
  const std::vector<int32_t> tokens = some_tokens(12, 9);
  const std::vector<int32_t> wrong = {1, 2, 3, 4, 5, 6, 7};
  const std::span<const int32_t> all(tokens);
  KvCache a(m.spec, 40, Code::bf16), b(m.spec, 40, Code::bf16);
  run(d, {{&a, all.subspan(0, 6)}}, LogitsOf::last);
  run(d, {{&b, all.subspan(0, 6)}}, LogitsOf::last);
  run(d, {{&a, wrong}}, LogitsOf::last);
  a.truncate(6);
  CHECK(run(d, {{&a, all.subspan(6)}}, LogitsOf::all) ==
        run(d, {{&b, all.subspan(6)}}, LogitsOf::all));
  CHECK_THROWS(a.truncate(13), "truncate takes a length in [0, 12]; got 13");
  CHECK_THROWS(a.truncate(-1), "got -1");
}

TEST(a_nan_of_the_router_rolls_back) {
  TinyModel m = make_tiny(tiny_shapes()[0]);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // Token 7 is poisoned: everything it touches becomes NaN, everything before it is sound.
  const_cast<float*>(static_cast<const float*>(m.spec.embed.data))[7 * m.spec.hidden] = nan;
  Decoder d(m.spec, machine().isa, executor(2));
  const std::vector<int32_t> good = {1, 2, 3}, bad = {4, 7, 5}, more = {6};
  KvCache a(m.spec, 1200, Code::f32), b(m.spec, 1200, Code::f32), fresh(m.spec, 1200, Code::f32);
  run(d, {{&a, good}}, LogitsOf::last);
  run(d, {{&fresh, good}}, LogitsOf::last);
  CHECK_THROWS(run(d, {{&b, more}, {&a, bad}}, LogitsOf::last),
               "router logits must be finite; got NaN or infinity in layer 0 for position ");
  CHECK_EQ(a.length(), 3);
  CHECK_EQ(b.length(), 0);
  // In a later chunk: what earlier chunks appended is forgotten too.
  std::vector<int32_t> late = some_tokens(1190, 8);
  for (int32_t& t : late) t = t == 7 ? 8 : t;
  late[1180] = 7;
  CHECK_THROWS(run(d, {{&a, late}}, LogitsOf::last), " of segment 0. Check the weights");
  CHECK_EQ(a.length(), 3);
  CHECK(run(d, {{&a, more}}, LogitsOf::last) == run(d, {{&fresh, more}}, LogitsOf::last));
}

TEST(bad_input_is_refused_before_anything_changes) {
  const TinyModel m = make_tiny(tiny_shapes()[0]), other = make_tiny(tiny_shapes()[2]);
  Decoder d(m.spec, machine().isa, executor(2));
  KvCache a(m.spec, 8, Code::f16), b(m.spec, 8, Code::f16), foreign(other.spec, 8, Code::f16);
  const std::vector<int32_t> good = {1, 2}, negative = {1, -1}, high = {67}, none;
  const std::vector<int32_t> long_one(9, 1);
  run(d, {{&a, good}}, LogitsOf::last);
  CHECK_THROWS(run(d, {{&a, good}, {&b, negative}}, LogitsOf::last),
               "decoder: token ids must be in [0, 67); got -1 as token 1 of segment 1");
  CHECK_THROWS(run(d, {{&a, high}}, LogitsOf::last), "got 67");
  CHECK_THROWS(run(d, {{&b, long_one}}, LogitsOf::last),
               "the cache of segment 0 must hold 9 tokens; got room for 8");
  CHECK_THROWS(run(d, {{&a, good}, {&b, good}, {&a, good}}, LogitsOf::last),
               "each cache may appear once");
  CHECK_THROWS(run(d, {{&a, none}}, LogitsOf::last), "at least one token");
  CHECK_THROWS(run(d, {{nullptr, good}}, LogitsOf::last), "must have a cache");
  CHECK_THROWS(run(d, {{&foreign, good}}, LogitsOf::last), "must be made for this model");
  CHECK_EQ(a.length(), 2);
  CHECK_EQ(b.length(), 0);
  d.forward({}, LogitsOf::last, nullptr);
}

TEST(weight_bytes_count_each_touched_expert_once) {
  const TinyModel m = make_tiny(tiny_shapes()[1]);  // bf16; a dense, then a routed layer
  Decoder d(m.spec, machine().isa, executor(2));
  CHECK_EQ(d.last_weight_bytes(), 0);
  KvCache cache(m.spec, 400, Code::f16);
  const std::vector<int32_t> one = {5}, many = some_tokens(300, 1);
  const int64_t attention = 48 * 48 + 2 * 24 * 48 + 48 * 48, expert = 3 * 40 * 48;
  const int64_t fixed = 67 * 48 + 2 * attention + expert + 6 * 48 + 48 + 3 * 56 * 48;
  run(d, {{&cache, one}}, LogitsOf::last);
  CHECK_EQ(d.last_weight_bytes(), 2 * (fixed + 48 + 3 * expert));
  run(d, {{&cache, many}}, LogitsOf::last);
  CHECK_EQ(d.last_weight_bytes(), 2 * (fixed + 67 * 48 + 6 * expert));
}

}  // namespace
}  // namespace cpumoe
