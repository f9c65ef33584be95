// sde_step: prev and the squared residual of each chunk in one pass; then the log-prob of each sample.
#include "cpu.h"

namespace flowgrpo::FLOWGRPO_CPU {
namespace {

FLOWGRPO_FN void normals(const SdeStep& op, int64_t sample, int64_t offset, float* noise) {
  const uint32_t step_stream = static_cast<uint32_t>(op.step[sample] | op.stream << 16);
  const uint64_t id = static_cast<uint64_t>(op.sample_id[sample]), seed = static_cast<uint64_t>(op.seed);
  uint32_t words[4][kLanes / 4];
  for (int64_t i = 0; i < kLanes / 4; ++i) {
    const Counter c = philox(static_cast<uint32_t>(offset / 4 + i), step_stream, id, seed);
    words[0][i] = c.w0;
    words[1][i] = c.w1;
    words[2][i] = c.w2;
    words[3][i] = c.w3;
  }
  float z[4][kLanes / 4];
  for (int pair = 0; pair < 4; pair += 2) {
    for (int64_t i = 0; i < kLanes / 4; ++i) box_muller(words[pair][i], words[pair + 1][i], z[pair][i], z[pair + 1][i]);
  }
  for (int64_t i = 0; i < kLanes / 4; ++i) {
    for (int lane = 0; lane < 4; ++lane) noise[4 * i + lane] = z[lane][i];
  }
}

float step_chunk(const SdeStep& op, int64_t sample, int64_t chunk, bool stream) {
  float x_buffer[kLanes], v_buffer[kLanes], noise_buffer[kLanes], mean[kLanes], prev[kLanes];
  float square[kLanes] = {};
  const float a = op.a[sample], b = op.b[sample], s = op.s[sample];
  for (int64_t block = 0; block < kBlocks; ++block) {
    const int64_t offset = chunk * kChunk + block * kLanes;
    const int64_t n = op.length - offset < kLanes ? op.length - offset : kLanes;
    if (n <= 0) break;
    const float* x = load(op.x, sample, offset, n, x_buffer);
    const float* v = load(op.v, sample, offset, n, v_buffer);
    const float* noise = noise_buffer;
    if (op.noise.data) {
      noise = load(op.noise, sample, offset, n, noise_buffer);
    } else {
      normals(op, sample, offset, noise_buffer);
    }
    for (int64_t i = 0; i < kLanes; ++i) mean[i] = affine_mean(x[i], v[i], a, b);
    if (s == 0) {
      memcpy(prev, mean, sizeof prev);
    } else {
      for (int64_t i = 0; i < kLanes; ++i) prev[i] = mean[i] + s * noise[i];
    }
    round_lanes(prev, op.prev.dtype);
    store(op.prev, sample * op.length + offset, n, prev, stream);
    for (int64_t i = 0; i < n; ++i) {
      const float residual = prev[i] - mean[i];
      square[i] += residual * residual;
    }
  }
  fence(stream);
  return tree_sum(square, kLanes);
}

void scale_chunk(const ScaleRows& op, int64_t sample, int64_t chunk, bool stream) {
  float buffer[kLanes], out[kLanes];
  const float coefficient = op.coefficient[sample];
  for (int64_t block = 0; block < kBlocks; ++block) {
    const int64_t offset = chunk * kChunk + block * kLanes;
    const int64_t n = op.length - offset < kLanes ? op.length - offset : kLanes;
    if (n <= 0) break;
    const float* grad = load(op.grad, sample, offset, n, buffer);
    for (int64_t i = 0; i < kLanes; ++i) out[i] = grad[i] * coefficient;
    store(op.out, sample * op.length + offset, n, out, stream);
  }
  fence(stream);
}

}  // namespace

void sde_step(const SdeStep& op) {
  const int64_t per_sample = chunks(op.length);
  const bool stream = streams(op.prev, op.batch * op.length);
  for_each_chunk(op.batch, op.length, [&](int64_t sample, int64_t chunk) {
    op.partial[sample * per_sample + chunk] = step_chunk(op, sample, chunk, stream);
  });
  for (int64_t i = 0; i < op.batch; ++i) {
    const double square = lane_sum<double>(op.partial + i * per_sample, per_sample);
    op.log_prob[i] = log_density(square, op.s[i], op.length, op.gaussian, op.mean);
  }
}

void scale_rows(const ScaleRows& op) {
  const bool stream = streams(op.out, op.batch * op.length);
  for_each_chunk(op.batch, op.length, [&](int64_t sample, int64_t chunk) { scale_chunk(op, sample, chunk, stream); });
}

}  // namespace flowgrpo::FLOWGRPO_CPU
