#include "endpoint.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace pipeline {
namespace {

constexpr uint32_t kMagic = 0x42506970;
// A stranger that connects and says nothing is sent away after this time.
constexpr timeval kGreetingTime{2, 0};
// So many may try at once; more are sent away.
constexpr int kMaxGreeted = 64;

// What the connecting side says first; the other answers with one byte.
struct Greeting {
  uint32_t magic;
  int32_t rank;
  char secret[Endpoint::kSecretBytes];
  uint32_t has_memory;  // a descriptor of shared memory for rings comes along
};

[[noreturn]] void Refuse(const std::string& what) {
  throw std::runtime_error(absl::StrCat(what, ": ", std::strerror(errno)));
}

socklen_t AbstractAddress(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  // A leading zero byte makes the name abstract: no file.
  std::memcpy(address->sun_path + 1, name.data(),
              std::min(name.size(), sizeof(address->sun_path) - 1));
  return offsetof(sockaddr_un, sun_path) + 1 + name.size();
}

sockaddr_in TcpAddress(const std::string& ip, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (inet_pton(AF_INET, ip.c_str(), &address.sin_addr) != 1) {
    errno = EINVAL;
    Refuse(absl::StrCat("not an IPv4 address: ", ip));
  }
  return address;
}

int Listen(const sockaddr* address, socklen_t size, const std::string& where) {
  const int listener = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || bind(listener, address, size) != 0 || listen(listener, 128) != 0) {
    if (listener >= 0) close(listener);
    Refuse(absl::StrCat("cannot listen at ", where));
  }
  return listener;
}

int Connect(const sockaddr* address, socklen_t size, const std::string& where) {
  const int connection = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection < 0 || connect(connection, address, size) != 0) {
    if (connection >= 0) close(connection);
    Refuse(absl::StrCat("cannot connect to ", where));
  }
  return connection;
}

void SetTimeout(int connection, timeval time) {
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
}

timeval TimeOf(double seconds) {
  const auto whole = static_cast<time_t>(seconds);
  // Zero would mean no limit.
  return {whole, std::max<suseconds_t>(1, 1e6 * (seconds - whole))};
}

// Sends the greeting, with the descriptor of the rings' memory unless it is -1.
bool SendGreeting(int connection, const Greeting& greeting, int memory) {
  iovec data{const_cast<Greeting*>(&greeting), sizeof(greeting)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (memory >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &memory, sizeof(int));
  }
  return sendmsg(connection, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(greeting));
}

bool ReceiveGreeting(int connection, Greeting* greeting, int* memory) {
  iovec data{greeting, sizeof(*greeting)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = recvmsg(connection, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC);
  *memory = -1;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    std::memcpy(memory, CMSG_DATA(header), sizeof(int));
  }
  return got == static_cast<ssize_t>(sizeof(*greeting)) && greeting->magic == kMagic;
}

// In a time that does not depend on where they differ.
bool SameSecret(const char* left, const std::string& right) {
  unsigned char difference = 0;
  for (size_t i = 0; i < right.size(); ++i) difference |= left[i] ^ right[i];
  return difference == 0;
}

}  // namespace

Endpoint::Endpoint(int rank, const std::string& secret, const std::string& interface,
                   uint64_t window)
    : rank_(rank), secret_(secret), interface_(interface), window_(window) {
  if (secret.size() != kSecretBytes) throw std::runtime_error("the secret must have 16 bytes");
  char random[12];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) Refuse("no random bytes");
  unix_name_ = absl::StrCat("pipeline-", absl::BytesToHexString({random, sizeof(random)}));
  sockaddr_un local;
  const socklen_t size = AbstractAddress(unix_name_, &local);
  unix_listener_ = Listen(reinterpret_cast<sockaddr*>(&local), size, unix_name_);
  sockaddr_in tcp = TcpAddress(interface, 0);
  tcp_listener_ = Listen(reinterpret_cast<sockaddr*>(&tcp), sizeof(tcp), interface);
  socklen_t tcp_size = sizeof(tcp);
  getsockname(tcp_listener_, reinterpret_cast<sockaddr*>(&tcp), &tcp_size);
  port_ = ntohs(tcp.sin_port);
  wake_ = eventfd(0, EFD_CLOEXEC);
  server_ = std::thread([this] { Serve(); });
  pthread_setname_np(server_.native_handle(), "pipeline-watch");
}

Endpoint::~Endpoint() { Close(0); }

void Endpoint::ConnectLocal(int peer, const std::string& unix_name, double seconds) {
  sockaddr_un address;
  const socklen_t size = AbstractAddress(unix_name, &address);
  const int connection = Connect(reinterpret_cast<sockaddr*>(&address), size, unix_name);
  const int memory = MakeRingMemory();
  Greeting greeting{kMagic, rank_, {}, memory >= 0};
  std::memcpy(greeting.secret, secret_.data(), kSecretBytes);
  char answer = 0;
  SetTimeout(connection, TimeOf(seconds));
  if (!SendGreeting(connection, greeting, memory) || recv(connection, &answer, 1, 0) != 1) {
    close(connection);
    if (memory >= 0) close(memory);
    Refuse(absl::StrCat("rank ", peer, " did not accept the connection"));
  }
  SetTimeout(connection, {0, 0});
  // The peer answers 'r' if it has mapped the rings.
  if (answer == 'r') {
    auto channel = MakeRingChannel(connection, memory, true);
    if (channel == nullptr) Refuse("cannot map shared memory");
    Add(peer, std::move(channel), "shared-memory");
  } else {
    if (memory >= 0) close(memory);
    Add(peer, MakeSocketChannel(connection), "unix");
  }
}

void Endpoint::ConnectTcp(int peer, const std::string& ip, int port, double seconds) {
  const sockaddr_in address = TcpAddress(ip, port);
  const int connection = Connect(reinterpret_cast<const sockaddr*>(&address), sizeof(address),
                                 absl::StrCat(ip, ":", port));
  Greeting greeting{kMagic, rank_, {}, 0};
  std::memcpy(greeting.secret, secret_.data(), kSecretBytes);
  char answer = 0;
  SetTimeout(connection, TimeOf(seconds));
  if (!SendGreeting(connection, greeting, -1) || recv(connection, &answer, 1, 0) != 1) {
    close(connection);
    Refuse(absl::StrCat("rank ", peer, " did not accept the connection"));
  }
  SetTimeout(connection, {0, 0});
  Add(peer, MakeSocketChannel(connection), "tcp");
}

void Endpoint::Accept(int listener, bool local) {
  const int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (connection < 0) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_greeted_ == kMaxGreeted || closed_) {
      close(connection);
      return;
    }
    ++num_greeted_;
  }
  // Strangers must hold up neither a peer that connects nor the news of one that ends.
  std::thread([this, connection, local] {
    Greet(connection, local);
    std::unique_lock<std::mutex> lock(mutex_);
    --num_greeted_;
    std::notify_all_at_thread_exit(changed_, std::move(lock));
  }).detach();
}

void Endpoint::Greet(int connection, bool local) {
  SetTimeout(connection, kGreetingTime);
  Greeting greeting;
  int memory;
  if (!ReceiveGreeting(connection, &greeting, &memory) ||
      !SameSecret(greeting.secret, secret_)) {
    close(connection);
    if (memory >= 0) close(memory);
    return;
  }
  SetTimeout(connection, {0, 0});
  std::unique_ptr<Channel> channel;
  std::string kind = local ? "unix" : "tcp";
  if (memory >= 0) {
    // A copy of the socket, so that it is still there if the memory cannot be mapped.
    const int copy = dup(connection);
    channel = MakeRingChannel(copy, memory, false);
    if (channel == nullptr) close(copy);
  }
  const char answer = channel != nullptr ? 'r' : 's';
  if (send(connection, &answer, 1, MSG_NOSIGNAL) != 1) {
    close(connection);
    return;
  }
  if (channel != nullptr) {
    close(connection);
    kind = "shared-memory";
  } else {
    channel = MakeSocketChannel(connection);
  }
  Add(greeting.rank, std::move(channel), kind);
}

void Endpoint::Add(int peer, std::unique_ptr<Channel> channel, const std::string& kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || peers_.count(peer) != 0) return;  // a second connection is not needed
  peers_[peer] = {std::make_shared<Link>(peer, std::move(channel), window_), kind};
  changed_.notify_all();
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0) return;  // only full if the server is awake anyway
}

// Accepts connections and watches over the companion sockets of the rings.
void Endpoint::Serve() {
  for (;;) {
    std::vector<pollfd> watched = {
        {unix_listener_, POLLIN, 0}, {tcp_listener_, POLLIN, 0}, {wake_, POLLIN, 0}};
    std::vector<std::shared_ptr<Link>> links;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) return;
      for (auto& [rank, peer] : peers_) {
        const int companion = peer.link->companion();
        if (companion < 0) continue;
        links.push_back(peer.link);
        watched.push_back({companion, POLLIN, 0});
      }
    }
    if (poll(watched.data(), watched.size(), -1) < 0 && errno != EINTR) return;
    if (watched[0].revents & POLLIN) Accept(unix_listener_, true);
    if (watched[1].revents & POLLIN) Accept(tcp_listener_, false);
    if (watched[2].revents & POLLIN) {
      uint64_t count;
      if (read(wake_, &count, sizeof(count)) < 0) return;
    }
    for (size_t i = 0; i < links.size(); ++i) {
      // Nothing is ever sent over a companion, so whatever happens to it is its end.
      if (watched[3 + i].revents != 0) links[i]->PeerEnded();
    }
  }
}

bool Endpoint::Expect(int peer, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                           [&] { return closed_ || peers_.count(peer) != 0; }) &&
         !closed_;
}

std::shared_ptr<Link> Endpoint::Find(int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = peers_.find(peer);
  return found == peers_.end() ? nullptr : found->second.link;
}

std::string Endpoint::KindOf(int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = peers_.find(peer);
  return found == peers_.end() ? "" : found->second.kind;
}

void Endpoint::Abort(const std::string& why) {
  std::vector<std::shared_ptr<Link>> links;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [rank, peer] : peers_) links.push_back(peer.link);
  }
  for (auto& link : links) link->Abort(why);
}

void Endpoint::Fail(const std::string& why) {
  std::vector<std::shared_ptr<Link>> links;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [rank, peer] : peers_) links.push_back(peer.link);
  }
  for (auto& link : links) link->Fail(why);
}

void Endpoint::Close(double seconds) {
  std::map<int, Peer> peers;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    peers.swap(peers_);
    changed_.notify_all();
    changed_.wait(lock, [&] { return num_greeted_ == 0; });
  }
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) == sizeof(one)) server_.join();
  for (auto& [rank, peer] : peers) peer.link->Close(seconds);
  for (int fd : {unix_listener_, tcp_listener_, wake_}) close(fd);
}

LinkCounters Endpoint::counters() {
  LinkCounters total;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [rank, peer] : peers_) {
    const LinkCounters counters = peer.link->counters();
    total.messages_sent += counters.messages_sent;
    total.messages_received += counters.messages_received;
    total.bytes_sent += counters.bytes_sent;
    total.bytes_received += counters.bytes_received;
    total.cpu_seconds += counters.cpu_seconds;
  }
  return total;
}

}  // namespace pipeline
