#include <numeric>

#include "base/error.h"
#include "moe/checks.h"
#include "moe/workspace.h"

namespace cpumoe {
namespace {

constexpr const char* kWhere = "moe";
constexpr int64_t kSmallCombineBytes = 128 << 10;  // summed by the caller: not worth a phase
constexpr int64_t kCombineTaskBytes = 256 << 10;

void check(const MoeArgs& a) {
  const MatrixView& x = a.x;
  require(x.rows >= 0 && x.rows < kMaxDim && x.cols >= 1 && x.cols < kMaxDim, kWhere,
          "x must be [tokens, hidden]; got [", x.rows, ", ", x.cols, "]");
  require(
      x.rows == 0 || (x.data != nullptr && x.stride >= x.cols && x.stride <= kMaxElements / x.rows),
      kWhere, "x must have data and a stride of at least ", x.cols, "; got a stride of ", x.stride);
  require(x.rows == 0 ||
              (a.out != nullptr && a.out_stride >= x.cols && a.out_stride <= kMaxElements / x.rows),
          kWhere, "out must have data and a stride of at least ", x.cols, "; got a stride of ",
          a.out_stride);
  require(a.out_code != Code::f32 || reinterpret_cast<uintptr_t>(a.out) % alignof(float) == 0,
          kWhere, "an fp32 out must be aligned to 4 bytes; got address ", a.out);
  int64_t pairs = 0, widest = x.cols;
  for (const MoeBlock& b : a.blocks) {
    require(b.experts != nullptr && b.plan != nullptr, kWhere,
            "every block must have experts and a plan; got null");
    check_experts_shape(*b.experts, kWhere);
    require(b.experts->hidden == x.cols, kWhere, "x must have the experts' hidden size ",
            b.experts->hidden, "; got ", x.cols);
    const RoutingPlan& p = *b.plan;
    require(p.tokens == x.rows && p.experts == b.experts->experts &&
                int64_t(p.offsets.size()) == p.experts + 1,
            kWhere, "a plan must be for the ", x.rows, " tokens of x and its ", b.experts->experts,
            " experts; got ", p.tokens, " tokens and ", p.experts, " experts");
    pairs += int64_t(p.token.size());
    widest = max64(widest, b.experts->inter);
    for (int64_t e = 0; !a.checked && e < p.experts; ++e) {
      if (p.offsets[size_t(e) + 1] > p.offsets[size_t(e)]) check_expert(*b.experts, e, kWhere);
    }
  }
  require(pairs < kMaxDim && pairs <= kMaxElements / (widest + 16), kWhere,
          "token-expert pairs must be below 2^31 and their rows fit in memory; got ", pairs);
}

// Tokens 0..m-1 in order: what the whole batch is.
bool is_identity(const int32_t* token, int64_t m, int64_t tokens) {
  if (m != tokens) return false;
  for (int64_t i = 0; i < m; ++i) {
    if (token[i] != i) return false;
  }
  return true;
}

// Lists the experts that have tokens, gives each its kernels, and packs its operand. Experts that
// all tokens visit (decode with one token, shared experts) share one packed copy.
void prepare(Workspace::Impl& ws, const MoeArgs& a, IsaSet isa, Executor& executor) {
  ws.units.clear();
  ws.packs.clear();
  size_t packed = 0, mid = 0;
  int64_t pairs = 0;
  ws.mid_offsets.clear();
  ws.jobs.clear();
  ws.up_jobs.clear();
  // The job that packs these tokens for k; `index` is null for all of them.
  const auto pack = [&](const DotKernel* k, const int32_t* index, int64_t m) {
    for (size_t j = 0; index == nullptr && j < ws.packs.size(); ++j) {
      if (ws.packs[j].args.index == nullptr && same_operand(*ws.packs[j].kernel, *k)) return j;
    }
    ws.packs.push_back({k, {a.x, index, 0, m, m, nullptr}, packed});
    packed += aligned(k->act_bytes(m, a.x.cols));
    return ws.packs.size() - 1;
  };
  for (const MoeBlock& b : a.blocks) {
    const ExpertsView& x = *b.experts;
    for (int64_t e = 0; e < x.experts; ++e) {
      const int32_t first = b.plan->offsets[size_t(e)], last = b.plan->offsets[size_t(e) + 1];
      if (first == last) continue;
      const int64_t m = last - first;
      const auto kernel = [&](const WeightView& w) {
        return ws.kernels.dot(request(w, a.act_class, m, isa), isa, kWhere);
      };
      const DotKernel* gate = kernel(x.gate[size_t(e)]);
      const DotKernel* up = x.up.empty() ? nullptr : kernel(x.up[size_t(e)]);
      const DotKernel* down = kernel(x.down[size_t(e)]);
      const int32_t* token = b.plan->token.data() + first;
      ws.units.push_back({&x, e, gate, up, down, m, token, b.plan->weight.data() + first, pairs,
                          nullptr, nullptr, nullptr});
      pairs += m;
      ws.mid_offsets.push_back(mid);
      mid += aligned(down->act_bytes(m, x.inter));
      const int32_t* index = is_identity(token, m, a.x.rows) ? nullptr : token;
      ws.jobs.push_back(pack(gate, index, m));
      const bool one = up == nullptr || same_operand(*up, *gate);
      ws.up_jobs.push_back(one ? ws.jobs.back() : pack(up, index, m));
    }
  }
  char* packed_base = static_cast<char*>(ws.packed.reserve(packed));
  char* mid_base = static_cast<char*>(ws.mid.reserve(mid));
  for (PackJob& j : ws.packs) j.args.dst = packed_base + j.offset;
  for (size_t i = 0; i < ws.units.size(); ++i) {
    ws.units[i].x = ws.packs[ws.jobs[i]].args.dst;
    ws.units[i].up_x = ws.packs[ws.up_jobs[i]].args.dst;
    ws.units[i].mid = mid_base + ws.mid_offsets[i];
  }
  run_packs(ws.packs, ws.tasks.tasks, executor);
}

// A tile with the other index first: to[j][i] = from[i][j].
void turn(const float* from, int64_t stride, int64_t lines, int64_t length, float* to,
          int64_t to_stride) {
  for (int64_t i = 0; i < lines; ++i) {
    for (int64_t j = 0; j < length; ++j) to[j * to_stride + i] = from[i * stride + j];
  }
}

// Phase 1, one task: gate and up of a slice, the activation, and into the operand of phase 2.
void gate_and_up(const Unit& u, const Task& t, const void* next, const ActKernel& act,
                 const Arena& arena, int worker) {
  const ExpertsView& x = *u.experts;
  const size_t e = size_t(u.e);
  const DotKernel& k = *u.first;
  const int64_t n = t.n1 - t.n0, m = t.m1 - t.m0, per = x.interleaved ? 2 : 1;
  const bool turned = u.up != nullptr && u.up->order != k.order;
  const bool up_follows = u.up != nullptr && !turned;
  const TileShape in = tile_shape(k, up_follows ? u.up : nullptr, n * per, m);
  const TileShape out = x.interleaved ? tile_shape(k, n, m) : in;
  float* gate = arena.tile(worker);
  float* second = arena.second_tile(worker);
  void* scratch = arena.kernel_scratch(worker);
  const bool by_feature = k.order == TileOrder::n_major;
  const auto run_up = [&](float* tile, int64_t stride, const void* after) {
    u.up->run({&x.up[e], t.n0, t.n1, u.up_x, u.tokens, t.m0, t.m1, tile, stride, scratch, after});
  };
  if (turned) {  // gate's tile is free until then
    const int64_t stride = tile_shape(*u.up, n, m).stride;
    run_up(gate, stride, feature_at(x.gate[e], t.n0));
    turn(gate, stride, by_feature ? m : n, by_feature ? n : m, second, in.stride);
  }
  k.run({&x.gate[e], t.n0 * per, t.n1 * per, u.x, u.tokens, t.m0, t.m1, gate, in.stride, scratch,
         up_follows ? feature_at(x.up[e], t.n0) : next});
  if (up_follows) run_up(second, in.stride, next);
  const VectorView none;
  const VectorView& gate_bias = x.gate_bias.empty() ? none : x.gate_bias[e];
  const VectorView& up_bias = x.interleaved ? gate_bias : x.up_bias.empty() ? none : x.up_bias[e];
  float* result = x.interleaved ? second : gate;
  act.run({x.act, gate, x.up.empty() ? nullptr : second, by_feature ? n : m, by_feature ? m : n,
           in.stride, out.stride, x.interleaved, by_feature,
           vector_values(gate_bias, t.n0 * per, per, n, arena.bias_values(worker)),
           vector_values(up_bias, t.n0 * per + (per - 1), per, n, arena.second_bias_values(worker)),
           result});
  u.second->store_mid(
      {result, k.order, out.stride, t.n0, t.n1, t.m0, t.m1, u.tokens, x.inter, u.mid});
}

void first_phase(Workspace::Impl& ws, const ActKernel& act, Executor& executor) {
  ws.products.clear();
  for (const Unit& u : ws.units) {
    const ExpertsView& x = *u.experts;
    const WeightView& gate = x.gate[size_t(u.e)];
    const int64_t per = x.gated() ? 2 : 1;
    int64_t bytes = (x.interleaved ? 2 : 1) * weight_bytes(gate) / gate.n;
    // The tile becomes operand of the second product: whole groups of its inputs.
    int64_t step = std::lcm(u.first->n_block, u.second->k_group);
    const DotKernel* other = u.up == u.first ? nullptr : u.up;
    if (u.up != nullptr) bytes += weight_bytes(x.up[size_t(u.e)]) / x.up[size_t(u.e)].n;
    if (other != nullptr) step = std::lcm(step, other->n_block);
    ws.products.push_back(
        {u.first, x.inter, x.hidden, u.tokens, per, bytes, step, {0, 0}, other});
  }
  make_tasks(ws.tasks, ws.products, executor.at_once());
  const Arena arena = make_arena(ws.workers, ws.products, true, executor.threads());
  ws.tasks.run(executor, [&](int64_t i, int worker) {
    const Task& t = ws.tasks.tasks[size_t(i)];
    const Task* after = ws.tasks.next(i);
    const void* next = nullptr;
    if (after != nullptr) {
      const ExpertsView& x = *ws.units[size_t(after->item)].experts;
      next = feature_at(x.gate[size_t(ws.units[size_t(after->item)].e)],
                        after->n0 * (x.interleaved ? 2 : 1));
    }
    gate_and_up(ws.units[size_t(t.item)], t, next, act, arena, worker);
  });
}

// Phase 2: down, each pair's weighted result into its own fp32 row. Nobody waits for anybody, and
// the order of the sum is left to combine_rows.
void second_phase(Workspace::Impl& ws, int64_t hidden, int64_t row_stride, Executor& executor) {
  ws.products.clear();
  for (const Unit& u : ws.units) {
    const ExpertsView& x = *u.experts;
    const WeightView& down = x.down[size_t(u.e)];
    ws.products.push_back(
        {u.second, hidden, x.inter, u.tokens, 1, weight_bytes(down) / down.n, u.second->n_block,
         {0, 0}});
  }
  make_tasks(ws.tasks, ws.products, executor.at_once());
  const Arena arena = make_arena(ws.workers, ws.products, false, executor.threads());
  float* rows = static_cast<float*>(ws.sums.data());
  ws.tasks.run(executor, [&](int64_t i, int worker) {
    const Task& t = ws.tasks.tasks[size_t(i)];
    const Unit& u = ws.units[size_t(t.item)];
    const ExpertsView& x = *u.experts;
    const DotKernel& k = *u.second;
    const int64_t n = t.n1 - t.n0;
    const TileShape shape = tile_shape(k, n, t.m1 - t.m0);
    float* tile = arena.tile(worker);
    const Task* after = ws.tasks.next(i);
    const Unit* of = after == nullptr ? nullptr : &ws.units[size_t(after->item)];
    const void* next =
        of == nullptr ? nullptr : feature_at(of->experts->down[size_t(of->e)], after->n0);
    k.run({&x.down[size_t(u.e)], t.n0, t.n1, u.mid, u.tokens, t.m0, t.m1, tile, shape.stride,
           arena.kernel_scratch(worker), next});
    const VectorView none;
    const VectorView& bias = x.down_bias.empty() ? none : x.down_bias[size_t(u.e)];
    k.store_out({tile, shape.stride, t.n0, t.n1, t.m0, t.m1,
                 vector_values(bias, t.n0, 1, n, arena.bias_values(worker)), u.weight, nullptr,
                 rows + u.first_pair * row_stride, row_stride, false});
  });
}

// The partial rows of each token: blocks in order, experts rising.
void list_rows(Workspace::Impl& ws, int64_t tokens) {
  std::vector<int32_t>& offsets = ws.row_offsets;
  offsets.assign(size_t(tokens) + 2, 0);
  for (const Unit& u : ws.units) {
    for (int64_t i = 0; i < u.tokens; ++i) ++offsets[size_t(u.token[i]) + 2];
  }
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  ws.rows.resize(size_t(offsets.back()));
  // offsets[t + 1] runs from the start of t to its end, which is the start of t + 1.
  for (const Unit& u : ws.units) {
    for (int64_t i = 0; i < u.tokens; ++i) {
      ws.rows[size_t(offsets[size_t(u.token[i]) + 1]++)] = int32_t(u.first_pair + i);
    }
  }
}

void combine_rows(Workspace::Impl& ws, const MoeArgs& a, const CombineKernel& combine,
                  int64_t row_stride, Executor& executor) {
  const int64_t tokens = a.x.rows, hidden = a.x.cols;
  list_rows(ws, tokens);
  const float* rows = static_cast<const float*>(ws.sums.data());
  const int64_t row_bytes = row_stride * int64_t(sizeof(float));
  const int64_t bytes = int64_t(ws.rows.size()) * row_bytes;
  const int64_t per_token = max64(1, bytes / tokens);
  const int64_t step =
      bytes <= kSmallCombineBytes ? tokens : max64(1, kCombineTaskBytes / per_token);
  executor.parallel(ceil_div(tokens, step), [&](int64_t i, int) {
    for (int64_t t = i * step; t < min64(tokens, (i + 1) * step); ++t) {
      const int32_t first = ws.row_offsets[size_t(t)], last = ws.row_offsets[size_t(t) + 1];
      char* out = static_cast<char*>(a.out) + t * a.out_stride * int64_t(code_bits(a.out_code)) / 8;
      combine.run({rows, row_stride, ws.rows.data() + first, last - first, hidden, out, a.out_code,
                   a.accumulate});
    }
  });
}

}  // namespace

void moe(const MoeArgs& args, IsaSet isa, Workspace& workspace, Executor& executor) {
  check(args);
  if (args.x.rows == 0) return;
  const ActKernel* act = select_act(isa);
  const CombineKernel* combine = select_combine(isa);
  require(act != nullptr && combine != nullptr, kWhere,
          "the instruction sets must include scalar; got mask ", isa.mask);
  Workspace::Impl& ws = *workspace.impl;
  prepare(ws, args, isa, executor);
  const int64_t row_stride = round_up(args.x.cols, 16);
  const Unit* last = ws.units.empty() ? nullptr : &ws.units.back();
  ws.sums.reserve_as<float>(last ? size_t((last->first_pair + last->tokens) * row_stride) : 0);
  if (last != nullptr) {
    first_phase(ws, *act, executor);
    second_phase(ws, args.x.cols, row_stride, executor);
  }
  combine_rows(ws, args, *combine, row_stride, executor);
}

}  // namespace cpumoe
