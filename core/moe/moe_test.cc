// The operator against float64 on the decoded weights, and what it refuses.
#include "moe/testing/batch.h"

namespace cpumoe {
namespace {

using testing::Batch;
using testing::Bounded;
using testing::check_within;
using testing::executor;
using testing::Fusion;
using testing::kCodes;
using testing::Layer;
using testing::LayerShape;
using testing::machine;
using testing::Rng;
using testing::run;

void check_layer(const LayerShape& shape, int64_t tokens, int64_t k, Code x_code, Code out_code) {
  const Layer layer(shape, uint64_t(tokens + 1));
  const Batch b(tokens, shape.hidden, k, shape.experts, x_code, uint64_t(tokens + 7));
  const ExpertsView view = layer.view();
  const RoutingPlan plan = b.plan(view.experts);
  const MoeBlock block{&view, &plan};
  const std::vector<char> got = run({&block, 1}, b.view(), out_code);
  check_within(got, out_code, testing::reference({&block, 1}, b.view(), out_code),
               concat(shape.format, shape.layout == Layout::rows ? " rows" : " columns", " fusion ",
                      int(shape.fusion), " kind ", int(shape.kind), " biases ", shape.biases, " H ",
                      shape.hidden, " I ", shape.inter, " T ", tokens));
}

TEST(every_weight_form_and_number_of_tokens) {
  int turn = 0;
  for (const char* format : {"fp32", "fp16", "bf16"}) {
    for (Layout layout : {Layout::rows, Layout::columns}) {
      for (Fusion fusion :
           {Fusion::separate, Fusion::fused, Fusion::interleaved, Fusion::ungated}) {
        for (bool biases : {false, true}) {
          LayerShape s;
          s.format = format;
          s.layout = layout;
          s.fusion = fusion;
          s.biases = biases;
          for (int64_t tokens : {0, 1, 2, 3, 5, 17, 64}) {
            ++turn;
            s.hidden = turn % 2 ? 97 : 64;
            s.inter = turn % 3 ? 33 : 48;
            check_layer(s, tokens, 1 + turn % 3, kCodes[turn % 3], kCodes[turn / 3 % 3]);
          }
        }
      }
    }
  }
}

TEST(every_activation) {
  for (ActKind kind : {ActKind::identity, ActKind::silu, ActKind::gelu_erf, ActKind::gelu_tanh,
                       ActKind::relu, ActKind::relu2, ActKind::swiglu_oai}) {
    for (Fusion fusion : {Fusion::separate, Fusion::interleaved, Fusion::ungated}) {
      for (Layout layout : {Layout::rows, Layout::columns}) {
        if (kind == ActKind::swiglu_oai && fusion == Fusion::ungated) continue;
        LayerShape s;
        s.kind = kind;
        s.fusion = fusion;
        s.layout = layout;
        s.biases = true;
        s.limit = kind == ActKind::swiglu_oai ? 0.75f : s.limit;
        for (int64_t tokens : {1, 40}) check_layer(s, tokens, 2, Code::f32, Code::f32);
      }
    }
  }
}

// Sizes around the blocks of the kernels and of the slices, one expert with many tokens.
TEST(sizes_around_blocks) {
  for (const char* format : {"fp32", "bf16"}) {
    for (Layout layout : {Layout::rows, Layout::columns}) {
      for (auto [hidden, inter] :
           {std::pair{1, 1}, {1, 40}, {40, 1}, {15, 16}, {17, 31}, {96, 97}, {193, 95}}) {
        for (int64_t tokens : {1, 4, 9, 33}) {
          LayerShape s;
          s.experts = 2;
          s.hidden = hidden;
          s.inter = inter;
          s.format = format;
          s.layout = layout;
          s.fusion = Fusion::interleaved;
          check_layer(s, tokens, 2, Code::bf16, Code::f32);
        }
      }
    }
  }
  LayerShape s;
  s.experts = 2;
  s.hidden = 40;
  s.inter = 24;
  check_layer(s, 200, 2, Code::f32, Code::f32);
  check_layer(s, 700, 1, Code::f32, Code::bf16);  // several token slices
}

TEST(blocks_and_accumulation) {
  LayerShape routed, shared;
  routed.format = "bf16";
  shared.experts = 1;
  shared.inter = 70;
  const Layer a(routed, 7), c(shared, 8);
  const ExpertsView av = a.view(), cv = c.view();
  for (int64_t tokens : {1, 6, 50}) {
    for (Code code : kCodes) {
      const Batch b(tokens, routed.hidden, 2, routed.experts, Code::bf16, 13);
      Batch all = b;
      all.top_k = 1;
      all.ids.assign(size_t(tokens), 0);
      all.weights.resize(size_t(tokens));
      const RoutingPlan pa = b.plan(routed.experts), pc = all.plan(1);
      const MoeBlock blocks[] = {{&av, &pa}, {&cv, &pc}};
      const int64_t stride = routed.hidden + 5, size = int64_t(code_bits(code)) / 8;
      std::vector<char> out(size_t(tokens * stride * size));
      Rng rng(14);
      testing::fill_random(out.data(), code, tokens * stride, 1.0f, rng);
      const std::vector<char> before = out;
      std::vector<double> base;
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t i = 0; i < routed.hidden; ++i) {
          base.push_back(double(load_as_float(out.data(), code, t * stride + i)));
        }
      }
      Workspace workspace;
      moe({blocks, b.view(), out.data(), code, stride, true}, machine().isa, workspace, executor());
      std::vector<char> dense;
      for (int64_t t = 0; t < tokens; ++t) {
        const auto row = out.begin() + t * stride * size;
        dense.insert(dense.end(), row, row + routed.hidden * size);
        CHECK(std::equal(row + routed.hidden * size, row + stride * size,
                         before.begin() + (t * stride + routed.hidden) * size));
      }
      check_within(dense, code, testing::reference(blocks, b.view(), code, &base), "two blocks");
    }
  }
}

TEST(a_workspace_serves_many_shapes) {
  Workspace workspace;
  for (int round = 0; round < 2; ++round) {
    for (int64_t tokens : {64, 1, 17, 3}) {
      LayerShape s;
      s.hidden = 30 + tokens;
      s.format = tokens % 2 ? "bf16" : "fp32";
      const Layer layer(s, 15);
      const ExpertsView view = layer.view();
      const Batch b(tokens, s.hidden, 2, s.experts, Code::f32, 16);
      const RoutingPlan plan = b.plan(s.experts);
      const MoeBlock block{&view, &plan};
      std::vector<char> out(b.x.size());
      moe({{&block, 1}, b.view(), out.data(), Code::f32, s.hidden, false}, machine().isa, workspace,
          executor());
      CHECK(out == run({&block, 1}, b.view(), Code::f32));
    }
  }
}

TEST(nan_and_infinity_propagate) {
  LayerShape s;
  const Layer layer(s, 17);
  for (int64_t tokens : {2, 40}) {
    Batch b(tokens, s.hidden, 2, s.experts, Code::f32, 18);
    const float bad = std::numeric_limits<float>::quiet_NaN();
    store_from_float(b.x.data(), Code::f32, s.hidden + 3, bad);
    const std::vector<char> got = run(layer, b);
    for (int64_t i = 0; i < s.hidden; ++i) {
      CHECK(!std::isnan(load_as_float(got.data(), Code::f32, i)));
      CHECK(std::isnan(load_as_float(got.data(), Code::f32, s.hidden + i)));
    }
  }
}

TEST(bad_input_is_refused_with_a_reason) {
  LayerShape s;
  s.biases = true;
  const Layer layer(s, 19);
  const Batch b(3, s.hidden, 2, s.experts, Code::f32, 20);
  const RoutingPlan plan = b.plan(s.experts);
  std::vector<float> out(size_t(3 * s.hidden));
  const auto call = [&](auto change) {
    Layer changed(s, 19);
    ExpertsView view = changed.view();
    RoutingPlan p = plan;
    MoeBlock block{&view, &p};
    MoeArgs args{{&block, 1}, b.view(), out.data(), Code::f32, s.hidden, false};
    IsaSet isa = machine().isa;
    change(changed, view, p, args, isa);
    Workspace workspace;
    moe(args, isa, workspace, executor());
  };
  using L = Layer&;
  using V = ExpertsView&;
  using P = RoutingPlan&;
  using A = MoeArgs&;
  using I = IsaSet&;
  call([](L, V, P, A, I) {});
  CHECK_THROWS(call([](L, V, P, A a, I) { a.x.cols -= 1; }), "hidden size 97; got 96");
  CHECK_THROWS(call([](L, V, P, A a, I) { a.x.data = nullptr; }), "x must have data");
  CHECK_THROWS(call([](L, V, P, A a, I) { a.x.stride = 5; }), "stride of at least 97; got");
  CHECK_THROWS(call([](L, V, P, A a, I) { a.out = nullptr; }), "out must have data");
  CHECK_THROWS(call([](L, V, P, A a, I) { a.out_stride = 96; }), "stride of at least 97; got");
  CHECK_THROWS(call([](L, V, P, A a, I) { a.out = static_cast<char*>(a.out) + 1; }), "aligned");
  CHECK_THROWS(call([](L, V, P, A a, I) { a.x.rows = 2; }), "2 tokens of x");
  CHECK_THROWS(call([](L, V, P p, A, I) { p.offsets.pop_back(); }), "a plan must be for");
  constexpr int64_t kTooMany = int64_t(1) << 31;
  CHECK_THROWS(call([](L, V v, P, A, I) { v.experts = kTooMany; }), "experts must be from 1 to");
  CHECK_THROWS(call([](L, V v, P, A, I) { v.hidden = kTooMany; }), "sizes must be at least 1");
  CHECK_THROWS(call([](L, V v, P, A, I) { v.inter = kTooMany; }), "sizes must be at least 1");
  CHECK_THROWS(call([](L, V v, P, A, I) {
                 v.up = {}, v.interleaved = true;
                 v.inter = kTooMany / 2;
               }),
               "sizes must be at least 1, and below 2147483648 and 1073741824");
  CHECK_THROWS(call([](L, V v, P, A, I) { v.gate = v.gate.first(5); }), "gate must hold one view");
  CHECK_THROWS(call([](L, V v, P, A, I) { v.down = {}; }), "down must hold one view");
  CHECK_THROWS(call([](L, V v, P, A, I) { v.interleaved = true; }), "up must be empty");
  CHECK_THROWS(call([](L, V v, P, A, I) { v.act.limit = 0; }), "positive limit");
  CHECK_THROWS(call([](L, V v, P, A, I) { v.act.alpha = NAN; }), "finite alpha");
  CHECK_THROWS(call([](L, V v, P, A, I) {
                 v.up = {};
                 v.up_bias = {};
                 v.act.kind = ActKind::swiglu_oai;
               }),
               "swiglu_oai");
  CHECK_THROWS(call([](L, V v, P, A, I) { v.up = {}; }), "up_bias needs separate");
  const size_t used = size_t(b.ids[0]);
  const std::string at = concat("[", used, "]");
  CHECK_THROWS(call([&](L l, V, P, A, I) { l.gate[used].data = nullptr; }), "gate" + at);
  CHECK_THROWS(call([&](L l, V, P, A, I) { l.up[used].n += 1; }), "up" + at + " must be [33");
  CHECK_THROWS(call([&](L l, V, P, A, I) { l.down[used].stride = 3; }), "down" + at + " in rows");
  CHECK_THROWS(call([&](L l, V, P, A, I) { l.down[used].format = nullptr; }), "have a format");
  CHECK_THROWS(call([&](L l, V, P, A, I) { l.gate_bias[used].size = 1; }), "gate_bias" + at);
  CHECK_THROWS(call([&](L l, V, P, A, I) { l.down_bias[used].step = 0; }), "positive step");
  CHECK_THROWS(call([](L, V, P, A, I isa) { isa.mask = 0; }), "instruction sets");
}

TEST(no_kernel_lists_every_candidate) {
  Workspace workspace;
  const Layer layer({}, 21);
  const std::vector<float> x(97);
  std::vector<float> out(33);
  const LinearOp op{&layer.gate[0], {}, out.data(), 33};
  CHECK_THROWS(linear({&op, 1}, {x.data(), Code::f32, 1, 97, 97}, ActClass::fp32, IsaSet{0},
                      workspace, executor()),
               "scalar_plain_rows_f32");
}

}  // namespace
}  // namespace cpumoe
