// sde_log_prob: three sums of each chunk in one pass, then the results of each sample; the gradient in another pass.
#include "cpu.h"
#include "guidance.h"

namespace flowgrpo::FLOWGRPO_CPU {
namespace {

struct Sums {
  float square, distance, ratio;
};

FLOWGRPO_FN void add_lanes(float* to, Float8 values) {
  values += vector_at<Float8>(to);
  memcpy(to, &values, sizeof values);
}

Sums log_prob_chunk(const SdeLogProb& op, int64_t sample, int64_t chunk) {
  float x_buffer[kLanes], v_buffer[kLanes], prev_buffer[kLanes], other_buffer[kLanes], combined[kLanes];
  float square[kLanes] = {}, distance[kLanes] = {}, ratio[kLanes] = {};
  const float a = op.a[sample], b = op.b[sample];
  for (int64_t block = 0; block < kBlocks; ++block) {
    const int64_t offset = chunk * kChunk + block * kLanes;
    const int64_t n = op.length - offset < kLanes ? op.length - offset : kLanes;
    if (n <= 0) break;
    const auto add = [&](auto x, auto v, auto prev) FLOWGRPO_INLINE {
      for (int64_t i = 0; i < kLanes; i += 8) {
        const Float8 residual = prev.at(i) - (x.at(i) * a + v.at(i) * b);
        add_lanes(square + i, residual * residual);
      }
      if (op.ref.data) {
        const F32Lanes ref{load(op.ref, sample, offset, n, other_buffer)};
        for (int64_t i = 0; i < kLanes; i += 8) {
          const Float8 shift = b * (v.at(i) - ref.at(i));
          add_lanes(distance + i, shift * shift);
        }
      }
      if (op.old.data) {
        const F32Lanes old{load(op.old, sample, offset, n, other_buffer)};
        for (int64_t i = 0; i < kLanes; i += 8) {
          const Float8 shift = b * (v.at(i) - old.at(i));
          add_lanes(ratio + i, (2.0f * (prev.at(i) - (x.at(i) * a + old.at(i) * b)) - shift) * shift);
        }
      }
    };
    with_lanes(op.x, sample, offset, n, x_buffer, [&](auto x) FLOWGRPO_INLINE {
      with_lanes(op.prev, sample, offset, n, prev_buffer, [&](auto prev) FLOWGRPO_INLINE {
        if (op.neg.data) {
          const float* pos = load(op.v, sample, offset, n, v_buffer);
          guide(pos, load(op.neg, sample, offset, n, other_buffer), op.scale[sample], op.token, kLanes, combined);
          round_lanes(combined, op.v.dtype);
          add(x, F32Lanes{combined}, prev);
        } else {
          with_lanes(op.v, sample, offset, n, v_buffer, [&](auto v) FLOWGRPO_INLINE { add(x, v, prev); });
        }
      });
    });
  }
  return {tree_sum(square, kLanes), op.ref.data ? tree_sum(distance, kLanes) : 0.0f,
          op.old.data ? tree_sum(ratio, kLanes) : 0.0f};
}

void backward_chunk(const SdeLogProbBackward& op, int64_t sample, int64_t chunk, bool stream) {
  float x_buffer[kLanes], v_buffer[kLanes], prev_buffer[kLanes], neg_buffer[kLanes], ref_buffer[kLanes];
  float combined[kLanes], grad[kLanes], grad_neg[kLanes];
  const float a = op.a[sample], b = op.b[sample];
  double upstream = op.grad_log_prob[sample], kl_upstream = op.ref.data ? op.grad_kl[sample] : 0.0;
  if (op.grad_log_ratio) upstream += op.grad_log_ratio[sample];
  if (op.grad_loss) {
    upstream *= *op.grad_loss;
    kl_upstream *= *op.grad_loss;
  }
  const Weights weight = sample_weights(upstream, kl_upstream, b, op.s[sample], op.length, op.gaussian, op.mean);
  for (int64_t block = 0; block < kBlocks; ++block) {
    const int64_t offset = chunk * kChunk + block * kLanes, at = sample * op.length + offset;
    const int64_t n = op.length - offset < kLanes ? op.length - offset : kLanes;
    if (n <= 0) break;
    if (weight.residual == 0 && weight.shift == 0) {  // a masked sample: whatever its latents are
      memset(grad, 0, sizeof grad);
      store(op.grad_v, at, n, grad, stream);
      if (op.neg.data) store(op.grad_neg, at, n, grad, stream);
      continue;
    }
    const auto write = [&](auto x, auto v, auto prev) FLOWGRPO_INLINE {
      for (int64_t i = 0; i < kLanes; i += 8) {
        Float8 value = weight.residual * (prev.at(i) - (x.at(i) * a + v.at(i) * b));
        if (weight.residual == 0) value = Float8{};
        memcpy(grad + i, &value, sizeof value);
      }
      if (op.ref.data && weight.shift != 0) {
        const F32Lanes ref{load(op.ref, sample, offset, n, ref_buffer)};
        for (int64_t i = 0; i < kLanes; i += 8) add_lanes(grad + i, weight.shift * (v.at(i) - ref.at(i)));
      }
    };
    const float *pos = nullptr, *neg = nullptr;
    with_lanes(op.x, sample, offset, n, x_buffer, [&](auto x) FLOWGRPO_INLINE {
      with_lanes(op.prev, sample, offset, n, prev_buffer, [&](auto prev) FLOWGRPO_INLINE {
        if (op.neg.data) {
          pos = load(op.v, sample, offset, n, v_buffer);
          neg = load(op.neg, sample, offset, n, neg_buffer);
          guide(pos, neg, op.scale[sample], op.token, kLanes, combined);
          round_lanes(combined, op.v.dtype);
          write(x, F32Lanes{combined}, prev);
        } else {
          with_lanes(op.v, sample, offset, n, v_buffer, [&](auto v) FLOWGRPO_INLINE { write(x, v, prev); });
        }
      });
    });
    if (op.neg.data) {
      guide_backward(grad, pos, neg, op.scale[sample], op.token, kLanes, grad, grad_neg);
      store(op.grad_neg, at, n, grad_neg, stream);
    }
    store(op.grad_v, at, n, grad, stream);
  }
  fence(stream);
}

}  // namespace

void sde_log_prob(const SdeLogProb& op) {
  const int64_t per_sample = chunks(op.length), plane = op.batch * per_sample;
  for_each_chunk(op.batch, op.length, [&](int64_t sample, int64_t chunk) {
    const Sums sums = log_prob_chunk(op, sample, chunk);
    float* partial = op.partial + sample * per_sample + chunk;
    partial[0] = sums.square;
    partial[plane] = sums.distance;
    partial[2 * plane] = sums.ratio;
  });
  for (int64_t i = 0; i < op.batch; ++i) {
    const float* partial = op.partial + i * per_sample;
    const float s = op.s[i];
    const auto sum = [&](int64_t which) { return lane_sum<double>(partial + which * plane, per_sample); };
    op.log_prob[i] = log_density(sum(0), s, op.length, op.gaussian, op.mean);
    op.kl[i] = op.ref.data ? scaled_sum(sum(1), s, op.length, true, op.mean) : 0.0f;
    op.log_ratio[i] = op.old.data ? scaled_sum(sum(2), s, op.length, op.gaussian, op.mean) : 0.0f;
  }
}

void sde_log_prob_backward(const SdeLogProbBackward& op) {
  const bool stream = streams(op.grad_v, op.batch * op.length);
  for_each_chunk(op.batch, op.length, [&](int64_t sample, int64_t chunk) { backward_chunk(op, sample, chunk, stream); });
}

}  // namespace flowgrpo::FLOWGRPO_CPU
