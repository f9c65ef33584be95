// What the CUDA kernels share. A block of 128 threads covers 1,024 lanes, 8 neighbouring ones a thread: one 16-byte load of bf16 or two of
// fp32. Sums are those of ops/_reduce.py: neighbours inside a thread, then across the warp, then across the four warps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "math.h"
#include "ops.h"

namespace flowgrpo::cuda {

constexpr int kThreads = 128;
constexpr int kPerThread = 8;

struct Lanes {
  float at[kPerThread];
};

union Packed {
  uint4 vector;
  uint16_t half[kPerThread];
};

__device__ __forceinline__ float widen(uint16_t bits, Dtype dtype) {
  return dtype == Dtype::bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ uint16_t narrow(float value, Dtype dtype) {
  return dtype == Dtype::bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value)) : __half_as_ushort(__float2half_rn(value));
}

__device__ __forceinline__ bool aligned(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0; }

// Eight elements from `start` on, of which `valid` exist; zeros for the rest.
__device__ __forceinline__ Lanes load(const void* data, Dtype dtype, int64_t start, int64_t valid) {
  Lanes lanes;
  if (dtype == Dtype::f32) {
    const float* source = static_cast<const float*>(data) + start;
    if (valid >= kPerThread && aligned(source)) {
      const float4 low = reinterpret_cast<const float4*>(source)[0], high = reinterpret_cast<const float4*>(source)[1];
      return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) lanes.at[i] = i < valid ? source[i] : 0.0f;
    return lanes;
  }
  const uint16_t* source = static_cast<const uint16_t*>(data) + start;
  Packed packed;
  if (valid >= kPerThread && aligned(source)) {
    packed.vector = *reinterpret_cast<const uint4*>(source);
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) packed.half[i] = i < valid ? source[i] : uint16_t{0};
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) lanes.at[i] = widen(packed.half[i], dtype);
  return lanes;
}

__device__ __forceinline__ Lanes load(const Rows& rows, int64_t sample, int64_t offset, int64_t valid) {
  return load(rows.data, rows.dtype, sample * rows.stride + offset, valid);
}

__device__ __forceinline__ void store(const Out& out, int64_t start, int64_t valid, const Lanes& lanes) {
  if (out.dtype == Dtype::f32) {
    float* target = static_cast<float*>(out.data) + start;
    if (valid >= kPerThread && aligned(target)) {
      reinterpret_cast<float4*>(target)[0] = make_float4(lanes.at[0], lanes.at[1], lanes.at[2], lanes.at[3]);
      reinterpret_cast<float4*>(target)[1] = make_float4(lanes.at[4], lanes.at[5], lanes.at[6], lanes.at[7]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (i < valid) target[i] = lanes.at[i];
    }
    return;
  }
  uint16_t* target = static_cast<uint16_t*>(out.data) + start;
  Packed packed;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) packed.half[i] = narrow(lanes.at[i], out.dtype);
  if (valid >= kPerThread && aligned(target)) {
    *reinterpret_cast<uint4*>(target) = packed.vector;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (i < valid) target[i] = packed.half[i];
  }
}

// The value as a reader of the stored one will see it.
__device__ __forceinline__ float rounded(float value, Dtype dtype) {
  return dtype == Dtype::f32 ? value : widen(narrow(value, dtype), dtype);
}

// Adds neighbours across `width` threads of a warp (a power of two); every one of them gets the sum.
template <typename T>
__device__ __forceinline__ T warp_sum(T value, int width = 32) {
  for (int mask = 1; mask < width; mask *= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, mask);
  return value;
}

__device__ __forceinline__ float thread_sum(const Lanes& lanes) {
  return ((lanes.at[0] + lanes.at[1]) + (lanes.at[2] + lanes.at[3])) + ((lanes.at[4] + lanes.at[5]) + (lanes.at[6] + lanes.at[7]));
}

// Sum of 1,024 lanes, in every thread.
__device__ __forceinline__ float block_sum(const Lanes& lanes) {
  __shared__ float warps[kThreads / 32];
  const float value = warp_sum(thread_sum(lanes));
  __syncthreads();  // the array may still be read from the sum before
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  return (warps[0] + warps[1]) + (warps[2] + warps[3]);
}

// lane_sum in fp64 for a block of up to 1,024 threads, a power of two and at least 32: one lane a thread.
__device__ __forceinline__ double lanes_sum(double lane) {
  __shared__ double warps[32];
  const double value = warp_sum(lane);
  __syncthreads();
  if (threadIdx.x < 32) warps[threadIdx.x] = 0.0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(warps[threadIdx.x % 32]);
}

// Sum over each token of `token` neighbouring lanes (a power of two up to 1,024), spread to its lanes.
__device__ __forceinline__ Lanes token_sums(const Lanes& t, int64_t token) {
  if (token == 1) return t;
  const float p0 = t.at[0] + t.at[1], p1 = t.at[2] + t.at[3], p2 = t.at[4] + t.at[5], p3 = t.at[6] + t.at[7];
  if (token == 2) return {{p0, p0, p1, p1, p2, p2, p3, p3}};
  const float q0 = p0 + p1, q1 = p2 + p3;
  if (token == 4) return {{q0, q0, q0, q0, q1, q1, q1, q1}};
  const int64_t threads = token / kPerThread;
  float sum = warp_sum(q0 + q1, static_cast<int>(threads < 32 ? threads : 32));
  if (threads > 32) {
    __shared__ float warps[kThreads / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    const float low = warps[0] + warps[1], high = warps[2] + warps[3];
    sum = threads == 64 ? (threadIdx.x < 64 ? low : high) : low + high;
  }
  return {{sum, sum, sum, sum, sum, sum, sum, sum}};
}

__device__ __forceinline__ Lanes token_norms(const Lanes& values, int64_t token) {
  Lanes squares;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) squares.at[i] = values.at[i] * values.at[i];
  Lanes sums = token_sums(squares, token);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) sums.at[i] = sqrtf(sums.at[i]);
  return sums;
}

// Guidance of a block's lanes, not yet rounded to the dtype of v. token = 0: no rescale.
__device__ __forceinline__ Lanes guide(const Lanes& pos, const Lanes& neg, float scale, int64_t token) {
  Lanes combined;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) combined.at[i] = guided(pos.at[i], neg.at[i], scale);
  if (token == 0) return combined;
  const Lanes norm_pos = token_norms(pos, token), norm = token_norms(combined, token);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) combined.at[i] *= or_zero(norm_pos.at[i], norm.at[i]);
  return combined;
}

// Gradients of both branches from that of the combined velocity. Without rescale pos and neg are not read.
__device__ __forceinline__ void guide_backward(const Lanes& grad, const Lanes& pos, const Lanes& neg, float scale, int64_t token,
                                               Lanes& grad_pos, Lanes& grad_neg) {
  const float rest = 1.0f - scale;
  if (token == 0) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      grad_pos.at[i] = scale * grad.at[i];
      grad_neg.at[i] = rest * grad.at[i];
    }
    return;
  }
  Lanes combined, unit, along_unit;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) combined.at[i] = guided(pos.at[i], neg.at[i], scale);
  const Lanes norm_pos = token_norms(pos, token), norm = token_norms(combined, token);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    unit.at[i] = or_zero(combined.at[i], norm.at[i]);
    along_unit.at[i] = grad.at[i] * unit.at[i];
  }
  const Lanes along = token_sums(along_unit, token);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const float combined_grad = or_zero(norm_pos.at[i], norm.at[i]) * (grad.at[i] - along.at[i] * unit.at[i]);
    grad_pos.at[i] = scale * combined_grad + along.at[i] * or_zero(pos.at[i], norm_pos.at[i]);
    grad_neg.at[i] = rest * combined_grad;
  }
}

inline int64_t chunks(int64_t length) { return (length + kChunk - 1) / kChunk; }

// Position of this block's chunk: sample, first element, elements left from there.
struct Position {
  int64_t sample, start, left;
};

__device__ __forceinline__ Position position(int64_t length, int64_t n_chunks) {
  const int64_t start = blockIdx.x % n_chunks * kChunk;
  return {static_cast<int64_t>(blockIdx.x) / n_chunks, start, length - start};
}

// This thread's first lane in a block of the chunk.
__device__ __forceinline__ int64_t first_lane(int block) { return block * kLanes + threadIdx.x * kPerThread; }

__device__ __forceinline__ float entry(const Entries& entries, int64_t row, int64_t step) {
  const int64_t at = row * entries.row_stride + step * entries.step_stride;
  if (entries.dtype == Dtype::f32) return static_cast<const float*>(entries.data)[at];
  return widen(static_cast<const uint16_t*>(entries.data)[at], entries.dtype);
}

}  // namespace flowgrpo::cuda
