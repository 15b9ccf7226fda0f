#include "memory.h"

#include "timeline.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace simulated {
namespace {

constexpr size_t kAlignment = 64;
constexpr auto kAllPools = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

std::byte* new_block(size_t size) {
  void* data = nullptr;
  const auto wanted = std::max<size_t>(size, 1);
  TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&data, kAlignment, wanted) == 0, "no memory for ", size, " bytes");
  std::memset(data, kPoison, wanted);
  return static_cast<std::byte*>(data);
}

void free_block(void* data, size_t size) {
  std::memset(data, kPoison, size);
  std::free(data);
}

// What a DataPtr of a device owns: its own memory, or the memory of a storage of the CPU.
struct DeviceBlock {
  c10::DeviceIndex device;
  size_t size;
  std::byte* own;
  c10::Storage adopted;

  DeviceBlock(c10::DeviceIndex device, size_t size, std::byte* own, c10::Storage adopted = {})
      : device(device), size(size), own(own), adopted(std::move(adopted)) {
    device_memory().count_allocated(device, size);
  }

  ~DeviceBlock() {
    device_memory().count_freed(device, size);
    if (own) free_block(own, size);
  }
};

void delete_device_block(void* block) {
  delete static_cast<DeviceBlock*>(block);
}

c10::DataPtr data_of(void* data, DeviceBlock* block) {
  return {data, block, &delete_device_block, c10::Device(kSimulated, block->device)};
}

// What a count of bytes adds to: there is no cache, so reserved and requested bytes are those in use.
std::array<c10::CachingAllocator::Stat*, 4> byte_counts(DeviceStats& stats) {
  return {
      &stats.allocated_bytes[kAllPools], &stats.active_bytes[kAllPools],
      &stats.reserved_bytes[kAllPools], &stats.requested_bytes[kAllPools]};
}

thread_local size_t pinned_by_this_thread = 0;

void free_pinned(void* data) {
  pinned_memory().free(data);
}

}  // namespace

DeviceMemory& device_memory() {
  static auto* instance = new DeviceMemory;
  return *instance;
}

c10::DataPtr DeviceMemory::allocate(size_t size) {
  const auto device = current_device();
  if (size == 0) return {nullptr, c10::Device(kSimulated, device)};
  auto* data = new_block(size);
  return data_of(data, new DeviceBlock(device, size, data));
}

c10::DataPtr DeviceMemory::adopt(const c10::Storage& of_cpu, c10::DeviceIndex device) {
  return data_of(of_cpu.mutable_data(), new DeviceBlock(device, of_cpu.nbytes(), nullptr, of_cpu));
}

void DeviceMemory::copy_data(void* target, const void* source, size_t size) const {
  std::memcpy(target, source, size);
}

void DeviceMemory::count_allocated(c10::DeviceIndex device, size_t size) {
  std::lock_guard lock(mutex_);
  auto& stats = stats_.at(device);
  stats.allocation[kAllPools].increase(1);
  for (auto* count : byte_counts(stats)) count->increase(size);
}

void DeviceMemory::count_freed(c10::DeviceIndex device, size_t size) {
  std::lock_guard lock(mutex_);
  auto& stats = stats_.at(device);
  stats.allocation[kAllPools].decrease(1);
  for (auto* count : byte_counts(stats)) count->decrease(size);
}

DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  return stats_.at(or_current(device));
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  for (auto* count : byte_counts(stats_.at(or_current(device)))) count->reset_accumulated();
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  for (auto* count : byte_counts(stats_.at(or_current(device)))) count->reset_peak();
}

PinnedMemory& pinned_memory() {
  static auto* instance = new PinnedMemory;
  return *instance;
}

c10::DataPtr PinnedMemory::allocate(size_t size) {
  auto* data = new_block(size);
  std::lock_guard lock(mutex_);
  blocks_.emplace(data, Block{size});
  stats_.bytes += size;
  pinned_by_this_thread++;
  return {data, data, &free_pinned, c10::Device(c10::kCPU)};
}

void PinnedMemory::free(void* data) {
  std::lock_guard lock(mutex_);
  auto block = find(data);
  block->second.freed = true;
  stats_.bytes -= block->second.size;
  stats_.freed_under_copy++;
  release_if_unused(block);
}

bool PinnedMemory::contains(const void* pointer) {
  std::lock_guard lock(mutex_);
  return find(pointer) != blocks_.end();
}

void PinnedMemory::hold(const void* pointer) {
  std::lock_guard lock(mutex_);
  find(pointer)->second.copies++;
}

void PinnedMemory::let_go(const void* pointer) {
  std::lock_guard lock(mutex_);
  auto block = find(pointer);
  block->second.copies--;
  release_if_unused(block);
}

PinnedStats PinnedMemory::stats() {
  std::lock_guard lock(mutex_);
  auto stats = stats_;
  stats.allocations = pinned_by_this_thread;
  return stats;
}

void PinnedMemory::copy_data(void* target, const void* source, size_t size) const {
  std::memcpy(target, source, size);
}

PinnedMemory::Blocks::iterator PinnedMemory::find(const void* pointer) {
  auto* wanted = static_cast<const std::byte*>(pointer);
  auto after = blocks_.upper_bound(wanted);
  if (after == blocks_.begin()) return blocks_.end();
  auto block = std::prev(after);
  const bool inside = wanted < block->first + std::max<size_t>(block->second.size, 1);
  return inside ? block : blocks_.end();
}

void PinnedMemory::release_if_unused(Blocks::iterator block) {
  if (!block->second.freed || block->second.copies > 0) return;
  stats_.freed_under_copy--;
  free_block(const_cast<std::byte*>(block->first), block->second.size);
  blocks_.erase(block);
}

REGISTER_ALLOCATOR(kSimulated, &device_memory());
REGISTER_HOST_ALLOCATOR(kSimulated, &pinned_memory());

}  // namespace simulated
