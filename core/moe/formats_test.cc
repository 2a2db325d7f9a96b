// The operator on experts of every code, in both classes of activations.
#include <set>

#include "moe/testing/batch.h"

namespace cpumoe {
namespace {

using testing::Batch;
using testing::check_within;
using testing::Fusion;
using testing::Layer;
using testing::LayerShape;
using testing::run;

// One format of every code and rule of zero points.
std::vector<const Format*> formats_under_test() {
  std::vector<const Format*> out;
  std::set<std::pair<int, int>> seen;
  int count = 0;
  const Format* all = formats(&count);
  for (int i = 0; i < count; ++i) {
    if (!is_float(all[i].code) && seen.insert({int(all[i].code), int(all[i].zeros)}).second)
      out.push_back(&all[i]);
  }
  return out;
}

LayerShape shape_of(const Format& f, Fusion fusion) {
  LayerShape s;
  s.experts = 3;
  s.format = f.name;
  s.layout = columns_only(f.code) ? Layout::columns : Layout::rows;
  s.fusion = fusion;
  s.biases = true;
  const bool blocks = code_block(f.code).elements > 8;
  s.hidden = blocks ? 256 : 144;
  s.inter = blocks ? 256 : f.scale_rows == 128 ? 128 : 80;
  return s;
}

TEST(every_code_in_both_classes) {
  int turn = 0;
  for (const Format* f : formats_under_test()) {
    for (const ActClass act_class : {ActClass::fp32, ActClass::int8}) {
      for (const int64_t tokens : {1, 4}) {
        const Fusion forms[] = {Fusion::separate, Fusion::fused, Fusion::interleaved};
        const LayerShape s = shape_of(*f, forms[turn++ % 3]);
        const Layer layer(s, uint64_t(turn));
        const Batch b(tokens, s.hidden, 2, s.experts, Code::bf16, uint64_t(turn + 50));
        const ExpertsView view = layer.view();
        const RoutingPlan plan = b.plan(view.experts);
        const MoeBlock block{&view, &plan};
        const std::vector<char> got =
            run({&block, 1}, b.view(), Code::f32, testing::executor(), act_class);
        check_within(got, Code::f32,
                     testing::reference({&block, 1}, b.view(), Code::f32, nullptr, act_class),
                     concat(f->name, " class ", act_class_name(act_class), " T ", tokens));
      }
    }
  }
}

// Gate, up and down of three formats: kernels of other classes, blocks, operands and orders of the
// tile than gate's.
TEST(gate_and_up_of_two_formats) {
  struct Case {
    const char *gate, *up, *down;
    Layout gate_layout, up_layout;
    int64_t hidden, inter;
  };
  constexpr Layout rows = Layout::rows, columns = Layout::columns;
  for (const Case& c : {Case{"q4_k", "q6_k", "q4_0", rows, rows, 256, 32},
                        {"iq4_xs", "fp16", "q8_0", rows, rows, 256, 32},
                        {"bf16", "q4_0", "fp32", rows, rows, 96, 40},
                        {"fp32", "fp16", "bf16", rows, columns, 40, 67},
                        {"fp16", "bf16", "mxfp4", columns, rows, 40, 32},
                        {"int4_g32", "awq4_g32", "int8_row", rows, columns, 32, 96}}) {
    LayerShape shape;
    shape.experts = 2;
    shape.hidden = c.hidden;
    shape.inter = c.inter;
    shape.biases = true;
    const auto layer = [&](const char* format, Layout layout, uint64_t seed) {
      shape.format = format;
      shape.layout = layout;
      return Layer(shape, seed);
    };
    const Layer gate = layer(c.gate, c.gate_layout, 1), up = layer(c.up, c.up_layout, 2),
                down = layer(c.down, rows, 3);
    ExpertsView view = gate.view();
    view.up = up.up;
    view.down = down.down;
    for (const int64_t tokens : {1, 18}) {
      const Batch batch(tokens, shape.hidden, 2, shape.experts, Code::f32, 3);
      const RoutingPlan plan = batch.plan(shape.experts);
      const MoeBlock block{&view, &plan};
      for (const ActClass act_class : {ActClass::fp32, ActClass::int8}) {
        const std::vector<char> want =
            run({&block, 1}, batch.view(), Code::f32, testing::executor(), act_class);
        check_within(want, Code::f32,
                     testing::reference({&block, 1}, batch.view(), Code::f32, nullptr, act_class),
                     concat(c.gate, " and ", c.up, " class ", act_class_name(act_class), " T ",
                            tokens));
        Executor workers(testing::machine(), {3, false, -1});
        CHECK(run({&block, 1}, batch.view(), Code::f32, workers, act_class) == want);
      }
    }
  }
}

// Gate and up as int4, down as q8_0 with 32 inputs to a scale: slices of the intermediate must end
// where the second product's groups do.
TEST(products_of_two_formats_and_any_number_of_threads) {
  LayerShape a, b;
  a.hidden = b.hidden = 160;
  a.inter = b.inter = 352;
  a.format = "fp8_row";
  b.format = "q8_0";
  const Layer first(a, 1), second(b, 2);
  ExpertsView view = first.view();
  view.down = second.down;
  for (const int64_t tokens : {1, 3, 40}) {
    const Batch batch(tokens, a.hidden, 2, a.experts, Code::f32, 3);
    const RoutingPlan plan = batch.plan(a.experts);
    const MoeBlock block{&view, &plan};
    const std::vector<char> want = run({&block, 1}, batch.view(), Code::f32);
    check_within(want, Code::f32, testing::reference({&block, 1}, batch.view(), Code::f32),
                 concat("fp8_row, q8_0, T ", tokens));
    for (const int threads : {1, 3, 8}) {
      Executor workers(testing::machine(), {threads, false, -1});
      CHECK(run({&block, 1}, batch.view(), Code::f32, workers) == want);
    }
  }
}

}  // namespace
}  // namespace cpumoe
