// policy_loss: one thread over a few thousand entries; loss, metrics and gradient in one pass after the count.
#include <cmath>
#include <vector>

#include "cpu.h"

namespace flowgrpo::cpu {

void policy_loss(const PolicyLoss& op) {
  const auto kept = [&](int64_t row, int64_t step) {
    return !op.mask.data || static_cast<const uint8_t*>(op.mask.data)[row * op.mask.row_stride + step * op.mask.step_stride] != 0;
  };
  int64_t count = 0;
  for (int64_t i = 0; i < op.entries; ++i) count += kept(i / op.steps, i % op.steps);
  const float total = count == 0 ? 1.0f : (op.denominator ? *op.denominator : static_cast<float>(count));

  enum { kLoss, kRatio, kLow, kHigh, kApproxKl, kAdvantage, kKl, kSums };
  const int64_t width = op.entries < kLanes ? power_of_two(op.entries) : kLanes;
  std::vector<double> lanes(kSums * width, 0.0);
  float deviation = 0.0f;
  for (int64_t i = 0; i < op.entries; ++i) {
    const int64_t row = i / op.steps, step = i % op.steps, lane = i % width;
    Entry e{};
    const bool counts = kept(row, step);
    if (counts) {
      float log_r = entry(op.log_ratio, row, step);
      if (op.old_log_prob.data) log_r -= entry(op.old_log_prob, row, step);
      const float advantage = entry(op.advantage, row, step);
      const float scale = (op.step_weight.data ? entry(op.step_weight, row, step) : 1.0f) / total;
      e = clipped_entry(log_r, advantage, scale, op.clip_low, op.clip_high);
      const double values[] = {e.loss, e.r1, double(e.low), double(e.high), e.r1 - e.bounded, advantage,
                               op.kl ? op.kl[i] : 0.0};
      for (int k = 0; k < kSums; ++k) lanes[k * width + lane] += values[k];
      const float size = std::fabs(e.r1);
      if (size > deviation || size != size) deviation = size;  // a NaN stays: nothing is larger
    }
    store_entry(op.grad, i, e.grad);
    if (op.kl) op.grad_kl[i] = counts ? op.kl_weight / total : 0.0f;
  }
  const auto sum = [&](int k) { return tree_sum(lanes.data() + k * width, width); };
  *op.loss = static_cast<float>(sum(kLoss));
  if (op.kl) {
    op.metrics[7] = static_cast<float>(sum(kKl) / total);
    *op.loss += op.kl_weight * op.metrics[7];
  }
  const double divisor = count > 0 ? static_cast<double>(count) : 1.0;
  op.metrics[0] = count > 0 ? static_cast<float>(1.0 + sum(kRatio) / divisor) : 0.0f;
  op.metrics[1] = deviation;
  for (int k = kLow; k <= kAdvantage; ++k) op.metrics[k] = static_cast<float>(sum(k) / divisor);
  op.metrics[6] = static_cast<float>(count);
}

}  // namespace flowgrpo::cpu
