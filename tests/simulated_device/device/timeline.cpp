#include "timeline.h"

#include "memory.h"

#include <algorithm>
#include <cstring>

namespace simulated {
namespace {

bool overlap(const std::byte* a, size_t a_size, const std::byte* b, size_t b_size) {
  return a < b + b_size && b < a + a_size;
}

bool is_poison(const std::byte* begin, size_t size) {
  return std::all_of(begin, begin + size, [](std::byte byte) { return byte == std::byte{kPoison}; });
}

}  // namespace

Timeline& timeline() {
  static auto* instance = new Timeline;  // never destroyed: threads may still use the device when the process ends
  return *instance;
}

Sequence Timeline::next(Queue& queue) {
  return queue.newest = ++newest_;
}

Sequence Timeline::queue_kernel(StreamKey stream) {
  std::lock_guard lock(mutex_);
  return next(queues_[stream]);
}

void Timeline::queue_copy_to_pinned(StreamKey stream, void* target, const void* source, size_t size) {
  std::lock_guard lock(mutex_);
  auto& queue = queues_[stream];
  auto* begin = static_cast<const std::byte*>(source);
  pinned_memory().hold(target);
  queue.late.push_back({next(queue), CopyToPinned{static_cast<std::byte*>(target), {begin, begin + size}}});
  std::memset(target, kPoison, size);
}

void Timeline::queue_copy_from_pinned(
    StreamKey stream, void* target, const void* source, size_t size, std::string place) {
  std::lock_guard lock(mutex_);
  auto& queue = queues_[stream];
  auto* begin = static_cast<const std::byte*>(source);
  finish_copies_into(stream, begin, size);
  std::memcpy(target, source, size);
  pinned_memory().hold(source);
  queue.late.push_back({next(queue), CopyFromPinned{begin, {begin, begin + size}, std::move(place)}});
}

void Timeline::queue_wait(StreamKey stream, StreamKey other, Sequence upto) {
  std::lock_guard lock(mutex_);
  auto& queue = queues_[stream];
  queue.late.push_back({next(queue), WaitForStream{other, upto}});
}

Sequence Timeline::newest(StreamKey stream) {
  std::lock_guard lock(mutex_);
  return queues_[stream].newest;
}

Sequence Timeline::newest(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  Sequence found = 0;
  for (auto& [stream, queue] : queues_) {
    if (stream.device == device) found = std::max(found, queue.newest);
  }
  return found;
}

Sequence Timeline::newest() {
  std::lock_guard lock(mutex_);
  return newest_;
}

bool Timeline::is_done(StreamKey stream, Sequence upto) {
  std::lock_guard lock(mutex_);
  return queues_[stream].finished >= upto;
}

bool Timeline::is_done(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  return std::all_of(queues_.begin(), queues_.end(), [device](const auto& entry) {
    return entry.first.device != device || entry.second.finished >= entry.second.newest;
  });
}

bool Timeline::poll(StreamKey stream, Sequence upto) {
  std::lock_guard lock(mutex_);
  auto& queue = queues_[stream];
  if (queue.polled >= upto) come_to(stream, upto);
  queue.polled = std::max(queue.polled, upto);
  return queue.finished >= upto;
}

void Timeline::finish(StreamKey stream, Sequence upto) {
  std::lock_guard lock(mutex_);
  come_to(stream, upto);
}

void Timeline::finish(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  for (auto& [stream, queue] : queues_) {
    if (stream.device == device) come_to(stream, queue.newest);
  }
}

std::vector<std::string> Timeline::take_violations() {
  std::lock_guard lock(mutex_);
  return std::exchange(violations_, {});
}

void Timeline::come_to(StreamKey stream, Sequence upto) {
  auto& queue = queues_[stream];
  while (!queue.late.empty() && queue.late.front().sequence <= upto) {
    auto front = std::move(queue.late.front());
    queue.late.pop_front();
    std::visit([this](auto& work) { complete(work); }, front.work);
  }
  queue.finished = std::max(queue.finished, upto);
}

void Timeline::complete(CopyToPinned& copy) {
  if (!is_poison(copy.target, copy.bytes.size())) {
    violations_.push_back("the host wrote to pinned memory while a copy from the device into it was under way");
  }
  if (!will_be_written_again(copy)) std::memcpy(copy.target, copy.bytes.data(), copy.bytes.size());
  pinned_memory().let_go(copy.target);
}

void Timeline::complete(CopyFromPinned& copy) {
  if (std::memcmp(copy.source, copy.bytes.data(), copy.bytes.size()) != 0) {
    violations_.push_back("the pinned source of a copy to the device was written before the copy was waited for; "
                          "the copy was made at " + copy.place);
  }
  pinned_memory().let_go(copy.source);
}

void Timeline::complete(WaitForStream& wait) {
  come_to(wait.other, wait.upto);
}

// Of two copies under way into the same memory, the host can tell only once the second is done.
bool Timeline::will_be_written_again(const CopyToPinned& copy) const {
  for (const auto& [stream, queue] : queues_) {
    for (const auto& late : queue.late) {
      auto* later = std::get_if<CopyToPinned>(&late.work);
      if (later && overlap(later->target, later->bytes.size(), copy.target, copy.bytes.size())) return true;
    }
  }
  return false;
}

// A stream that copies to pinned memory and then from it finds there what it wrote.
void Timeline::finish_copies_into(StreamKey stream, const std::byte* begin, size_t size) {
  Sequence last = 0;
  for (const auto& late : queues_[stream].late) {
    auto* copy = std::get_if<CopyToPinned>(&late.work);
    if (copy && overlap(copy->target, copy->bytes.size(), begin, size)) last = late.sequence;
  }
  if (last) come_to(stream, last);
}

}  // namespace simulated
