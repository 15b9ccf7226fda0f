// The memory of the devices, and the host's pinned memory.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <array>
#include <map>
#include <mutex>

namespace simulated {

using c10::CachingDeviceAllocator::DeviceStats;

// Device memory is host memory that only the device's kernels are shown. New and freed memory is poison.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  // On the current device.
  c10::DataPtr allocate(size_t size) override;

  // Memory that a kernel of the CPU has filled becomes memory of a device, without a copy.
  c10::DataPtr adopt(const c10::Storage& of_cpu, c10::DeviceIndex device);

  void copy_data(void* target, const void* source, size_t size) const override;

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // kernels are done before memory can be freed
  DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;

  void count_allocated(c10::DeviceIndex device, size_t size);
  void count_freed(c10::DeviceIndex device, size_t size);

 private:
  std::mutex mutex_;
  std::array<DeviceStats, kDeviceCount> stats_;
};

DeviceMemory& device_memory();

struct PinnedStats {
  size_t bytes = 0;             // that the program holds
  size_t allocations = 0;       // by this thread
  size_t freed_under_copy = 0;  // blocks that the program freed, and a copy under way still uses
};

// Pinned memory that the program frees while a copy uses it is kept until the copy is done, as by CUDA's allocator.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override;
  void free(void* data);

  bool contains(const void* pointer);

  // Between the two calls a copy uses the block that the pointer lies in.
  void hold(const void* pointer);
  void let_go(const void* pointer);

  PinnedStats stats();

  void copy_data(void* target, const void* source, size_t size) const override;
  bool record_event(void*, void*, c10::Stream) override { return true; }  // hold() has done it
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Block {
    size_t size;
    int copies = 0;
    bool freed = false;
  };
  using Blocks = std::map<const std::byte*, Block>;

  Blocks::iterator find(const void* pointer);
  void release_if_unused(Blocks::iterator block);

  std::mutex mutex_;
  Blocks blocks_;
  PinnedStats stats_;
};

PinnedMemory& pinned_memory();

}  // namespace simulated
