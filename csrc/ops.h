// What bindings.cpp hands to the kernels: plain pointers and numbers, no torch. Every op has a struct and two functions, cpu:: and cuda::.
#pragma once

#include <cstdint>

namespace flowgrpo {

enum class Dtype : int32_t { f32, bf16, f16 };

// A batch of samples of D contiguous elements each; sample i starts at element i * stride. data = nullptr: not given.
struct Rows {
  const void* data = nullptr;
  int64_t stride = 0;
  Dtype dtype = Dtype::f32;
};

// A contiguous output [B, D].
struct Out {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
};

// A small operand broadcast against entries [B, T]: element (row, step) at row * row_stride + step * step_stride.
struct Entries {
  const void* data = nullptr;
  int64_t row_stride = 0, step_stride = 0;
  Dtype dtype = Dtype::f32;
};

struct SdeStep {
  int64_t batch, length;
  Rows x, v, noise;  // noise.data = nullptr: by Philox
  const float *a, *b, *s;
  const int64_t *step, *sample_id;
  int64_t seed, stream;
  Out prev;
  float *partial, *log_prob;  // partial: scratch [B, chunks]
  bool gaussian, mean;
};

struct SdeLogProb {
  int64_t batch, length, token;  // token: channels of a token where the guidance is rescaled, else 0
  Rows x, v, neg, prev, ref, old;
  const float *a, *b, *s, *scale;
  float *partial, *log_prob, *kl, *log_ratio;  // partial: scratch [3, B, chunks]
  bool gaussian, mean;
};

struct SdeLogProbBackward {
  int64_t batch, length, token;
  const float *grad_log_prob, *grad_kl, *grad_log_ratio;  // [B] each; grad_log_ratio may be nullptr
  const float* grad_loss;                                 // [] or nullptr: multiplies all of them
  Rows x, v, neg, prev, ref;
  const float *a, *b, *s, *scale;
  Out grad_v, grad_neg;
  bool gaussian, mean;
};

struct ScaleRows {
  int64_t batch, length;
  Rows grad;
  const float* coefficient;
  Out out;
};

struct CfgCombine {
  int64_t batch, length, token;
  Rows pos, neg;
  const float* scale;
  Out out;
};

struct CfgCombineBackward {
  int64_t batch, length, token;
  Rows grad, pos, neg;
  const float* scale;
  Out grad_pos, grad_neg;
};

struct GroupAdvantage {
  int64_t batch;
  Entries rewards;
  const int64_t* group;
  const uint8_t* valid;
  float* advantage;
  bool global_std, scaled;
  double eps, clip;
};

struct PolicyLoss {
  int64_t entries, steps;
  Entries log_ratio, old_log_prob, advantage, step_weight, mask;  // old_log_prob given: log_ratio holds log-probs
  const float *denominator, *kl;
  float kl_weight, clip_low, clip_high;
  float *loss, *metrics, *grad_kl;
  Out grad;
};

namespace cpu {
void sde_step(const SdeStep&);
void sde_log_prob(const SdeLogProb&);
void sde_log_prob_backward(const SdeLogProbBackward&);
void scale_rows(const ScaleRows&);
void cfg_combine(const CfgCombine&);
void cfg_combine_backward(const CfgCombineBackward&);
void group_advantage(const GroupAdvantage&);
void policy_loss(const PolicyLoss&);
}  // namespace cpu

namespace avx2 {  // avx2.cpp
void sde_step(const SdeStep&);
void sde_log_prob(const SdeLogProb&);
void sde_log_prob_backward(const SdeLogProbBackward&);
void scale_rows(const ScaleRows&);
void cfg_combine(const CfgCombine&);
void cfg_combine_backward(const CfgCombineBackward&);
}  // namespace avx2

namespace cuda {  // stream: a cudaStream_t; the result is the launch's cudaError_t
int sde_step(const SdeStep&, void* stream);
int sde_log_prob(const SdeLogProb&, void* stream);
int sde_log_prob_backward(const SdeLogProbBackward&, void* stream);
int scale_rows(const ScaleRows&, void* stream);
int cfg_combine(const CfgCombine&, void* stream);
int cfg_combine_backward(const CfgCombineBackward&, void* stream);
int group_advantage(const GroupAdvantage&, void* stream);
int policy_loss(const PolicyLoss&, void* stream);
}  // namespace cuda

}  // namespace flowgrpo
