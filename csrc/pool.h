// Memory for large gradients on the CPU. glibc maps large allocations (above 32 MB every one) afresh and unmaps it when freed, so each backward
// pays a page fault per 4 KiB (a quarter million a GB) before a byte is written. Freed blocks are kept here and handed out
// again to requests of the same size: training asks for the same few sizes in every step.
#pragma once

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace flowgrpo::pool {

constexpr size_t kKeepBytes = size_t{2} << 30;  // at most this much is kept unused; beyond it a freed block goes back to the system
constexpr size_t kHugePage = 2 << 20;

struct Pool {
  std::mutex mutex;
  std::multimap<size_t, void*> blocks;
  size_t kept = 0;
};

inline Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: tensors may outlive static destructors
  return *instance;
}

inline size_t rounded(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

inline void* take(size_t bytes) {
  bytes = rounded(bytes);
  {
    Pool& p = pool();
    const std::lock_guard<std::mutex> lock(p.mutex);
    const auto found = p.blocks.find(bytes);
    if (found != p.blocks.end()) {
      void* data = found->second;
      p.blocks.erase(found);
      p.kept -= bytes;
      return data;
    }
  }
  void* data = std::aligned_alloc(kHugePage, bytes);
  if (!data) throw std::bad_alloc();
#if defined(__linux__)
  madvise(data, bytes, MADV_HUGEPAGE);  // 512 times fewer faults the first time, where the system allows it
#endif
  return data;
}

inline void give(void* data, size_t bytes) {
  bytes = rounded(bytes);
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  if (p.kept + bytes > kKeepBytes) {
    std::free(data);
    return;
  }
  p.blocks.emplace(bytes, data);
  p.kept += bytes;
}

}  // namespace flowgrpo::pool
