// cfg_combine: blocks of 1,024 lanes; with the rescale every token is padded to a power of two of lanes.
#include "cuda.cuh"

namespace flowgrpo::cuda {
namespace {

// Where this thread's eight lanes lie: without rescale the lanes are the elements, else lane = token * padded + channel.
struct Place {
  int64_t sample, offset, valid;
};

struct Tiling {
  int64_t token, padded, per_sample;  // channels, lanes a token, blocks a sample
};

Tiling tiling(int64_t length, int64_t token) {
  int64_t padded = 1;
  while (padded < token) padded *= 2;
  if (padded != token && padded < kPerThread) padded = kPerThread;  // a thread's lanes then belong to one token
  const int64_t lanes = token == 0 ? length : length / token * padded;
  return {token, padded, (lanes + kLanes - 1) / kLanes};
}

__device__ __forceinline__ Place place(const Tiling& tiling, int64_t length) {
  const int64_t lane = blockIdx.x % tiling.per_sample * kLanes + threadIdx.x * kPerThread, sample = blockIdx.x / tiling.per_sample;
  if (tiling.token == 0 || tiling.token == tiling.padded) return {sample, lane, length - lane};
  const int64_t token = lane / tiling.padded, channel = lane % tiling.padded, offset = token * tiling.token + channel;
  const int64_t left = tiling.token - channel;
  return {sample, offset, offset < length ? left : 0};
}

__global__ void __launch_bounds__(kThreads) combine_kernel(const CfgCombine op, const Tiling tiling) {
  const Place at = place(tiling, op.length);
  const Lanes pos = load(op.pos, at.sample, at.offset, at.valid), neg = load(op.neg, at.sample, at.offset, at.valid);
  const Lanes combined = guide(pos, neg, op.scale[at.sample], tiling.token == 0 ? 0 : tiling.padded);
  store(op.out, at.sample * op.length + at.offset, at.valid, combined);
}

__global__ void __launch_bounds__(kThreads) backward_kernel(const CfgCombineBackward op, const Tiling tiling) {
  const Place at = place(tiling, op.length);
  const Lanes grad = load(op.grad, at.sample, at.offset, at.valid);
  Lanes pos = {}, neg = {}, grad_pos, grad_neg;
  if (tiling.token) {
    pos = load(op.pos, at.sample, at.offset, at.valid);
    neg = load(op.neg, at.sample, at.offset, at.valid);
  }
  guide_backward(grad, pos, neg, op.scale[at.sample], tiling.token == 0 ? 0 : tiling.padded, grad_pos, grad_neg);
  store(op.grad_pos, at.sample * op.length + at.offset, at.valid, grad_pos);
  store(op.grad_neg, at.sample * op.length + at.offset, at.valid, grad_neg);
}

}  // namespace

int cfg_combine(const CfgCombine& op, void* stream) {
  if (op.batch == 0) return cudaSuccess;
  const Tiling tiles = tiling(op.length, op.token);
  combine_kernel<<<static_cast<unsigned>(op.batch * tiles.per_sample), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(op, tiles);
  return cudaGetLastError();
}

int cfg_combine_backward(const CfgCombineBackward& op, void* stream) {
  if (op.batch == 0) return cudaSuccess;
  const Tiling tiles = tiling(op.length, op.token);
  backward_kernel<<<static_cast<unsigned>(op.batch * tiles.per_sample), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(op, tiles);
  return cudaGetLastError();
}

}  // namespace flowgrpo::cuda
