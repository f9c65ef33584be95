// cfg_combine: blocks of lanes without the rescale; with it, blocks of whole tokens (at most 1,024 channels).
#include "cpu.h"
#include "guidance.h"

namespace flowgrpo::FLOWGRPO_CPU {
namespace {

// Whole tokens; the caller keeps them at most 1,024 channels wide.
int64_t block_length(int64_t token) { return token == 0 ? kLanes : kLanes / token * token; }

void combine_block(const CfgCombine& op, int64_t sample, int64_t offset, int64_t n, bool stream) {
  float pos_buffer[kLanes], neg_buffer[kLanes], out[kLanes];
  const float* pos = load(op.pos, sample, offset, n, pos_buffer);
  const float* neg = load(op.neg, sample, offset, n, neg_buffer);
  guide(pos, neg, op.scale[sample], op.token, n, out);
  store(op.out, sample * op.length + offset, n, out, stream);
  fence(stream);
}

void backward_block(const CfgCombineBackward& op, int64_t sample, int64_t offset, int64_t n, bool stream) {
  float grad_buffer[kLanes], pos_buffer[kLanes], neg_buffer[kLanes], grad_pos[kLanes], grad_neg[kLanes];
  const float* grad = load(op.grad, sample, offset, n, grad_buffer);
  const float* pos = op.token ? load(op.pos, sample, offset, n, pos_buffer) : grad;
  const float* neg = op.token ? load(op.neg, sample, offset, n, neg_buffer) : grad;
  guide_backward(grad, pos, neg, op.scale[sample], op.token, n, grad_pos, grad_neg);
  const int64_t at = sample * op.length + offset;
  store(op.grad_pos, at, n, grad_pos, stream);
  store(op.grad_neg, at, n, grad_neg, stream);
  fence(stream);
}

template <typename F>
void for_each_block(int64_t batch, int64_t length, int64_t token, const F& f) {
  const int64_t step = block_length(token), blocks = (length + step - 1) / step;
  torch::stable::parallel_for(0, batch * blocks, 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t offset = i % blocks * step;
      f(i / blocks, offset, length - offset < step ? length - offset : step);
    }
  });
}

}  // namespace

void cfg_combine(const CfgCombine& op) {
  const bool stream = streams(op.out, op.batch * op.length);
  for_each_block(op.batch, op.length, op.token, [&](int64_t sample, int64_t offset, int64_t n) {
    combine_block(op, sample, offset, n, stream);
  });
}

void cfg_combine_backward(const CfgCombineBackward& op) {
  const bool stream = streams(op.grad_pos, op.batch * op.length);
  for_each_block(op.batch, op.length, op.token, [&](int64_t sample, int64_t offset, int64_t n) {
    backward_block(op, sample, offset, n, stream);
  });
}

}  // namespace flowgrpo::FLOWGRPO_CPU
