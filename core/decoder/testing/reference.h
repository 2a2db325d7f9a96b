// The decoder's arithmetic in float64, written plainly: no cache, no batches, no blocks.
//
// With a `noise` generator every rounded step of the real thing is disturbed by a random part of
// its own error bound (epsilon, number of terms, magnitudes). How far the logits then move says
// what those local bounds amount to for this model: the tolerance of the comparison, with no
// constant of taste.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "decoder/spec.h"
#include "kernels/testing/random.h"
#include "kernels/testing/tolerance.h"

namespace cpumoe::testing {

using Row = std::vector<double>;

struct Reference {
  const ModelSpec& m;
  Rng* noise = nullptr;
  double cache_roundoff = 0;  // of the K/V code: 0, 2^-11 (fp16) or 2^-8 (bf16)

  double moved(double v, double bound) {
    return noise != nullptr ? v + bound * double(noise->uniform(-1, 1)) : v;
  }
  static double at(const VectorView& v, int64_t i) {
    return v.data == nullptr ? 0 : double(load_as_float(v.data, v.code, i * v.step));
  }
  Row product(const WeightView& w, const VectorView& bias, const Row& x) {
    Row y(size_t(w.n));
    for (int64_t n = 0; n < w.n; ++n) {
      double sum = at(bias, n), magnitude = std::fabs(sum);
      for (int64_t k = 0; k < w.k; ++k) {
        const double p = double(decode_weight(w, n, k)) * x[size_t(k)];
        sum += p;
        magnitude += std::fabs(p);
      }
      y[size_t(n)] = moved(sum, gamma(w.k + 1) * magnitude);
    }
    return y;
  }
  Row linear(const Linear& l, const Row& x) { return product(l.w, l.bias, x); }
  // Normalises x[first, first + size) in place.
  void norm(Row& x, size_t first, size_t size, const VectorView& weight) {
    norm(x, first, size, weight, m.norm_eps);
  }
  void norm(Row& x, size_t first, size_t size, const VectorView& weight, float eps) {
    double squares = 0;
    for (size_t i = 0; i < size; ++i) squares += x[first + i] * x[first + i];
    const double root = std::sqrt(squares / double(size) + double(eps));
    for (size_t i = 0; i < size; ++i) {
      double& v = x[first + i];
      v = v / root * at(weight, int64_t(i));
      v = moved(v, gamma(int64_t(size) / 2 + 9) * std::fabs(v));
    }
  }
  // Turns the first rope_dims of `heads` parts of x, `stride` apart from `first` on.
  void rope(const AttentionSpec& a, Row& x, size_t first, int64_t heads, size_t stride,
            int64_t position) {
    const size_t half = size_t(a.rope_dims / 2);
    for (int64_t h = 0; h < heads; ++h) {
      for (size_t j = 0; j < half; ++j) {
        const double angle = float(position) * a.inv_freq[j];
        const size_t at = first + size_t(h) * stride + (a.rope_interleaved ? 2 * j : j);
        double &p = x[at], &q = x[at + (a.rope_interleaved ? 1 : half)];
        const double c = std::cos(angle) * a.rope_scale, s = std::sin(angle) * a.rope_scale;
        const double turned_p = p * c - q * s, turned_q = q * c + p * s;
        const double bound = 5 * kRoundoff * (std::fabs(p) + std::fabs(q)) * a.rope_scale;
        p = moved(turned_p, bound);
        q = moved(turned_q, bound);
      }
    }
  }
  void attention(const AttentionSpec& a, const std::vector<Row>& normed, std::vector<Row>& x) {
    if (a.is_latent()) {
      latent_attention(a, normed, x);
      return;
    }
    std::vector<Row> keys, values;
    for (size_t t = 0; t < x.size(); ++t) {
      Row q = linear(a.q, normed[t]), k = linear(a.k, normed[t]), v = linear(a.v, normed[t]);
      if (a.qk_norm == QkNorm::whole) {
        norm(q, 0, q.size(), a.q_norm);
        norm(k, 0, k.size(), a.k_norm);
      }
      const size_t dim = size_t(a.head_dim);
      for (size_t h = 0; a.qk_norm == QkNorm::per_head && h < size_t(a.heads); ++h) {
        norm(q, h * dim, dim, a.q_norm);
        if (h < size_t(a.kv_heads)) norm(k, h * dim, dim, a.k_norm);
      }
      if (a.clip_qkv > 0) {
        for (Row* row : {&q, &k, &v}) {
          for (double& e : *row) e = std::clamp(e, -double(a.clip_qkv), double(a.clip_qkv));
        }
      }
      rope(a, q, 0, a.heads, dim, int64_t(t));
      rope(a, k, 0, a.kv_heads, dim, int64_t(t));
      for (Row* row : {&k, &v}) {
        for (double& e : *row) e = moved(e, cache_roundoff * std::fabs(e));
      }
      keys.push_back(k);
      values.push_back(v);
      Row mixed(q.size());
      const size_t first = a.window > 0 && t + 1 > size_t(a.window) ? t + 1 - size_t(a.window) : 0;
      for (size_t h = 0; h < size_t(a.heads); ++h) {
        const size_t kv = h / size_t(a.heads / a.kv_heads);
        Row s;
        for (size_t l = first; l <= t; ++l) {
          double dot = 0, magnitude = 0;
          for (size_t d = 0; d < dim; ++d) {
            const double p = q[h * dim + d] * keys[l][kv * dim + d] * double(a.scale);
            dot += p;
            magnitude += std::fabs(p);
          }
          s.push_back(moved(dot, gamma(int64_t(dim) + 1) * magnitude + kRoundoff * 4));
        }
        softmax(a, h, s);
        for (size_t d = 0; d < dim; ++d) {
          double total = 0, magnitude = 0;
          for (size_t l = first; l <= t; ++l) {
            const double p = s[l - first] * values[l][kv * dim + d];
            total += p;
            magnitude += std::fabs(p);
          }
          mixed[h * dim + d] = moved(total, gamma(int64_t(s.size()) + 16) * magnitude);
        }
      }
      add(x[t], linear(a.o, mixed), 1);
    }
  }
  void softmax(const AttentionSpec& a, size_t head, Row& s) {
    const double sink = a.sinks.data == nullptr ? -INFINITY : at(a.sinks, int64_t(head));
    const double top = std::max(sink, *std::max_element(s.begin(), s.end()));
    double sum = std::exp(sink - top);
    for (double& e : s) sum += (e = std::exp(e - top));
    for (double& e : s) e /= sum;
  }
  // Latent attention as it is defined, not absorbed: each head's keys k_up^T c are written out. The
  // disturbances are those of the absorbed form, where a score sums over both.
  void latent_attention(const AttentionSpec& a, const std::vector<Row>& normed,
                        std::vector<Row>& x) {
    const LatentSpec& l = a.latent;
    const size_t rank = size_t(l.rank), dim = size_t(a.head_dim), rotated = size_t(a.rope_dims);
    const size_t nope = dim - rotated, value = size_t(l.value_dim);
    std::vector<Row> cache, keys, sizes;  // sizes: sums of magnitudes behind each key
    for (size_t t = 0; t < x.size(); ++t) {
      Row low = normed[t];
      if (l.q_a.present()) {
        low = linear(l.q_a, low);
        norm(low, 0, low.size(), l.q_norm, l.norm_eps);
      }
      Row q = linear(a.q, low), c = linear(a.k, normed[t]);
      norm(c, 0, rank, l.norm, l.norm_eps);
      rope(a, q, nope, a.heads, dim, int64_t(t));
      rope(a, c, rank, 1, rotated, int64_t(t));
      for (double& e : c) e = moved(e, cache_roundoff * std::fabs(e));
      Row key(q.size()), size(q.size()), mixed(size_t(a.heads) * value);
      for (size_t i = 0; i < q.size(); ++i) {
        const size_t h = i / dim, d = i % dim;
        if (d >= nope) key[i] = c[rank + d - nope];
        for (size_t r = 0; d < nope && r < rank; ++r) {
          const double p = double(decode_weight(l.k_up[h], int64_t(r), int64_t(d))) * c[r];
          key[i] += p;
          size[i] += std::fabs(p);
        }
        if (d >= nope) size[i] = std::fabs(key[i]);
      }
      cache.push_back(c);
      keys.push_back(key);
      sizes.push_back(size);
      for (size_t h = 0; h < size_t(a.heads); ++h) {
        Row s;
        for (size_t i = 0; i < cache.size(); ++i) {
          double dot = 0, magnitude = 0;
          for (size_t d = h * dim; d < (h + 1) * dim; ++d) {
            dot += q[d] * keys[i][d] * double(a.scale);
            magnitude += std::fabs(q[d] * double(a.scale)) * sizes[i][d];
          }
          s.push_back(moved(dot, gamma(int64_t(dim + rank) + 2) * magnitude + kRoundoff * 4));
        }
        softmax(a, h, s);
        Row sum(rank), total(rank);  // of p c, and of its magnitudes
        for (size_t i = 0; i < cache.size(); ++i) {
          for (size_t r = 0; r < rank; ++r) {
            sum[r] += s[i] * cache[i][r];
            total[r] += std::fabs(s[i] * cache[i][r]);
          }
        }
        for (size_t d = 0; d < value; ++d) {
          double out = 0, magnitude = 0;
          for (size_t r = 0; r < rank; ++r) {
            const double w = double(decode_weight(l.v_up[h], int64_t(d), int64_t(r)));
            out += w * sum[r];
            magnitude += std::fabs(w) * total[r];
          }
          mixed[h * value + d] = moved(out, gamma(int64_t(cache.size() + rank) + 16) * magnitude);
        }
      }
      add(x[t], linear(a.o, mixed), 1);
    }
  }
  void add(Row& x, const Row& y, double weight) {
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] += y[i] * weight;
      x[i] = moved(x[i], 2 * kRoundoff * (std::fabs(x[i]) + std::fabs(y[i] * weight)));
    }
  }
  // gpt-oss: gate and up alternate, are clamped, and become (up + 1) gate sigmoid(alpha gate).
  void clamped_block(const FfnSpec& f, size_t e, const Row& h, double weight, Row& x) {
    const Row both = product(f.expert_gate[e], f.expert_gate_bias[e], h);
    const double alpha = double(f.expert_act.alpha), limit = double(f.expert_act.limit);
    Row mid(both.size() / 2);
    for (size_t i = 0; i < mid.size(); ++i) {
      const double g = std::min(both[2 * i], limit), u = std::clamp(both[2 * i + 1], -limit, limit);
      const double v = (u + 1) * g / (1 + std::exp(-alpha * g));
      mid[i] = moved(v, 10 * kRoundoff * (std::fabs(v) + std::fabs(g)));
    }
    add(x, product(f.expert_down[e], f.expert_down_bias[e], mid), weight);
  }
  // silu-gated block, added to x with a weight.
  void block(const WeightView& gate, const WeightView& up, const WeightView& down,
             const VectorView& gate_bias, const VectorView& up_bias, const VectorView& down_bias,
             const Row& h, double weight, Row& x) {
    Row g = product(gate, gate_bias, h);
    const Row u = product(up, up_bias, h);
    for (size_t i = 0; i < g.size(); ++i) {
      g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
      g[i] = moved(g[i], 10 * kRoundoff * std::fabs(g[i]));
    }
    add(x, product(down, down_bias, g), weight);
  }
  void feed_forward(const FfnSpec& f, const Row& h, Row& x) {
    if (!f.routed) {
      block(f.gate.w, f.up.w, f.down.w, f.gate.bias, f.up.bias, f.down.bias, h, 1, x);
      return;
    }
    const size_t experts = size_t(f.router.experts), top_k = size_t(f.router.top_k);
    const Row logits = linear(f.router_w, h);
    Row value(experts), choose(experts);
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double l : logits) sum += std::exp(l - top);
    for (size_t e = 0; e < experts; ++e) {
      value[e] = f.router.kind == RouterKind::sigmoid ? 1 / (1 + std::exp(-logits[e]))
                                                      : std::exp(logits[e] - top) / sum;
      value[e] = moved(value[e], gamma(int64_t(experts) + 8) * value[e]);
      choose[e] = value[e] + at(f.correction, int64_t(e));
    }
    std::vector<size_t> order(experts);
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t i, size_t j) { return choose[i] > choose[j]; });
    double chosen = 0;
    for (size_t i = 0; i < top_k; ++i) chosen += value[order[i]];
    for (size_t i = 0; i < top_k; ++i) {
      const size_t e = order[i];
      const bool normalised = f.router.renormalize || f.router.kind == RouterKind::topk_softmax;
      const double weight = normalised ? value[e] / chosen : value[e];
      if (f.interleaved) {
        clamped_block(f, e, h, weight, x);
        continue;
      }
      const auto bias = [&](const std::vector<VectorView>& b) {
        return b.empty() ? VectorView{} : b[e];
      };
      block(f.expert_gate[e], f.expert_up[e], f.expert_down[e], bias(f.expert_gate_bias),
            bias(f.expert_up_bias), bias(f.expert_down_bias), h, weight, x);
    }
    if (f.shared_down.present()) {
      const double score =
          f.shared_score.present() ? 1 / (1 + std::exp(-linear(f.shared_score, h)[0])) : 1;
      block(f.shared_gate.w, f.shared_up.w, f.shared_down.w, f.shared_gate.bias, f.shared_up.bias,
            f.shared_down.bias, h, moved(score, 4 * kRoundoff * score), x);
    }
  }
  // Logits of every token of one sequence.
  std::vector<Row> forward(const std::vector<int32_t>& tokens) {
    std::vector<Row> x;
    for (const int32_t id : tokens) {
      Row row;
      for (int64_t i = 0; i < m.hidden; ++i) {
        row.push_back(double(decode_weight(m.embed, id, i)) * double(m.embed_scale));
      }
      x.push_back(row);
    }
    for (const LayerSpec& layer : m.layers) {
      std::vector<Row> normed = x;
      for (Row& r : normed) norm(r, 0, r.size(), layer.attn_norm);
      attention(layer.attn, normed, x);
      for (Row& r : x) {
        Row h = r;
        norm(h, 0, h.size(), layer.ffn_norm);
        feed_forward(layer.ffn, h, r);
      }
    }
    std::vector<Row> logits;
    for (Row& r : x) {
      norm(r, 0, r.size(), m.final_norm);
      logits.push_back(linear(m.head, r));
    }
    return logits;
  }
};

// Float64 logits of `tokens` and how far a logit may be from them.
struct Expected {
  std::vector<Row> logits;
  double bound;
};

// The largest movement in `draws` disturbed runs, twice: real errors do not all take their worst
// value, as the disturbances nearly do, and one more draw seldom exceeds the largest of several.
inline Expected expect(const ModelSpec& m, const std::vector<int32_t>& tokens,
                       double cache_roundoff, int draws = 6) {
  Expected e;
  e.logits = Reference{m}.forward(tokens);
  e.bound = 0;
  for (int i = 0; i < draws; ++i) {
    Rng rng(uint64_t(100 + i));
    const std::vector<Row> moved = Reference{m, &rng, cache_roundoff}.forward(tokens);
    for (size_t t = 0; t < moved.size(); ++t) {
      for (size_t j = 0; j < moved[t].size(); ++j) {
        e.bound = std::max(e.bound, std::fabs(moved[t][j] - e.logits[t][j]));
      }
    }
  }
  e.bound *= 2;
  return e;
}

}  // namespace cpumoe::testing
