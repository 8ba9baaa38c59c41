// The channel over one stream socket: TCP between hosts, or a Unix socket where memory cannot be
// shared.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "channel.h"

namespace pipeline {
namespace {

constexpr int kBufferBytes = 4 << 20;

class SocketChannel : public Channel {
 public:
  explicit SocketChannel(int socket) : socket_(socket) {
    const int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // fails on a Unix socket
    setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &kBufferBytes, sizeof(kBufferBytes));
    setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &kBufferBytes, sizeof(kBufferBytes));
  }

  ~SocketChannel() override { close(socket_); }

  bool Write(const void* data, size_t size) override {
    const char* from = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t sent = send(socket_, from, size, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) return false;
      from += sent;
      size -= sent;
    }
    return true;
  }

  bool Read(void* data, size_t size) override {
    char* to = static_cast<char*>(data);
    while (size > 0) {
      const ssize_t got = recv(socket_, to, size, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      to += got;
      size -= got;
    }
    return true;
  }

  void Shutdown() override { shutdown(socket_, SHUT_RDWR); }

  int companion() const override { return -1; }

 private:
  const int socket_;
};

}  // namespace

std::unique_ptr<Channel> MakeSocketChannel(int socket) {
  return std::make_unique<SocketChannel>(socket);
}

}  // namespace pipeline
