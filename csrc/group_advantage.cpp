// group_advantage: one thread and a hash table. At B = 4,096 the whole op is a fraction of a millisecond.
// Sums run in the order of the batch, as the reference's.
#include <cmath>
#include <vector>

#include "cpu.h"

namespace flowgrpo::cpu {
namespace {

// Ids of any value -> 0 .. n - 1 in order of appearance. Linear probing in a table at most half full.
int64_t dense_ids(const int64_t* group, int64_t batch, std::vector<int64_t>& ids) {
  const uint64_t mask = static_cast<uint64_t>(power_of_two(2 * batch)) - 1;
  std::vector<int64_t> slots(mask + 1, -1);  // a sample that has the id of the slot
  int64_t groups = 0;
  for (int64_t i = 0; i < batch; ++i) {
    uint64_t slot = static_cast<uint64_t>(group[i]) * 0x9E3779B97F4A7C15ull;
    for (slot = (slot ^ slot >> 32) & mask; slots[slot] >= 0 && group[slots[slot]] != group[i]; slot = (slot + 1) & mask) {
    }
    if (slots[slot] < 0) {
      slots[slot] = i;
      ids[i] = groups++;
    } else {
      ids[i] = ids[slots[slot]];
    }
  }
  return groups;
}

// Mean of the used values of each id. The second pass adds the mean of the residuals: equal values then have that very mean.
std::vector<double> means(const std::vector<double>& values, const std::vector<int64_t>& ids, const std::vector<char>& used,
                          int64_t groups) {
  std::vector<double> mean(groups, 0.0), count(groups, 0.0);
  for (size_t i = 0; i < values.size(); ++i) count[ids[i]] += used[i];
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<double> sum(groups, 0.0);
    for (size_t i = 0; i < values.size(); ++i) {
      if (used[i]) sum[ids[i]] += values[i] - mean[ids[i]];
    }
    for (int64_t g = 0; g < groups; ++g) mean[g] += sum[g] / (count[g] > 1.0 ? count[g] : 1.0);
  }
  return mean;
}

}  // namespace

void group_advantage(const GroupAdvantage& op) {
  const size_t batch = static_cast<size_t>(op.batch);
  std::vector<double> rewards(batch), square(batch);
  std::vector<char> used(batch);
  std::vector<int64_t> ids(batch);
  const int64_t groups = dense_ids(op.group, op.batch, ids);
  for (size_t i = 0; i < batch; ++i) {
    rewards[i] = entry(op.rewards, static_cast<int64_t>(i), 0);
    used[i] = std::isfinite(rewards[i]) && (!op.valid || op.valid[i]);
    if (!used[i]) rewards[i] = 0.0;
  }
  const std::vector<double> mean = means(rewards, ids, used, groups);
  std::vector<int64_t> all(op.global_std ? batch : 0, 0);
  const std::vector<int64_t>& scope = op.global_std ? all : ids;
  const int64_t scopes = op.global_std ? 1 : groups;
  std::vector<double> variance;
  if (op.scaled) {
    const std::vector<double> centre = op.global_std ? means(rewards, scope, used, scopes) : mean;
    for (size_t i = 0; i < batch; ++i) square[i] = (rewards[i] - centre[scope[i]]) * (rewards[i] - centre[scope[i]]);
    variance = means(square, scope, used, scopes);
  }
  for (size_t i = 0; i < batch; ++i) {
    const double scale = op.scaled ? std::sqrt(variance[scope[i]]) + op.eps : 1.0;
    const double value = used[i] && scale > 0 ? (rewards[i] - mean[ids[i]]) / scale : 0.0;
    op.advantage[i] = static_cast<float>(value > op.clip ? op.clip : (value < -op.clip ? -op.clip : value));
  }
}

}  // namespace flowgrpo::cpu
