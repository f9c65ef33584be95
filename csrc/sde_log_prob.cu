// sde_log_prob: chunk sums, results of each sample, and the gradient.
#include "cuda.cuh"
#include "finalize.cuh"

namespace flowgrpo::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) sde_log_prob_kernel(const SdeLogProb op, int64_t n_chunks) {
  const Position p = position(op.length, n_chunks);
  const float a = op.a[p.sample], b = op.b[p.sample];
  Lanes square = {}, distance = {}, ratio = {};
#pragma unroll 1
  for (int block = 0; block < kBlocks; ++block) {
    const int64_t lane = first_lane(block), offset = p.start + lane, valid = p.left - lane;
    const Lanes x = load(op.x, p.sample, offset, valid), prev = load(op.prev, p.sample, offset, valid);
    Lanes v = load(op.v, p.sample, offset, valid);
    if (op.neg.data) {
      v = guide(v, load(op.neg, p.sample, offset, valid), op.scale[p.sample], op.token);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) v.at[i] = rounded(v.at[i], op.v.dtype);
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const float residual = prev.at[i] - affine_mean(x.at[i], v.at[i], a, b);
      square.at[i] += residual * residual;
    }
    if (op.ref.data) {
      const Lanes ref = load(op.ref, p.sample, offset, valid);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const float shift = b * (v.at[i] - ref.at[i]);
        distance.at[i] += shift * shift;
      }
    }
    if (op.old.data) {
      const Lanes old = load(op.old, p.sample, offset, valid);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const float shift = b * (v.at[i] - old.at[i]);
        ratio.at[i] += (2.0f * (prev.at[i] - affine_mean(x.at[i], old.at[i], a, b)) - shift) * shift;
      }
    }
  }
  const int64_t plane = op.batch * n_chunks;
  const float sum = block_sum(square);
  if (threadIdx.x == 0) op.partial[blockIdx.x] = sum;
  if (op.ref.data) {
    const float other = block_sum(distance);
    if (threadIdx.x == 0) op.partial[plane + blockIdx.x] = other;
  }
  if (op.old.data) {
    const float other = block_sum(ratio);
    if (threadIdx.x == 0) op.partial[2 * plane + blockIdx.x] = other;
  }
}

__global__ void __launch_bounds__(kThreads) backward_kernel(const SdeLogProbBackward op, int64_t n_chunks) {
  const Position p = position(op.length, n_chunks);
  const float a = op.a[p.sample], b = op.b[p.sample];
  double upstream = op.grad_log_prob[p.sample], kl_upstream = op.ref.data ? op.grad_kl[p.sample] : 0.0;
  if (op.grad_log_ratio) upstream += op.grad_log_ratio[p.sample];
  if (op.grad_loss) {
    upstream *= *op.grad_loss;
    kl_upstream *= *op.grad_loss;
  }
  const Weights weight = sample_weights(upstream, kl_upstream, b, op.s[p.sample], op.length, op.gaussian, op.mean);
#pragma unroll 1
  for (int block = 0; block < kBlocks; ++block) {
    const int64_t lane = first_lane(block), offset = p.start + lane, valid = p.left - lane;
    const int64_t at = p.sample * op.length + offset;
    if (weight.residual == 0 && weight.shift == 0) {  // a masked sample: whatever its latents are
      store(op.grad_v, at, valid, Lanes{});
      if (op.neg.data) store(op.grad_neg, at, valid, Lanes{});
      continue;
    }
    const Lanes x = load(op.x, p.sample, offset, valid), prev = load(op.prev, p.sample, offset, valid);
    const Lanes pos = load(op.v, p.sample, offset, valid);
    Lanes v = pos, neg = {}, grad;
    if (op.neg.data) {
      neg = load(op.neg, p.sample, offset, valid);
      v = guide(pos, neg, op.scale[p.sample], op.token);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) v.at[i] = rounded(v.at[i], op.v.dtype);
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const float value = weight.residual * (prev.at[i] - affine_mean(x.at[i], v.at[i], a, b));
      grad.at[i] = weight.residual == 0 ? 0.0f : value;
    }
    if (op.ref.data && weight.shift != 0) {
      const Lanes ref = load(op.ref, p.sample, offset, valid);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) grad.at[i] += weight.shift * (v.at[i] - ref.at[i]);
    }
    if (op.neg.data) {
      Lanes grad_pos, grad_neg;
      guide_backward(grad, pos, neg, op.scale[p.sample], op.token, grad_pos, grad_neg);
      store(op.grad_neg, at, valid, grad_neg);
      grad = grad_pos;
    }
    store(op.grad_v, at, valid, grad);
  }
}

}  // namespace

int sde_log_prob(const SdeLogProb& op, void* stream) {
  if (op.batch == 0) return cudaSuccess;
  const int64_t n_chunks = chunks(op.length);
  sde_log_prob_kernel<<<static_cast<unsigned>(op.batch * n_chunks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(op, n_chunks);
  finalize({op.partial, op.s, op.log_prob, op.kl, op.log_ratio, op.ref.data != nullptr, op.old.data != nullptr, op.gaussian, op.mean,
            op.batch, op.length, n_chunks},
           static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int sde_log_prob_backward(const SdeLogProbBackward& op, void* stream) {
  if (op.batch == 0) return cudaSuccess;
  const int64_t n_chunks = chunks(op.length);
  backward_kernel<<<static_cast<unsigned>(op.batch * n_chunks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(op, n_chunks);
  return cudaGetLastError();
}

}  // namespace flowgrpo::cuda
