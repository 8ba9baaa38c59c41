// The shared-memory channel: one single-producer single-consumer ring of bytes per direction.
//
// A ring is small against the cache, so that a byte is still in it when the reader copies it out.
// Whoever finds the ring full or empty spins for a moment and then sleeps on a futex.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <string>

#include "absl/strings/str_cat.h"
#include "channel.h"

namespace pipeline {
namespace {

constexpr size_t kCapacity = 4 << 20;
// Progress is published in pieces, so that reader and writer copy at the same time.
constexpr size_t kPiece = 256 << 10;
constexpr int kSpins = 100;
// Nobody changes the size of the memory any more.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// A sleeper looks again after this time even if nobody wakes it: a dead peer wakes nobody.
constexpr timespec kNap{0, 50'000'000};

// A count of bytes that one side raises and the other waits for.
struct alignas(64) Counter {
  std::atomic<uint64_t> bytes;
  std::atomic<uint32_t> changes;  // the futex word
  std::atomic<uint32_t> sleeping;
};

struct Ring {
  Counter written;
  Counter read;
  alignas(64) char data[kCapacity];
};

struct RingPair {
  Ring rings[2];
};

void Raise(Counter& counter, uint64_t bytes) {
  counter.bytes.store(bytes);
  counter.changes.fetch_add(1);
  if (counter.sleeping.exchange(0) != 0) {
    syscall(SYS_futex, &counter.changes, FUTEX_WAKE, 1, nullptr);
  }
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns the count as soon as `enough(count)`; false when the channel ended before.
template <typename Enough>
bool Await(Counter& counter, const std::atomic<bool>& ended, Enough enough, uint64_t* bytes) {
  for (int spins = 0;; ++spins) {
    const uint32_t changes = counter.changes.load();
    *bytes = counter.bytes.load();
    if (enough(*bytes)) return true;
    if (ended.load()) return false;
    if (spins < kSpins) {
      Pause();
      continue;
    }
    counter.sleeping.store(1);
    // After `sleeping`, a second look: what was raised in between would wake nobody.
    if (!enough(counter.bytes.load())) {
      syscall(SYS_futex, &counter.changes, FUTEX_WAIT, changes, &kNap);
    }
  }
}

class RingChannel : public Channel {
 public:
  RingChannel(int socket, RingPair* memory, bool first)
      : socket_(socket),
        memory_(memory),
        out_(memory->rings[first ? 0 : 1]),
        in_(memory->rings[first ? 1 : 0]) {}

  ~RingChannel() override {
    munmap(memory_, sizeof(RingPair));
    close(socket_);
  }

  bool Write(const void* data, size_t size) override {
    const char* from = static_cast<const char*>(data);
    uint64_t written = out_.written.bytes.load();
    while (size > 0) {
      uint64_t read;
      auto has_room = [&](uint64_t count) { return written - count < kCapacity; };
      if (!Await(out_.read, ended_, has_room, &read)) return false;
      const size_t place = written % kCapacity;
      const size_t room = kCapacity - (written - read);
      const size_t piece = std::min({size, room, kPiece, kCapacity - place});
      std::memcpy(out_.data + place, from, piece);
      from += piece;
      size -= piece;
      written += piece;
      Raise(out_.written, written);
    }
    return true;
  }

  bool Read(void* data, size_t size) override {
    char* to = static_cast<char*>(data);
    uint64_t read = in_.read.bytes.load();
    while (size > 0) {
      uint64_t written;
      auto has_data = [&](uint64_t count) { return count != read; };
      if (!Await(in_.written, ended_, has_data, &written)) return false;
      // The counts are the peer's to write: they must not lead outside the ring.
      if (written - read > kCapacity) return false;
      const size_t place = read % kCapacity;
      const size_t piece = std::min({size, static_cast<size_t>(written - read), kPiece,
                                     kCapacity - place});
      std::memcpy(to, in_.data + place, piece);
      to += piece;
      size -= piece;
      read += piece;
      Raise(in_.read, read);
    }
    return true;
  }

  void Shutdown() override {
    ended_.store(true);
    for (Counter* counter : {&out_.read, &in_.written}) {
      counter->changes.fetch_add(1);
      syscall(SYS_futex, &counter->changes, FUTEX_WAKE, 1, nullptr);
    }
    shutdown(socket_, SHUT_RDWR);
  }

  int companion() const override { return socket_; }

 private:
  const int socket_;
  RingPair* const memory_;
  Ring& out_;
  Ring& in_;
  std::atomic<bool> ended_{false};
};

}  // namespace

int MakeRingMemory() {
  // The name is only for people who look at the process's files, and the mode keeps others from
  // opening it there.
  uint64_t random;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) return -1;
  const std::string name = absl::StrCat("pipeline-", absl::Hex(random, absl::kZeroPad16));
  const int memory = static_cast<int>(
      syscall(SYS_memfd_create, name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory < 0) return -1;
  if (fchmod(memory, 0600) == 0 && ftruncate(memory, sizeof(RingPair)) == 0 &&
      fcntl(memory, F_ADD_SEALS, kSeals) == 0) {
    return memory;
  }
  close(memory);
  return -1;
}

std::unique_ptr<Channel> MakeRingChannel(int socket, int memory, bool first) {
  // The peer's memory is mapped only if it has the size of ours and keeps it; a shorter one would
  // fault later.
  const bool fits = lseek(memory, 0, SEEK_END) == static_cast<off_t>(sizeof(RingPair)) &&
                    (fcntl(memory, F_GET_SEALS) & kSeals) == kSeals;
  void* mapped = fits ? mmap(nullptr, sizeof(RingPair), PROT_READ | PROT_WRITE, MAP_SHARED,
                             memory, 0)
                      : MAP_FAILED;
  close(memory);
  if (mapped == MAP_FAILED) return nullptr;
  return std::make_unique<RingChannel>(socket, static_cast<RingPair*>(mapped), first);
}

}  // namespace pipeline
