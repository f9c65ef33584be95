// The only file that knows torch's operators: schemas, tensors -> plain structs (ops.h), and the choice between cpu:: and cuda::.
// Outputs and scratch memory are allocated by flowgrpo_fast/ops/compiled.py, which also checks shapes; here only what would be
// memory-unsafe is checked. LibTorch stable ABI, target 2.11: one build serves every later torch and every Python >= 3.10.
#include <Python.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>

#include "math.h"
#include "ops.h"
#include "pool.h"

namespace flowgrpo {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

Dtype dtype_of(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::Float) return Dtype::f32;
  if (type == ScalarType::BFloat16) return Dtype::bf16;
  STD_TORCH_CHECK(type == ScalarType::Half, "flowgrpo_fast_C: pass fp32, bf16 or fp16");
  return Dtype::f16;
}

// [B, D] with contiguous samples.
Rows rows(const Tensor& tensor, const Tensor& like) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == like.size(0) && tensor.size(1) == like.size(1) &&
                      (tensor.size(1) == 1 || tensor.stride(1) == 1) && tensor.is_cuda() == like.is_cuda(),
                  "flowgrpo_fast_C: pass [B, D] tensors of one shape and device with contiguous samples");
  return {tensor.const_data_ptr(), tensor.stride(0), dtype_of(tensor)};
}

Rows rows(const Optional& tensor, const Tensor& like) { return tensor ? rows(*tensor, like) : Rows{}; }

Out out(const Tensor& tensor, const Tensor& like) {
  STD_TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == like.numel() && tensor.is_cuda() == like.is_cuda(),
                  "flowgrpo_fast_C: outputs are contiguous, of the inputs' size and device");
  return {tensor.mutable_data_ptr(), dtype_of(tensor)};
}

Out out(const Optional& tensor, const Tensor& like) { return tensor ? out(*tensor, like) : Out{}; }

template <typename T>
T* numbers(const Tensor& tensor, ScalarType type, int64_t count) {
  STD_TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.numel() >= count,
                  "flowgrpo_fast_C: a small operand has the wrong dtype, stride or length");
  return static_cast<T*>(tensor.data_ptr());
}

float* floats(const Tensor& tensor, int64_t count) { return numbers<float>(tensor, ScalarType::Float, count); }

float* floats(const Optional& tensor, int64_t count) { return tensor ? floats(*tensor, count) : nullptr; }

int64_t* integers(const Optional& tensor, int64_t count) {
  return tensor ? numbers<int64_t>(*tensor, ScalarType::Long, count) : nullptr;
}

// [B] or [B, T], any strides.
Entries entries(const Optional& tensor, bool bytes = false) {
  if (!tensor) return {};
  const int64_t dims = tensor->dim();
  return {tensor->const_data_ptr(), tensor->stride(0), dims == 2 ? tensor->stride(1) : 0,
          bytes ? Dtype::f32 : dtype_of(*tensor)};
}

int64_t chunk_count(int64_t length) { return (length + kChunk - 1) / kChunk; }

// Runs cpu::op or cuda::op on the device of `like`, on torch's current stream there.
template <typename Op, typename OnCpu, typename OnCuda>
void run(const Tensor& like, const Op& op, OnCpu on_cpu, OnCuda on_cuda) {
#ifdef USE_CUDA
  if (like.is_cuda()) {
    torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream) == 0, "no current CUDA stream");
    const int error = on_cuda(op, stream);
    STD_TORCH_CHECK(error == 0, "flowgrpo_fast_C: a kernel was not launched, CUDA error ", error,
                    " (209: built for another architecture; 9: more than 2^31 blocks)");
    return;
  }
#endif
  on_cpu(op);
}

#ifdef USE_CUDA
#define FLOWGRPO_CUDA(name) cuda::name
#else
#define FLOWGRPO_CUDA(name) nullptr
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FLOWGRPO_FASTEST(name) (__builtin_cpu_supports("avx2") ? avx2::name : cpu::name)
#else
#define FLOWGRPO_FASTEST(name) cpu::name
#endif

void sde_step(const Tensor& x, const Tensor& v, const Tensor& a, const Tensor& b, const Tensor& s, const Optional& noise,
              int64_t seed, const Optional& step, const Optional& sample_id, int64_t stream, const Tensor& prev,
              const Tensor& partial, const Tensor& log_prob, bool gaussian, bool mean) {
  const int64_t batch = x.size(0), length = x.size(1);
  STD_TORCH_CHECK(noise || (step && sample_id), "flowgrpo_fast_C: pass noise, or step and sample_id");
  const SdeStep op{batch, length, rows(x, x), rows(v, x), rows(noise, x), floats(a, batch), floats(b, batch),
                   floats(s, batch), integers(step, batch), integers(sample_id, batch), seed, stream, out(prev, x),
                   floats(partial, batch * chunk_count(length)), floats(log_prob, batch), gaussian, mean};
  run(x, op, FLOWGRPO_FASTEST(sde_step), FLOWGRPO_CUDA(sde_step));
}

void sde_log_prob(const Tensor& x, const Tensor& v, const Optional& neg, const Optional& scale, int64_t token,
                  const Tensor& prev, const Tensor& a, const Tensor& b, const Tensor& s, const Optional& ref,
                  const Optional& old, const Tensor& partial, const Tensor& log_prob, const Tensor& kl,
                  const Tensor& log_ratio, bool gaussian, bool mean) {
  const int64_t batch = x.size(0), length = x.size(1);
  const SdeLogProb op{batch, length, token, rows(x, x), rows(v, x), rows(neg, x), rows(prev, x), rows(ref, x),
                      rows(old, x), floats(a, batch), floats(b, batch), floats(s, batch), floats(scale, batch),
                      floats(partial, 3 * batch * chunk_count(length)), floats(log_prob, batch), floats(kl, batch),
                      floats(log_ratio, batch), gaussian, mean};
  run(x, op, FLOWGRPO_FASTEST(sde_log_prob), FLOWGRPO_CUDA(sde_log_prob));
}

void sde_log_prob_backward(const Tensor& grad_log_prob, const Tensor& grad_kl, const Optional& grad_log_ratio,
                           const Optional& grad_loss, const Tensor& x, const Tensor& v, const Optional& neg,
                           const Optional& scale, int64_t token, const Tensor& prev, const Tensor& a, const Tensor& b,
                           const Tensor& s, const Optional& ref, const Tensor& grad_v, const Optional& grad_neg,
                           bool gaussian, bool mean) {
  const int64_t batch = x.size(0), length = x.size(1);
  const SdeLogProbBackward op{batch, length, token, floats(grad_log_prob, batch), floats(grad_kl, batch),
                              floats(grad_log_ratio, batch), floats(grad_loss, 1), rows(x, x), rows(v, x), rows(neg, x),
                              rows(prev, x), rows(ref, x), floats(a, batch), floats(b, batch), floats(s, batch),
                              floats(scale, batch), out(grad_v, x), out(grad_neg, x), gaussian, mean};
  run(x, op, FLOWGRPO_FASTEST(sde_log_prob_backward), FLOWGRPO_CUDA(sde_log_prob_backward));
}

void scale_rows(const Tensor& grad, const Tensor& coefficient, const Tensor& result) {
  const int64_t batch = grad.size(0);
  const ScaleRows op{batch, grad.size(1), rows(grad, grad), floats(coefficient, batch), out(result, grad)};
  run(grad, op, FLOWGRPO_FASTEST(scale_rows), FLOWGRPO_CUDA(scale_rows));
}

void cfg_combine(const Tensor& pos, const Tensor& neg, const Tensor& scale, int64_t token, const Tensor& result) {
  const int64_t batch = pos.size(0);
  const CfgCombine op{batch, pos.size(1), token, rows(pos, pos), rows(neg, pos), floats(scale, batch), out(result, pos)};
  run(pos, op, FLOWGRPO_FASTEST(cfg_combine), FLOWGRPO_CUDA(cfg_combine));
}

void cfg_combine_backward(const Tensor& grad, const Optional& pos, const Optional& neg, const Tensor& scale, int64_t token,
                          const Tensor& grad_pos, const Tensor& grad_neg) {
  const int64_t batch = grad.size(0);
  const CfgCombineBackward op{batch, grad.size(1), token, rows(grad, grad), rows(pos, grad), rows(neg, grad),
                              floats(scale, batch), out(grad_pos, grad), out(grad_neg, grad)};
  run(grad, op, FLOWGRPO_FASTEST(cfg_combine_backward), FLOWGRPO_CUDA(cfg_combine_backward));
}

void group_advantage(const Tensor& rewards, const Tensor& group, const Optional& valid, bool global_std, bool scaled,
                     double eps, double clip, const Tensor& advantage) {
  const int64_t batch = rewards.size(0);
  const uint8_t* used = valid ? numbers<uint8_t>(*valid, ScalarType::Byte, batch) : nullptr;
  const GroupAdvantage op{batch, entries(rewards), integers(group, batch), used, floats(advantage, batch), global_std,
                          scaled, eps, clip};
  run(rewards, op, cpu::group_advantage, FLOWGRPO_CUDA(group_advantage));
}

// For the tests: the words behind the noise, [B, n] with n a multiple of 4.
void philox_words(const Tensor& step, const Tensor& sample_id, int64_t seed, int64_t stream, const Tensor& words) {
  const int64_t batch = step.size(0), count = words.size(1);
  const int64_t *steps = integers(step, batch), *ids = integers(sample_id, batch);
  int64_t* out = integers(words, batch * count);
  for (int64_t i = 0; i < batch; ++i) {
    for (int64_t j = 0; j < count; j += 4) {
      const Counter c = philox(static_cast<uint32_t>(j / 4), static_cast<uint32_t>(steps[i] | stream << 16),
                               static_cast<uint64_t>(ids[i]), static_cast<uint64_t>(seed));
      const uint32_t lanes[] = {c.w0, c.w1, c.w2, c.w3};
      for (int64_t k = 0; k < 4 && j + k < count; ++k) out[i * count + j + k] = lanes[k];
    }
  }
}

void policy_loss(const Tensor& log_ratio, const Optional& old_log_prob, const Tensor& adv, const Optional& step_weight,
                 const Optional& mask, const Optional& denominator, const Optional& kl, double kl_weight, double clip_low,
                 double clip_high, const Tensor& loss, const Tensor& metrics, const Tensor& grad, const Optional& grad_kl) {
  const int64_t count = log_ratio.numel();
  const PolicyLoss op{count, log_ratio.dim() == 2 ? log_ratio.size(1) : 1, entries(log_ratio), entries(old_log_prob),
                      entries(adv), entries(step_weight), entries(mask, true), floats(denominator, 1), floats(kl, count),
                      static_cast<float>(kl_weight), static_cast<float>(clip_low), static_cast<float>(clip_high),
                      floats(loss, 1), floats(metrics, 8), floats(grad_kl, count), out(grad, log_ratio)};
  run(log_ratio, op, cpu::policy_loss, FLOWGRPO_CUDA(policy_loss));
}

// An uninitialised contiguous tensor of like's shape from the pool of pool.h.
Tensor pooled_empty(const Tensor& like, ScalarType dtype) {
  std::vector<int64_t> sizes(like.dim()), strides(like.dim());
  int64_t stride = 1;
  for (int64_t i = like.dim() - 1; i >= 0; --i) {
    sizes[i] = like.size(i);
    strides[i] = stride;
    stride *= sizes[i];
  }
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "flowgrpo_fast_C: pass fp32, bf16 or fp16");
  const size_t bytes = static_cast<size_t>(like.numel()) * (dtype == ScalarType::Float ? 4 : 2);
  return torch::stable::from_blob(pool::take(bytes), sizes, strides, like.device(), dtype,
                                  [bytes](void* data) { pool::give(data, bytes); });
}

}  // namespace

STABLE_TORCH_LIBRARY(flowgrpo_fast_C, m) {
  m.def("sde_step(Tensor x, Tensor v, Tensor a, Tensor b, Tensor s, Tensor? noise, int seed, Tensor? step, Tensor? sample_id, "
        "int stream, Tensor(a!) prev, Tensor(b!) partial, Tensor(c!) log_prob, bool gaussian, bool mean) -> ()");
  m.def("sde_log_prob(Tensor x, Tensor v, Tensor? neg, Tensor? scale, int token, Tensor prev, Tensor a, Tensor b, Tensor s, "
        "Tensor? ref, Tensor? old, Tensor(a!) partial, Tensor(b!) log_prob, Tensor(c!) kl, Tensor(d!) log_ratio, "
        "bool gaussian, bool mean) -> ()");
  m.def("sde_log_prob_backward(Tensor grad_log_prob, Tensor grad_kl, Tensor? grad_log_ratio, Tensor? grad_loss, Tensor x, "
        "Tensor v, Tensor? neg, Tensor? scale, int token, Tensor prev, Tensor a, Tensor b, Tensor s, Tensor? ref, "
        "Tensor(a!) grad_v, Tensor(b!)? grad_neg, bool gaussian, bool mean) -> ()");
  m.def("scale_rows(Tensor grad, Tensor coefficient, Tensor(a!) out) -> ()");
  m.def("cfg_combine(Tensor pos, Tensor neg, Tensor scale, int token, Tensor(a!) out) -> ()");
  m.def("cfg_combine_backward(Tensor grad, Tensor? pos, Tensor? neg, Tensor scale, int token, Tensor(a!) grad_pos, "
        "Tensor(b!) grad_neg) -> ()");
  m.def("group_advantage(Tensor rewards, Tensor group, Tensor? valid, bool global_std, bool scaled, float eps, float clip, "
        "Tensor(a!) advantage) -> ()");
  m.def("policy_loss(Tensor log_ratio, Tensor? old_log_prob, Tensor adv, Tensor? step_weight, Tensor? mask, "
        "Tensor? denominator, Tensor? kl, float kl_weight, float clip_low, float clip_high, Tensor(a!) loss, "
        "Tensor(b!) metrics, Tensor(c!) grad, Tensor(d!)? grad_kl) -> ()");
  m.def("philox_words(Tensor step, Tensor sample_id, int seed, int stream, Tensor(a!) words) -> ()");
  m.def("pooled_empty(Tensor like, ScalarType dtype) -> Tensor");
}

#define FLOWGRPO_IMPL(m)                                            \
  m.impl("sde_step", TORCH_BOX(&sde_step));                         \
  m.impl("sde_log_prob", TORCH_BOX(&sde_log_prob));                 \
  m.impl("sde_log_prob_backward", TORCH_BOX(&sde_log_prob_backward)); \
  m.impl("scale_rows", TORCH_BOX(&scale_rows));                     \
  m.impl("cfg_combine", TORCH_BOX(&cfg_combine));                   \
  m.impl("cfg_combine_backward", TORCH_BOX(&cfg_combine_backward)); \
  m.impl("group_advantage", TORCH_BOX(&group_advantage));           \
  m.impl("policy_loss", TORCH_BOX(&policy_loss))

STABLE_TORCH_LIBRARY_IMPL(flowgrpo_fast_C, CPU, m) {
  FLOWGRPO_IMPL(m);
  m.impl("philox_words", TORCH_BOX(&philox_words));
  m.impl("pooled_empty", TORCH_BOX(&pooled_empty));
}

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(flowgrpo_fast_C, CUDA, m) { FLOWGRPO_IMPL(m); }
#endif

}  // namespace flowgrpo

// An empty module: importing it loads the library, whose static initialisers register the ops.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
