// The decoder and its caches.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "base/error.h"
#include "bindings.h"
#include "decoder/decoder.h"
#include "model_spec.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cpumoe_py {
namespace {

using cpumoe::require;

cpumoe::Code take_kv_code(const std::string& kv) {
  const cpumoe::Format* f = cpumoe::find_format(kv);
  require(f != nullptr && cpumoe::is_float(f->code), "kv", "must be fp16, bf16 or fp32; got ", kv);
  return f->code;
}

// core's Decoder, and references to what it views. One forward() at a time: it owns its buffers.
struct PyDecoder {
  nb::object spec, executor;
  std::unique_ptr<cpumoe::Decoder> decoder;
  std::mutex busy;

  PyDecoder(nb::object spec_, nb::object executor_)
      : spec(std::move(spec_)), executor(std::move(executor_)) {
    cpumoe::Executor& workers = nb::cast<cpumoe::Executor&>(executor);
    decoder = std::make_unique<cpumoe::Decoder>(take_model(spec), cpumoe::probe_machine().isa,
                                                workers);
  }
};

struct PyKvCache {
  cpumoe::KvCache cache;
  std::atomic<bool> busy{false};
  PyKvCache(const PyDecoder& d, int64_t capacity, const std::string& kv)
      : cache(d.decoder->model(), capacity, take_kv_code(kv)) {}
};

// Marks a cache as used for its own lifetime. A second user is refused, not made to wait: the
// tokens of two calls in one sequence would come in no order that either of them knows.
class CacheLease {
 public:
  explicit CacheLease(PyKvCache& cache) : cache_(&cache) {
    require(!cache.busy.exchange(true, std::memory_order_acquire), "KvCache",
            "must be used by one call at a time; got a second one while the first runs. ",
            "Give each thread its own cache");
  }
  CacheLease(CacheLease&& other) noexcept : cache_(std::exchange(other.cache_, nullptr)) {}
  CacheLease& operator=(CacheLease&&) = delete;
  ~CacheLease() {
    if (cache_ != nullptr) cache_->busy.store(false, std::memory_order_release);
  }

 private:
  PyKvCache* cache_;
};

// What a call of forward() keeps alive and unshared while others hold the interpreter lock: the
// list may be a generator's, or change. The ids are a copy, so that what was checked is what is
// read.
struct Held {
  nb::object owner;
  PyKvCache* cache;
  std::vector<int32_t> ids;
};

std::vector<Held> take_segments(nb::object segments) {
  std::vector<Held> held;
  for (nb::handle item : segments) {
    PyKvCache* cache = nullptr;
    require(nb::isinstance<nb::tuple>(item) && nb::len(item) == 2, "forward",
            "each segment must be a pair (KvCache, int32 ids); got something else. ",
            "Write [(cache, ids), ...]");
    nb::object owner(item[0]);
    require(nb::try_cast<PyKvCache*>(owner, cache) && cache != nullptr, "forward",
            "each segment must be a pair (KvCache, int32 ids); got something else. ",
            "Write [(cache, ids), ...]");
    const Array ids = take_line(nb::object(item[1]), "forward", "ids", "int32");
    require(!ids.empty(), "forward", "each segment must have at least one token; got none. ",
            "Leave the segment out");
    const int32_t* first = static_cast<const int32_t*>(ids.data);
    held.push_back({std::move(owner), cache, {first, first + ids.shape[0]}});
  }
  return held;
}

constexpr const char* kSites[] = {"attention", "output", "feed_forward"};

// Calls `tap` with a copy of what it is shown. The interpreter lock is taken for that.
cpumoe::Tap make_tap(const nb::object& tap) {
  if (tap.is_none()) return {};
  return [&tap](int64_t layer, cpumoe::Site site, const float* x, int64_t rows, int64_t width) {
    nb::gil_scoped_acquire locked;
    const size_t count = size_t(rows * width);
    float* copy = new float[count];
    std::copy(x, x + count, copy);
    nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    tap(layer, kSites[size_t(site)],
        nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(
            copy, {size_t(rows), size_t(width)}, owner)));
  };
}

nb::object forward(PyDecoder& self, nb::object segments, bool all, nb::object tap) {
  const cpumoe::Tap shown = make_tap(tap);
  const std::vector<Held> held = take_segments(std::move(segments));
  std::vector<cpumoe::Segment> parts;
  std::vector<CacheLease> leases;
  size_t rows = 0;
  for (const Held& h : held) {
    const auto same = [&](const cpumoe::Segment& s) { return s.cache == &h.cache->cache; };
    // core refuses a cache that occurs twice, in its own words
    if (std::none_of(parts.begin(), parts.end(), same)) leases.emplace_back(*h.cache);
    parts.push_back({&h.cache->cache, h.ids});
    rows += all ? h.ids.size() : 1;
  }
  require(!parts.empty(), "forward",
          "there must be at least one segment; got none. Pass [(cache, ids), ...]");
  const size_t vocab = size_t(self.decoder->model().vocab);
  std::unique_ptr<float[]> logits(new float[rows * vocab]);
  {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(self.busy);
    self.decoder->forward(parts, all ? cpumoe::LogitsOf::all : cpumoe::LogitsOf::last,
                          logits.get(), shown);
  }
  float* data = logits.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, {rows, vocab}, owner));
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<PyDecoder>(m, "Decoder", "The whole forward pass of a model, weights in place.")
      .def(nb::init<nb::object, nb::object>(), "spec"_a, "executor"_a,
           "spec: a cpumoe.models.ModelSpec, kept alive. Raises Error when shapes do not fit.")
      .def("forward", &forward, "segments"_a, "all"_a = false, "tap"_a = nb::none(),
           nb::sig("def forward(self, segments: collections.abc.Sequence[tuple[KvCache, "
                   "numpy.typing.NDArray[numpy.int32]]], all: bool = False, tap: "
                   "collections.abc.Callable[[int, str, numpy.typing.NDArray[numpy.float32]], None]"
                   " | None = None) -> numpy.typing.NDArray[numpy.float32]"),
           "segments: [(KvCache, int32 ids [n]), ...]. Appends the tokens to the caches and gives\n"
           "fp32 logits [segments, vocab], or [tokens, vocab] with `all`. Releases the GIL.\n"
           "tap(layer, site, x): sees a copy of what linear maps are applied to, fp32\n"
           "[tokens, width]: site \"attention\" (q, k, v), \"output\" (o), \"feed_forward\"; it must\n"
           "not use this decoder. What it raises ends the call.\n"
           "Raises Error, with the caches as they were, also when another call uses one of them.")
      .def_prop_ro("last_weight_bytes",
                   [](const PyDecoder& d) { return d.decoder->last_weight_bytes(); },
                   "Bytes of weights that the last forward() read, each weight counted once.");

  nb::class_<PyKvCache>(m, "KvCache", "Keys and values of one sequence; memory grows with use.")
      .def(nb::init<const PyDecoder&, int64_t, const std::string&>(), "decoder"_a, "capacity"_a,
           "kv"_a = "fp16", "capacity: tokens. kv: fp16, bf16 or fp32. Raises Error.")
      .def_prop_ro("length", [](const PyKvCache& c) { return c.cache.length(); })
      .def_prop_ro("capacity", [](const PyKvCache& c) { return c.cache.capacity(); })
      .def_prop_ro("bytes_per_token", [](const PyKvCache& c) { return c.cache.bytes_per_token(); })
      .def("truncate", [](PyKvCache& c, int64_t n) {
             const CacheLease lease(c);
             c.cache.truncate(n);
           }, "length"_a,
           "Forget the tokens from `length` on. Raises Error while a forward() uses the cache.");
}

}  // namespace cpumoe_py
