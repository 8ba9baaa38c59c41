// A channel is a two-way stream of bytes to one peer process, over which a link sends its frames.
//
// Two kinds: a pair of rings in shared memory with a socket beside them, which shows the end of the
// peer (shared memory alone does not), and a plain socket. One thread may write and one may read at
// a time.
#ifndef PIPELINE_NATIVE_CHANNEL_H_
#define PIPELINE_NATIVE_CHANNEL_H_

#include <atomic>
#include <cstddef>
#include <memory>

namespace pipeline {

class Channel {
 public:
  virtual ~Channel() = default;

  // Both move exactly `size` bytes and return false when the channel has ended.
  virtual bool Write(const void* data, size_t size) = 0;
  virtual bool Read(void* data, size_t size) = 0;

  // Ends the channel: blocked and later calls return false. Any thread, any number of times.
  virtual void Shutdown() = 0;

  // The socket whose end tells the end of the peer, if it carries no data itself; else -1.
  virtual int companion() const = 0;
};

// Takes over `socket`, a connected stream socket.
std::unique_ptr<Channel> MakeSocketChannel(int socket);

// Makes anonymous shared memory for two rings. It has no name, so nothing of it can stay behind.
// Returns its file descriptor, or -1 where the system has no such memory.
int MakeRingMemory();

// Takes over both descriptors. `first` is true in exactly one of the two processes.
// Returns null if the memory cannot be mapped.
std::unique_ptr<Channel> MakeRingChannel(int socket, int memory, bool first);

}  // namespace pipeline

#endif  // PIPELINE_NATIVE_CHANNEL_H_
