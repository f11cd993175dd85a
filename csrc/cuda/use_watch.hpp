// Which uses of memory nothing orders: a race detector for queues that are played one piece of work at a time. It knows
// no queue and no lock; whoever has them tells it who uses what, and how far each knows of the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cuda/kernels.hpp"

namespace kvtier::cuda {

struct MemoryUse {
  const void* memory;
  std::size_t bytes;
  bool writes;
};

// What a launch reads and writes: its pages, if it has to do with any, and after them the rest.
struct LaunchUses {
  std::vector<MemoryUse> all;
  std::size_t pages = 0;
};
LaunchUses uses_of(Kernel kernel, const PageLaunch& launch, unsigned blocks);

using Regions = std::map<void*, std::size_t>;  // pieces of memory, apart from each other
enum class Where { kOutside, kAcross, kInside };
Where where(const Regions& regions, const void* memory, std::size_t bytes);  // inside: of one of them

// How far an agent knows of each other: by agent, its last piece of work that is known to have ended.
class VectorClock {
 public:
  void join(const VectorClock& other);
  std::uint64_t at(std::size_t agent) const { return agent < times_.size() ? times_[agent] : 0; }
  void tick(std::size_t agent);  // it begins another piece of work

 private:
  std::vector<std::uint64_t> times_;
};

class UseWatch {
 public:
  // `name`, a piece of work of this agent, uses memory now. Two uses of the same bytes, one of them a write, by work
  // that does not know of each other are told, whether or not they did harm.
  void note(const std::string& name, std::size_t agent, const VectorClock& clock, const MemoryUse& use);
  void forget(const void* memory, std::size_t bytes);  // it was freed: what uses it next is other memory
  void tell(std::string what);                         // something else that is wrong
  void missed() noexcept { ++missed_; }                // a use could not be noted for want of memory
  std::vector<std::string> found() const;              // whoever finds none shall know that all was watched

 private:
  struct Use {
    std::uintptr_t first, end;
    std::size_t agent;
    std::uint64_t time;
    bool writes;
    std::string name;
  };

  std::vector<Use> uses_;
  std::vector<std::string> found_;
  std::uint64_t missed_ = 0;
};

}  // namespace kvtier::cuda
