// check_model and KvCache: what they refuse, and how they say it.
#include <sys/resource.h>

#include <cstdio>
#include <functional>
#include <string>

#include "decoder/decoder.h"
#include "decoder/testing/tiny.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::make_tiny;
using testing::tiny_shapes;
using testing::TinyModel;

TEST(sound_models_pass) {
  for (const testing::TinyShape& s : tiny_shapes()) check_model(make_tiny(s).spec);
}

TEST(every_wrong_shape_is_named) {
  struct Wrong {
    std::function<void(ModelSpec&)> spoil;
    const char* message;
  };
  const Wrong all[] = {
      {[](ModelSpec& m) { m.layers.clear(); }, "model: there must be at least one layer; got 0"},
      {[](ModelSpec& m) { m.vocab = 0; }, "model: vocab and hidden must be positive; got 0 and 48"},
      {[](ModelSpec& m) { m.embed.n = 66; }, "embed: shape must be [67, 48]; got [66, 48]"},
      {[](ModelSpec& m) {
         m.embed.layout = Layout::columns;
         m.embed.stride = 67;
       },
       "embed: the embedding must be in rows layout"},
      {[](ModelSpec& m) { m.head.w.data = nullptr; }, "head: a weight [67, 48] must be present"},
      {[](ModelSpec& m) { m.final_norm.size = 47; }, "final_norm: shape must be [48]; got [47]"},
      {[](ModelSpec& m) { m.layers[1].attn_norm.data = nullptr; },
       "layer 1 attn_norm: a vector of 48 elements must be present"},
      {[](ModelSpec& m) { m.layers[1].attn.q.w.n = 40; },
       "layer 1 attention.q: shape must be [48, 48]; got [40, 48]"},
      {[](ModelSpec& m) { m.layers[0].attn.k.w.stride = 47; },
       "layer 0 attention.k: in rows layout must have a stride of at least 48"},
      {[](ModelSpec& m) { m.layers[0].attn.v.bias.size = 23; },
       "layer 0 attention.v.bias: shape must be [24]; got [23]"},
      {[](ModelSpec& m) { m.layers[1].attn.o.w.k = 24; },
       "layer 1 attention.o: shape must be [48, 48]; got [48, 24]"},
      {[](ModelSpec& m) { m.layers[0].attn.kv_heads = 3; },
       "layer 0 attention: heads must be a positive multiple of kv_heads; got 4 and 3"},
      {[](ModelSpec& m) { m.layers[0].attn.head_dim = 0; }, "head_dim must be positive; got 0"},
      {[](ModelSpec& m) { m.layers[0].attn.rope_dims = 14; },
       "rope_dims must be even and at most head_dim 12; got 14"},
      {[](ModelSpec& m) { m.layers[0].attn.inv_freq.pop_back(); },
       "inv_freq must hold rope_dims / 2 = 6 frequencies; got 5"},
      {[](ModelSpec& m) { m.layers[0].attn.qk_norm = QkNorm::per_head; },
       "layer 0 attention.q_norm: a vector of 12 elements must be present"},
      {[](ModelSpec& m) { m.layers[0].attn.scale = INFINITY; }, "scale must be finite"},
      {[](ModelSpec& m) { m.layers[0].ffn.gate.w.n = 41; },
       "layer 0 ffn.gate: shape must be [40, 48]; got [41, 48]"},
      {[](ModelSpec& m) { m.layers[0].ffn.down = {}; },
       "layer 0 ffn.: the intermediate size must be positive; got 0"},
      {[](ModelSpec& m) { m.layers[1].ffn.router.top_k = 7; }, "layer 1 ffn.router: "},
      {[](ModelSpec& m) { m.layers[1].ffn.router_w.w.n = 5; },
       "layer 1 ffn.router: shape must be [6, 48]; got [5, 48]"},
      {[](ModelSpec& m) { m.layers[1].ffn.expert_down.pop_back(); },
       "layer 1 ffn.experts: there must be 6 experts as the router says; got 5"},
      {[](ModelSpec& m) { m.layers[1].ffn.expert_up[3].k = 47; }, "layer 1 ffn.experts: "},
      {[](ModelSpec& m) { m.layers[1].ffn.shared_up.w.n = 50; },
       "layer 1 ffn.shared_up: shape must be [56, 48]; got [50, 48]"},
      {[](ModelSpec& m) { m.layers[1].ffn.shared_score.w.n = 2; },
       "layer 1 ffn.shared_score: shape must be [1, 48]; got [2, 48]"},
      {[](ModelSpec& m) { m.layers[1].ffn.shared_down = {}; },
       "layer 1 ffn.shared_score: must come with a shared expert"},
  };
  const TinyModel good = make_tiny(tiny_shapes()[1]);
  for (const Wrong& w : all) {
    ModelSpec m = good.spec;
    w.spoil(m);
    CHECK_THROWS(check_model(m), w.message);
  }
}

TinyModel tiny(const std::string& name) {
  for (const testing::TinyShape& s : tiny_shapes()) {
    if (s.name == name) return make_tiny(s);
  }
  CHECK_MSG(false, "no tiny model " << name);
  return {};
}

TEST(every_wrong_latent_shape_is_named) {
  struct Wrong {
    std::function<void(AttentionSpec&)> spoil;
    const char* message;
  };
  const Wrong all[] = {
      {[](AttentionSpec& a) { a.sinks.size = 39; },
       "attention.sinks: shape must be [40]; got [39]"},
      {[](AttentionSpec& a) { a.kv_heads = 2; }, "latent attention must have one KV head"},
      {[](AttentionSpec& a) { a.qk_norm = QkNorm::whole; }, "no q/k norm and no clip"},
      {[](AttentionSpec& a) { a.rope_dims = 20, a.inv_freq.resize(10); },
       "heads must have elements without rope, and values; got 0 and 16"},
      {[](AttentionSpec& a) { a.latent.value_dim = 0; }, "got 12 and 0"},
      {[](AttentionSpec& a) { a.latent.norm.data = nullptr; },
       "layer 0 attention.latent_norm: a vector of 33 elements must be present"},
      {[](AttentionSpec& a) { a.latent.rank = 32; }, "attention.k: shape must be [40, 48]"},
      {[](AttentionSpec& a) { a.q.w.k = 48; }, "attention.q: shape must be [800, 22]"},
      {[](AttentionSpec& a) { a.latent.q_norm.size = 21; }, "q_norm: shape must be [22]; got [21]"},
      {[](AttentionSpec& a) { a.latent.q_a.w.k = 47; }, "attention.q_a: shape must be [22, 48]"},
      {[](AttentionSpec& a) { a.o.w.k = 800; }, "attention.o: shape must be [48, 640]"},
      {[](AttentionSpec& a) { a.latent.k_up.pop_back(); },
       "must hold one weight per head (40); got 39 and 40"},
      {[](AttentionSpec& a) { a.latent.k_up[3].k = 20; }, "k_up[3]: shape must be [33, 12]"},
      {[](AttentionSpec& a) { a.latent.v_up[5].n = 12; }, "v_up[5]: shape must be [16, 33]"},
  };
  const TinyModel good = tiny("latent_low");
  for (const Wrong& w : all) {
    ModelSpec m = good.spec;
    w.spoil(m.layers[0].attn);
    CHECK_THROWS(check_model(m), w.message);
  }
}

TEST(a_latent_is_cached_once) {
  const TinyModel m = tiny("latent_low");  // two layers of 33 + 8 elements, whatever the 40 heads
  CHECK_EQ(KvCache(m.spec, 16, Code::bf16).bytes_per_token(), 2 * (33 + 8) * 2);
}

int64_t resident_bytes() {
  long total = 0, resident = 0;
  std::FILE* f = std::fopen("/proc/self/statm", "r");
  if (f == nullptr) return -1;
  const int read = std::fscanf(f, "%ld %ld", &total, &resident);
  std::fclose(f);
  return read == 2 ? resident * 4096 : -1;
}

TEST(a_cache_costs_what_it_holds) {
  const TinyModel m = make_tiny(tiny_shapes()[0]);
  const int64_t before = resident_bytes();
  if (before < 0) SKIP("no /proc/self/statm");
  KvCache cache(m.spec, int64_t(1) << 22, Code::f16);  // about 1 GiB of address space
  CHECK_EQ(cache.capacity(), int64_t(1) << 22);
  CHECK_EQ(cache.length(), 0);
  CHECK_EQ(cache.bytes_per_token(), 2 * 2 * (12 + 16) * 2);
  CHECK_LT(resident_bytes() - before, 16 << 20);
}

TEST(absurd_capacities_are_refused) {
  const TinyModel m = make_tiny(tiny_shapes()[0]);
  CHECK_THROWS(KvCache(m.spec, 0, Code::f16),
               "kv cache: capacity must be in [1, 2147483647] tokens; got 0");
  CHECK_THROWS(KvCache(m.spec, -5, Code::f16), "got -5");
  CHECK_THROWS(KvCache(m.spec, int64_t(1) << 40, Code::f16), "capacity must be");
  ModelSpec wide = m.spec;
  wide.layers[0].attn.kv_heads = 1 << 20;
  CHECK_THROWS(KvCache(wide, 2147483647, Code::f32), "the system must grant");
  wide.layers[0].attn.kv_heads = int64_t(1) << 40;
  CHECK_THROWS(KvCache(wide, 1, Code::f32), "must be positive and sane");
}

}  // namespace
}  // namespace cpumoe
