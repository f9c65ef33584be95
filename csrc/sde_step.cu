// sde_step: prev and the squared residual of each chunk in one pass; then the log-prob of each sample.
#include "cuda.cuh"
#include "finalize.cuh"

namespace flowgrpo::cuda {
namespace {

__device__ __forceinline__ Lanes normals(const SdeStep& op, int64_t sample, int64_t offset) {
  const uint32_t step_stream = static_cast<uint32_t>(op.step[sample] | op.stream << 16);
  Lanes z;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Counter c = philox(static_cast<uint32_t>(offset / 4 + half), step_stream, static_cast<uint64_t>(op.sample_id[sample]),
                             static_cast<uint64_t>(op.seed));
    box_muller(c.w0, c.w1, z.at[4 * half], z.at[4 * half + 1]);
    box_muller(c.w2, c.w3, z.at[4 * half + 2], z.at[4 * half + 3]);
  }
  return z;
}

template <bool kPhilox>
__global__ void __launch_bounds__(kThreads) sde_step_kernel(const SdeStep op, int64_t n_chunks) {
  const Position p = position(op.length, n_chunks);
  const float a = op.a[p.sample], b = op.b[p.sample], s = op.s[p.sample];
  Lanes square = {};
#pragma unroll 1
  for (int block = 0; block < kBlocks; ++block) {
    const int64_t lane = first_lane(block), offset = p.start + lane, valid = p.left - lane;
    Lanes noise;  // before x and v are loaded: Philox and Box-Muller need the registers
    if constexpr (kPhilox) {
      noise = normals(op, p.sample, offset);
    } else {
      noise = load(op.noise, p.sample, offset, valid);
    }
    const Lanes x = load(op.x, p.sample, offset, valid), v = load(op.v, p.sample, offset, valid);
    Lanes prev;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const float mean = affine_mean(x.at[i], v.at[i], a, b);
      prev.at[i] = rounded(s == 0 ? mean : mean + s * noise.at[i], op.prev.dtype);
      const float residual = i < valid ? prev.at[i] - mean : 0.0f;
      square.at[i] += residual * residual;
    }
    store(op.prev, p.sample * op.length + offset, valid, prev);
  }
  const float sum = block_sum(square);
  if (threadIdx.x == 0) op.partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) scale_rows_kernel(const ScaleRows op, int64_t n_chunks) {
  const Position p = position(op.length, n_chunks);
  const float coefficient = op.coefficient[p.sample];
#pragma unroll 1
  for (int block = 0; block < kBlocks; ++block) {
    const int64_t lane = first_lane(block);
    Lanes grad = load(op.grad, p.sample, p.start + lane, p.left - lane);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) grad.at[i] *= coefficient;
    store(op.out, p.sample * op.length + p.start + lane, p.left - lane, grad);
  }
}

}  // namespace

int sde_step(const SdeStep& op, void* stream) {
  if (op.batch == 0) return cudaSuccess;
  const int64_t n_chunks = chunks(op.length);
  const auto kernel = op.noise.data ? sde_step_kernel<false> : sde_step_kernel<true>;
  kernel<<<static_cast<unsigned>(op.batch * n_chunks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(op, n_chunks);
  finalize({op.partial, op.s, op.log_prob, nullptr, nullptr, false, false, op.gaussian, op.mean, op.batch, op.length, n_chunks},
           static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int scale_rows(const ScaleRows& op, void* stream) {
  if (op.batch == 0) return cudaSuccess;
  const int64_t n_chunks = chunks(op.length);
  scale_rows_kernel<<<static_cast<unsigned>(op.batch * n_chunks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(op, n_chunks);
  return cudaGetLastError();
}

}  // namespace flowgrpo::cuda
