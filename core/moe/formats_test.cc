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
