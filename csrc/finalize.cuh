// From the chunks' sums to the results of each sample: one block a sample.
#pragma once

#include "cuda.cuh"

namespace flowgrpo::cuda {

struct Finalize {
  const float *partial, *s;           // partial: [1 or 3, B, chunks]
  float *log_prob, *kl, *log_ratio;   // kl, log_ratio: zeros where not asked for; nullptr: not wanted at all
  bool has_kl, has_ratio, gaussian, mean;
  int64_t batch, length, n_chunks;
};

static __device__ __forceinline__ double chunk_sum(const float* partial, int64_t n_chunks) {
  double lane = 0.0;
  for (int64_t i = threadIdx.x; i < n_chunks; i += blockDim.x) lane += static_cast<double>(partial[i]);
  return lanes_sum(lane);
}

static __global__ void finalize_kernel(const Finalize op) {
  const int64_t sample = blockIdx.x, plane = op.batch * op.n_chunks;
  const float* partial = op.partial + sample * op.n_chunks;
  const double s = op.s[sample];
  const double square = chunk_sum(partial, op.n_chunks);
  const double distance = op.has_kl ? chunk_sum(partial + plane, op.n_chunks) : 0.0;
  const double ratio = op.has_ratio ? chunk_sum(partial + 2 * plane, op.n_chunks) : 0.0;
  if (threadIdx.x != 0) return;
  op.log_prob[sample] = log_density(square, s, op.length, op.gaussian, op.mean);
  if (op.kl) op.kl[sample] = op.has_kl ? scaled_sum(distance, s, op.length, true, op.mean) : 0.0f;
  if (op.log_ratio) op.log_ratio[sample] = op.has_ratio ? scaled_sum(ratio, s, op.length, op.gaussian, op.mean) : 0.0f;
}

static inline void finalize(const Finalize& op, cudaStream_t stream) {
  unsigned threads = 32;  // as many lanes as there are chunks, up to 1,024
  while (threads < 1024 && threads < op.n_chunks) threads *= 2;
  finalize_kernel<<<static_cast<unsigned>(op.batch), threads, 0, stream>>>(op);
}

}  // namespace flowgrpo::cuda
