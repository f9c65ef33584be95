// Classifier-free guidance of one block of lanes, with the rescale of whole tokens (a power of two of at most 1,024 channels).
#pragma once

#include "cpu.h"

namespace flowgrpo::FLOWGRPO_CPU {

// Sum over a token of at most 1,024 channels. Overwrites the values, which need room for the next power of two.
FLOWGRPO_FN float token_sum(float* values, int64_t width) {
  const int64_t padded = power_of_two(width);
  for (int64_t i = width; i < padded; ++i) values[i] = 0.0f;
  return tree_sum(values, padded);
}

FLOWGRPO_FN float norm(const float* values, int64_t width) {
  float squares[kLanes];
  for (int64_t i = 0; i < width; ++i) squares[i] = values[i] * values[i];
  return std::sqrt(token_sum(squares, width));
}

// combined, not yet rounded to the dtype of v.
FLOWGRPO_FN void guide(const float* pos, const float* neg, float scale, int64_t token, int64_t n, float* combined) {
  for (int64_t i = 0; i < n; ++i) combined[i] = guided(pos[i], neg[i], scale);
  if (token == 0) return;
  for (int64_t start = 0; start + token <= n; start += token) {
    const float factor = or_zero(norm(pos + start, token), norm(combined + start, token));
    for (int64_t i = start; i < start + token; ++i) combined[i] *= factor;
  }
}

// Gradients of both branches from that of the combined velocity; grad_pos may be grad itself.
FLOWGRPO_FN void guide_backward(const float* grad, const float* pos, const float* neg, float scale, int64_t token, int64_t n,
                                float* grad_pos, float* grad_neg) {
  const float rest = 1.0f - scale;
  if (token == 0) {
    for (int64_t i = 0; i < n; ++i) {
      const float g = grad[i];
      grad_pos[i] = scale * g;
      grad_neg[i] = rest * g;
    }
    return;
  }
  float combined[kLanes], unit[kLanes], along_unit[kLanes];
  for (int64_t start = 0; start + token <= n; start += token) {
    const float *p = pos + start, *q = neg + start, *g = grad + start;
    for (int64_t i = 0; i < token; ++i) combined[i] = guided(p[i], q[i], scale);
    const float norm_pos = norm(p, token), norm_combined = norm(combined, token);
    for (int64_t i = 0; i < token; ++i) unit[i] = or_zero(combined[i], norm_combined);
    for (int64_t i = 0; i < token; ++i) along_unit[i] = g[i] * unit[i];
    const float along = token_sum(along_unit, token), factor = or_zero(norm_pos, norm_combined);
    for (int64_t i = 0; i < token; ++i) {
      const float grad_combined = factor * (g[i] - along * unit[i]);
      grad_pos[start + i] = scale * grad_combined + along * or_zero(p[i], norm_pos);
      grad_neg[start + i] = rest * grad_combined;
    }
  }
}

}  // namespace flowgrpo::FLOWGRPO_CPU
