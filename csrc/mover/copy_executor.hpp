// The threads that serve the lanes between device and host.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "mover/device_copier.hpp"
#include "mover/scheduler.hpp"

namespace kvtier {

class CopyExecutor {
 public:
  // `verify_host`: compare a host page with its checksum before the device gets it, also when it never left RAM.
  CopyExecutor(Scheduler& scheduler, HostArena& host, std::unique_ptr<DeviceCopier> copier, unsigned threads,
               bool verify_host);
  ~CopyExecutor() { join(); }
  void join();               // after the scheduler was closed
  std::string note() const;  // how many threads there are for want of more; empty: all

 private:
  void run(unsigned worker);

  Scheduler& scheduler_;
  HostArena& host_;
  std::unique_ptr<DeviceCopier> copier_;
  bool verify_host_;
  unsigned wanted_;
  std::vector<std::thread> threads_;
};

}  // namespace kvtier
