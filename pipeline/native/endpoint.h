// An endpoint is this process's place in a group of ranks: it listens, connects, and owns the links.
//
// Ranks find each other by addresses that Python exchanges. Of a pair, one connects and the other
// accepts; who connects shows the group's secret first. Processes of one host meet at a Unix socket
// with an abstract name, which leaves no file behind, and pass shared memory over it.
#ifndef PIPELINE_NATIVE_ENDPOINT_H_
#define PIPELINE_NATIVE_ENDPOINT_H_

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "link.h"

namespace pipeline {

class Endpoint {
 public:
  // Listens at a Unix socket and at a TCP port of the IPv4 address `interface`.
  // `secret` is kSecretBytes long. Throws std::runtime_error if it cannot listen.
  Endpoint(int rank, const std::string& secret, const std::string& interface, uint64_t window);
  ~Endpoint();

  static constexpr size_t kSecretBytes = 16;

  const std::string& unix_name() const { return unix_name_; }
  const std::string& interface() const { return interface_; }
  int port() const { return port_; }

  // Connects to a peer that listens and that may take so long to answer, being busy or not there
  // yet; throws std::runtime_error if that fails.
  void ConnectLocal(int peer, const std::string& unix_name, double seconds);
  void ConnectTcp(int peer, const std::string& address, int port, double seconds);

  // Waits until `peer` has connected to us; false when it did not in time.
  bool Expect(int peer, double seconds);

  // The link to a peer; null if there is none.
  std::shared_ptr<Link> Find(int peer);

  // What the link to a peer goes over: "shared-memory", "unix" or "tcp"; empty if there is none.
  std::string KindOf(int peer);

  // Tells all peers that this process gives up and why; their links end with that.
  void Abort(const std::string& why);

  // Ends the links of this process, which learned from elsewhere that it cannot go on.
  void Fail(const std::string& why);

  // Ends everything; what was sent gets up to `seconds` to leave. Any number of times.
  void Close(double seconds);

  LinkCounters counters();

 private:
  struct Peer {
    std::shared_ptr<Link> link;
    std::string kind;
  };

  void Serve();
  void Accept(int listener, bool local);
  void Greet(int connection, bool local);
  void Add(int peer, std::unique_ptr<Channel> channel, const std::string& kind);

  const int rank_;
  const std::string secret_;
  const std::string interface_;
  const uint64_t window_;
  std::string unix_name_;
  int port_ = 0;
  int unix_listener_ = -1, tcp_listener_ = -1, wake_ = -1;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::map<int, Peer> peers_;
  int num_greeted_ = 0;  // connections that have yet to show the secret, each with a thread
  bool closed_ = false;

  std::thread server_;
};

}  // namespace pipeline

#endif  // PIPELINE_NATIVE_ENDPOINT_H_
