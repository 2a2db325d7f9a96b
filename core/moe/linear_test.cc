#include <string>
#include <vector>

#include "moe/testing/layer.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::Bounded;

TEST(several_products_of_one_input) {
  const Machine machine = probe_machine();
  testing::Rng rng(1);
  for (int threads : {1, 3}) {
    Executor executor(machine, {threads, false, -1});
    Workspace workspace;
    for (int64_t tokens : {0, 1, 2, 7, 40, 300}) {
      const int64_t k = tokens > 100 ? 33 : 70;
      std::vector<char> x(size_t(tokens * (k + 3)) * 2);
      testing::fill_random(x.data(), Code::bf16, tokens * (k + 3), 1.0f, rng);
      const MatrixView in{x.data(), Code::bf16, tokens, k, k + 3};

      std::vector<testing::GuardedBuffer> storage;
      std::vector<WeightView> w;
      std::vector<VectorView> bias;
      std::vector<std::vector<float>> out;
      storage.reserve(64);
      for (const char* name : {"fp32", "fp16", "bf16"}) {
        for (Layout layout : {Layout::rows, Layout::columns}) {
          for (int64_t n : {1, 50, 129}) {
            const Format* f = find_format(name);
            storage.emplace_back(size_t(n * k) * code_bits(f->code) / 8);
            testing::fill_random(storage.back().data(), f->code, n * k, 1.0f, rng);
            w.push_back({f, layout, n, k, layout == Layout::rows ? k : n, storage.back().data()});
            storage.emplace_back(size_t(n) * 2);
            testing::fill_random(storage.back().data(), Code::f16, n, 1.0f, rng);
            bias.push_back(n == 50 ? VectorView{}
                                   : VectorView{storage.back().data(), Code::f16, n, 1});
            out.emplace_back(size_t(tokens * (n + 2)), NAN);
          }
        }
      }
      std::vector<LinearOp> ops;
      for (size_t i = 0; i < w.size(); ++i) {
        ops.push_back({&w[i], bias[i], out[i].data(), w[i].n + 2});
      }
      linear(ops, in, ActClass::fp32, machine.isa, workspace, executor);
      for (size_t i = 0; i < w.size(); ++i) {
        for (int64_t t = 0; t < tokens; ++t) {
          std::vector<Bounded> row(static_cast<size_t>(k));
          for (int64_t j = 0; j < k; ++j) {
            row[size_t(j)].value = double(load_as_float(x.data(), Code::bf16, t * in.stride + j));
          }
          for (int64_t n = 0; n < w[i].n; ++n) {
            const double b = bias[i].data ? testing::element(bias[i], n) : 0;
            const Bounded want = testing::dot(w[i], n, row, &b);
            const float got = out[i][size_t(t * (w[i].n + 2) + n)];
            CHECK_MSG(std::fabs(double(got) - want.value) <= want.error,
                      w[i].format->name << " N " << w[i].n << " T " << tokens << " at " << t << ","
                                        << n << ": " << got << " is not " << want.value);
          }
          // what lies between the rows stays
          CHECK(std::isnan(out[i][size_t(t * (w[i].n + 2) + w[i].n)]));
        }
      }
    }
  }
}

TEST(products_of_some_columns) {
  const Machine machine = probe_machine();
  testing::Rng rng(2);
  Executor executor(machine, {2, false, -1});
  Workspace workspace;
  for (int64_t tokens : {1, 5, 90}) {
    const int64_t heads = 5, k = 19, n = 23, stride = heads * (k + 4);
    std::vector<float> x(size_t(tokens * stride)), w(size_t(heads * k * n));
    testing::fill_random(x.data(), Code::f32, int64_t(x.size()), 1.0f, rng);
    testing::fill_random(w.data(), Code::f32, int64_t(w.size()), 1.0f, rng);
    std::vector<WeightView> views;
    std::vector<LinearOp> ops;
    std::vector<float> out(size_t(tokens * heads * n));
    views.reserve(size_t(heads));
    for (int64_t i = 0; i < heads; ++i) {
      const bool rows = i % 2 == 0;
      views.push_back({find_format("fp32"), rows ? Layout::rows : Layout::columns, n, k,
                       rows ? k : n, w.data() + i * k * n});
      ops.push_back({&views.back(), {}, out.data() + i * n, heads * n, i * (k + 4)});
    }
    linear(ops, {x.data(), Code::f32, tokens, stride - 4, stride}, ActClass::fp32, machine.isa,
           workspace, executor);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < heads; ++i) {
        std::vector<Bounded> row(static_cast<size_t>(k));
        for (int64_t j = 0; j < k; ++j) {
          row[size_t(j)].value = double(x[size_t(t * stride + i * (k + 4) + j)]);
        }
        for (int64_t f = 0; f < n; ++f) {
          const Bounded want = testing::dot(views[size_t(i)], f, row, nullptr);
          const float got = out[size_t((t * heads + i) * n + f)];
          CHECK_MSG(std::fabs(double(got) - want.value) <= want.error,
                    "T " << tokens << " op " << i << " at " << t << "," << f << ": " << got
                         << " is not " << want.value);
        }
      }
    }
  }
}

TEST(bad_input_is_refused_with_a_reason) {
  const Machine machine = probe_machine();
  Executor executor(machine, {1, false, -1});
  const std::vector<float> data(20 * 30);
  std::vector<float> out(2 * 20);
  const auto call = [&](auto change) {
    WeightView w{find_format("fp32"), Layout::rows, 20, 30, 30, data.data()};
    MatrixView x{data.data(), Code::f32, 2, 30, 30};
    LinearOp op{&w, {}, out.data(), 20};
    change(w, x, op);
    Workspace workspace;
    linear({&op, 1}, x, ActClass::fp32, machine.isa, workspace, executor);
  };
  using W = WeightView&;
  using X = MatrixView&;
  using O = LinearOp&;
  call([](W, X, O) {});
  CHECK_THROWS(call([](W, X x, O) { x.cols = 29; }), "must be [20 features, 29 inputs]");
  CHECK_THROWS(call([](W, X x, O) { x.rows = -1; }), "x must be [tokens, inputs]");
  CHECK_THROWS(call([](W, X x, O) { x.stride = 1; }), "stride of at least 30");
  CHECK_THROWS(call([](W, X x, O) { x.data = nullptr; }), "x must have data");
  CHECK_THROWS(call([](W w, X, O) { w.data = nullptr; }), "must have data");
  CHECK_THROWS(call([](W w, X, O) { w.stride = 29; }), "stride of at least 30");
  CHECK_THROWS(call([](W w, X, O) { w.n = 0; }), "must have features");
  CHECK_THROWS(call([](W w, X, O op) { w.k = 10, op.column = 21; }),
               "columns [21, 31) must be among the 30 of x");
  CHECK_THROWS(call([](W w, X, O op) { w.k = -1, op.column = 0; }), "must be among the 30 of x");
  CHECK_THROWS(call([](W, X, O op) { op.w = nullptr; }), "got null");
  CHECK_THROWS(call([](W, X, O op) { op.out = nullptr; }), "out must not be null");
  CHECK_THROWS(call([](W, X, O op) { op.out_stride = 19; }), "stride of at least 20");
  CHECK_THROWS(call([&](W, X, O op) { op.bias = {data.data(), Code::f32, 19, 1}; }), "bias must");
}

}  // namespace
}  // namespace cpumoe
