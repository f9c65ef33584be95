// group_advantage: one launch, no sort: a thread a sample, which walks over the batch in order. O(B^2) comparisons; the walk of a warp reads
// the same address in every thread. Sums run in the order of the batch, as the reference's.
#include "cuda.cuh"

namespace flowgrpo::cuda {
namespace {

struct Reward {
  double value;
  bool used;
};

__device__ __forceinline__ Reward reward(const GroupAdvantage& op, int64_t i) {
  const double value = entry(op.rewards, i, 0);
  const bool used = fabs(value) < INFINITY && (!op.valid || op.valid[i]);
  return {used ? value : 0.0, used};
}

// Mean over the used samples of f(reward), of this thread's group or of everyone; twice, the second time of the residuals, so that equal
// values have that very mean.
template <typename F>
__device__ __forceinline__ double mean(const GroupAdvantage& op, int64_t group, bool everyone, const F& f) {
  double result = 0.0;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    double sum = 0.0, count = 0.0;
#pragma unroll 1
    for (int64_t j = 0; j < op.batch; ++j) {
      const Reward r = reward(op, j);
      if (!r.used || !(everyone || op.group[j] == group)) continue;
      sum += f(r.value) - result;
      count += 1.0;
    }
    result += sum / (count > 1.0 ? count : 1.0);
  }
  return result;
}

__global__ void group_advantage_kernel(const GroupAdvantage op) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= op.batch) return;
  const int64_t group = op.group[i];
  const auto value = [](double r) { return r; };
  const double own_mean = mean(op, group, false, value);
  double scale = 1.0;
  if (op.scaled) {
    const double centre = op.global_std ? mean(op, group, true, value) : own_mean;
    const auto square = [centre](double r) { return (r - centre) * (r - centre); };
    scale = sqrt(mean(op, group, op.global_std, square)) + op.eps;
  }
  const Reward own = reward(op, i);
  const double advantage = own.used && scale > 0 ? (own.value - own_mean) / scale : 0.0;
  op.advantage[i] = static_cast<float>(advantage > op.clip ? op.clip : (advantage < -op.clip ? -op.clip : advantage));
}

}  // namespace

int group_advantage(const GroupAdvantage& op, void* stream) {
  if (op.batch == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((op.batch + 31) / 32);
  group_advantage_kernel<<<blocks, 32, 0, static_cast<cudaStream_t>(stream)>>>(op);
  return cudaGetLastError();
}

}  // namespace flowgrpo::cuda
