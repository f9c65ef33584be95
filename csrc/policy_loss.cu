// policy_loss: one block of 1,024 lanes over a few thousand entries; loss, metrics and gradient in one pass after the count.
#include "cuda.cuh"

namespace flowgrpo::cuda {
namespace {

constexpr int kEntryThreads = 1024;

__device__ __forceinline__ bool is_kept(const Entries& mask, int64_t row, int64_t step) {
  return !mask.data || static_cast<const uint8_t*>(mask.data)[row * mask.row_stride + step * mask.step_stride] != 0;
}

__global__ void __launch_bounds__(kEntryThreads) policy_loss_kernel(const PolicyLoss op) {
  double kept_lane = 0.0;
  for (int64_t i = threadIdx.x; i < op.entries; i += kEntryThreads) kept_lane += is_kept(op.mask, i / op.steps, i % op.steps);
  const double count = lanes_sum(kept_lane);
  const float total = count == 0 ? 1.0f : (op.denominator ? *op.denominator : static_cast<float>(count));

  double loss = 0, ratio = 0, low = 0, high = 0, approx_kl = 0, advantages = 0, kls = 0;
  float deviation = 0.0f;
  for (int64_t i = threadIdx.x; i < op.entries; i += kEntryThreads) {
    const int64_t row = i / op.steps, step = i % op.steps;
    Entry e{};
    const bool kept = is_kept(op.mask, row, step);
    if (kept) {
      float log_r = entry(op.log_ratio, row, step);
      if (op.old_log_prob.data) log_r -= entry(op.old_log_prob, row, step);
      const float advantage = entry(op.advantage, row, step);
      const float scale = (op.step_weight.data ? entry(op.step_weight, row, step) : 1.0f) / total;
      e = clipped_entry(log_r, advantage, scale, op.clip_low, op.clip_high);
      loss += e.loss;
      ratio += e.r1;
      low += e.low;
      high += e.high;
      approx_kl += e.r1 - e.bounded;
      advantages += advantage;
      if (op.kl) kls += op.kl[i];
      const float size = fabsf(e.r1);
      if (size > deviation || size != size) deviation = size;  // a NaN stays: nothing is larger
    }
    if (op.grad.dtype == Dtype::f32) {
      static_cast<float*>(op.grad.data)[i] = e.grad;
    } else {
      static_cast<uint16_t*>(op.grad.data)[i] = narrow(e.grad, op.grad.dtype);
    }
    if (op.kl) op.grad_kl[i] = kept ? op.kl_weight / total : 0.0f;
  }

  loss = lanes_sum(loss);
  ratio = lanes_sum(ratio);
  low = lanes_sum(low);
  high = lanes_sum(high);
  approx_kl = lanes_sum(approx_kl);
  advantages = lanes_sum(advantages);
  kls = lanes_sum(kls);
  // Non-negative floats order as integers, and a NaN is above them all: its bits are the largest.
  __shared__ unsigned largest;
  if (threadIdx.x == 0) largest = 0u;
  __syncthreads();
  atomicMax(&largest, deviation != deviation ? 0x7FC00000u : __float_as_uint(deviation));  // a maximum has no order to depend on
  __syncthreads();
  if (threadIdx.x != 0) return;
  float value = static_cast<float>(loss);
  if (op.kl) {
    op.metrics[7] = static_cast<float>(kls / static_cast<double>(total));
    value += op.kl_weight * op.metrics[7];
  }
  *op.loss = value;
  const double divisor = count > 0 ? count : 1.0;
  op.metrics[0] = count > 0 ? static_cast<float>(1.0 + ratio / divisor) : 0.0f;
  op.metrics[1] = __uint_as_float(largest);
  op.metrics[2] = static_cast<float>(low / divisor);
  op.metrics[3] = static_cast<float>(high / divisor);
  op.metrics[4] = static_cast<float>(approx_kl / divisor);
  op.metrics[5] = static_cast<float>(advantages / divisor);
  op.metrics[6] = static_cast<float>(count);
}

}  // namespace

int policy_loss(const PolicyLoss& op, void* stream) {
  policy_loss_kernel<<<1, kEntryThreads, 0, static_cast<cudaStream_t>(stream)>>>(op);
  return cudaGetLastError();
}

}  // namespace flowgrpo::cuda
