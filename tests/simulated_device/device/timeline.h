// What the host has queued on the streams, and how far each stream has come.
//
// The device is as late as a device may be: it has done nothing that the host did not wait for. Kernels compute at
// once all the same, because nobody can look at device memory without a wait. What the host could see too early is
// done late: a copy to pinned memory fills its target when it is waited for, and the target is poison until then.
#pragma once

#include "streams.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

namespace simulated {

// The place in the order in which the host queued work, counted over all streams of all devices. The first is 1.
using Sequence = uint64_t;

// 0x7F7F7F7F is 3.39e38 as a float32, and not a plausible loss, count or index.
constexpr int kPoison = 0x7F;

class Timeline {
 public:
  Sequence queue_kernel(StreamKey stream);

  // The target must be pinned. Its bytes are poison until the stream has come to this copy.
  void queue_copy_to_pinned(StreamKey stream, void* target, const void* source, size_t size);

  // Copies at once, and watches the pinned source: the host must not write it before the stream has come to this copy.
  // `place` is the line that asked for the copy, for the message about a violation.
  void queue_copy_from_pinned(StreamKey stream, void* target, const void* source, size_t size, std::string place);

  // The stream goes on only when `other` has come to `upto`.
  void queue_wait(StreamKey stream, StreamKey other, Sequence upto);

  // The newest work on a stream, on all streams of a device, or at all; 0 if there was none.
  Sequence newest(StreamKey stream);
  Sequence newest(c10::DeviceIndex device);
  Sequence newest();

  bool is_done(StreamKey stream, Sequence upto);
  bool is_done(c10::DeviceIndex device);

  // Whether the stream has come so far, as a program asks that polls. It would poll forever if the device came on
  // only when it is waited for, so the answer is no for the first time, and the device gets there for the second.
  bool poll(StreamKey stream, Sequence upto);

  // Lets the stream come so far: the late copies among its work are made.
  void finish(StreamKey stream, Sequence upto);
  void finish(c10::DeviceIndex device);

  // What the host did to pinned memory while a copy was under way, since the last call; one sentence for each.
  std::vector<std::string> take_violations();

 private:
  struct CopyToPinned {
    std::byte* target;
    std::vector<std::byte> bytes;
  };
  struct CopyFromPinned {
    const std::byte* source;
    std::vector<std::byte> bytes;
    std::string place;
  };
  struct WaitForStream {
    StreamKey other;
    Sequence upto;
  };
  struct LateWork {
    Sequence sequence;
    std::variant<CopyToPinned, CopyFromPinned, WaitForStream> work;
  };
  struct Queue {
    Sequence newest = 0;
    Sequence finished = 0;
    Sequence polled = 0;
    std::deque<LateWork> late;  // kernels are not in it: they need only their number
  };

  // Those below are called with the mutex held.
  Sequence next(Queue& queue);
  void come_to(StreamKey stream, Sequence upto);
  void complete(CopyToPinned& copy);
  void complete(CopyFromPinned& copy);
  void complete(WaitForStream& wait);
  bool will_be_written_again(const CopyToPinned& copy) const;
  void finish_copies_into(StreamKey stream, const std::byte* begin, size_t size);

  // Python's lock is never taken, and no tensor is freed, while this one is held.
  std::mutex mutex_;
  Sequence newest_ = 0;
  std::map<StreamKey, Queue> queues_;
  std::vector<std::string> violations_;
};

Timeline& timeline();

}  // namespace simulated
